"""The ledger's door: open it, and ask it what several rooms ask.

One SQLite file in WAL mode: one writer at a time, readers never wait. Many short-lived processes open it (a
controller per run, every command), so opening is safe at the same moment from two of them.

The promise: what is read twice is kept once (`append_progress`), and an iteration that was redone under a newer
lineage counts once (`progress_of`).
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, event, func, inspect, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from engine.events import EngineStarted, Progress
from launcher.exit_codes import Failure
from launcher.ledger.models import (
    BillingInterval,
    ControllerLease,
    Node,
    NodeEvent,
    ProgressRow,
    Removal,
    Run,
    RunStatus,
)

REVISION = "0004"
"""The newest migration. A ledger that has it opens without loading alembic; a test compares it with the folder."""

BUSY_MS = 10_000
"""How long a writer waits for another: transactions are short, so only a machine in trouble takes longer."""


CHECKPOINT_PAGES = 1
"""Copy the write-ahead log into the ledger's file after every transaction that wrote so many pages, as far as readers
allow: a ledger whose `-wal` file is lost or was not copied with it must still name every node. It costs 0.3 ms."""


def open_ledger(path: Path, is_in_use: Callable[[ControllerLease], bool] = lambda _: False) -> sessionmaker[Session]:
    """The ledger in the file `path`, made or brought up to date if need be. Only its owner may read it.

    `is_in_use`: whether a controller holds this lease. Tables are not changed under one of an older spotrl.

    Raises Failure when the ledger is none, is of a newer spotrl, or a controller of an older one uses it.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Never opened when it exists: closing a file ends all POSIX locks that this process has on it, SQLite's too, and
    # a ledger whose reader has lost its lock is taken apart under it by the next process that closes it.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    # SQLite makes `-wal` and `-shm` with the file's own mode; what was made by an older hand is narrowed here.
    for file in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", ".lock"))):
        with suppress(FileNotFoundError):
            if file.stat().st_mode & 0o077:
                file.chmod(0o600)
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_MS / 1000})
    event.listen(engine, "connect", _prepare_connection)
    event.listen(engine, "begin", _begin)
    if _revision(engine) != REVISION:
        with _only_one(path.with_name(path.name + ".lock")):
            if _revision(engine) != REVISION:
                _check_unused(engine, is_in_use)
                _migrate(engine)
    return sessionmaker(engine, expire_on_commit=False)


@contextmanager
def writing(sessions: sessionmaker[Session]) -> Iterator[Session]:
    """A transaction that is the only writer from its first line on, so that what it reads stays true until it ends."""
    with sessions() as session, session.begin():
        session.connection(execution_options={"ledger_begin": "IMMEDIATE"})
        yield session


def find_run(session: Session, name: str) -> Run:
    """The run called `name`. LookupError names the nearest ones."""
    run = session.scalar(select(Run).where(Run.name == name))
    if run is not None:
        return run
    names = list(session.scalars(select(Run.name).order_by(Run.id.desc())))
    if not names:
        raise LookupError(f"no run is called {name}: the ledger is empty; `spotrl launch JOB` starts a run")
    near = get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
    raise LookupError(f"no run is called {name}; did you mean {', '.join(near)}? `spotrl ls` shows every run")


def check_kept(session: Session, run: Run) -> None:
    """Raise Failure if the run's files were deleted by `spotrl rm`."""
    removal = session.get(Removal, run.id)
    if removal is not None:
        day = datetime.fromtimestamp(removal.at_wall_ms / 1000, UTC).date()
        raise Failure(
            f"{run.name} was removed with `spotrl rm` on {day}: its logs and weights are not on this machine any more, "
            f"and it cannot go on; `spotrl report {run.name}` still shows what it reached and cost"
        )


def current_status(session: Session, run: Run) -> RunStatus | None:
    """The newest step of the run's life; None only for a run that `create_run` did not make."""
    return session.scalar(select(RunStatus).where(RunStatus.run_id == run.id).order_by(RunStatus.id.desc()).limit(1))


def append_status(session: Session, run: Run, status: str, reason: str, at_ms: int) -> None:
    session.add(RunStatus(run_id=run.id, at_ms=at_ms, status=status, reason=reason))


def append_progress(session: Session, run: Run, lines: Sequence[Progress]) -> int:
    """Keep what is new of `lines`; a number that the ledger has is left alone. Returns how many were new."""
    rows: list[dict[str, Any]] = [
        {
            "run_id": run.id,
            "source": line.source,
            "lineage": line.lineage,
            "seq": line.seq,
            "at_ms": line.at_ms,
            "kind": line.event.KIND,
            "event": asdict(line.event),
        }
        for line in lines
    ]
    # One row a statement: SQLite then says of each whether it was new.
    keep = insert(ProgressRow).on_conflict_do_nothing()
    return sum(session.connection().execute(keep, row).rowcount for row in rows)


def newest_ms(session: Session, run: Run) -> int:
    """The newest time that a controller of the run wrote down (run's clock). 0 when there is none."""
    of_run = select(Node.id).where(Node.run_id == run.id)
    newest = (
        select(func.max(RunStatus.at_ms)).where(RunStatus.run_id == run.id),
        select(func.max(Node.requested_ms)).where(Node.run_id == run.id),
        select(func.max(NodeEvent.at_ms)).where(NodeEvent.node_id.in_(of_run)),
        select(func.max(BillingInterval.end_ms)).where(BillingInterval.node_id.in_(of_run)),
        select(func.max(ProgressRow.at_ms)).where(ProgressRow.run_id == run.id),
    )
    return max(session.scalar(question) or 0 for question in newest)


def nodes_of(session: Session, run: Run) -> list[Node]:
    """Every node that was ever asked for, oldest first."""
    return list(session.scalars(select(Node).where(Node.run_id == run.id).order_by(Node.id)))


def node_events(session: Session, run: Run) -> list[tuple[Node, NodeEvent]]:
    """What happened to the nodes of a run, oldest first."""
    rows = session.execute(
        select(Node, NodeEvent)
        .join(NodeEvent, NodeEvent.node_id == Node.id)
        .where(Node.run_id == run.id)
        .order_by(NodeEvent.at_ms, NodeEvent.id)
    )
    return [(node, event) for node, event in rows]


def progress_of(session: Session, run: Run, kind: str) -> list[ProgressRow]:
    """The events of one kind that count, oldest first.

    A run that lost its trainer goes back to a checkpoint, under the next lineage. What older lineages said of
    iterations from there on is void: they were redone, or will be. An iteration said twice counts as the newest says.
    Kinds without an iteration are returned as they are.
    """
    rows = session.scalars(
        select(ProgressRow)
        .where(ProgressRow.run_id == run.id, ProgressRow.kind.in_([kind, EngineStarted.KIND]))
        .order_by(ProgressRow.source, ProgressRow.lineage, ProgressRow.seq)
    ).all()
    restarts = [row for row in rows if row.kind == EngineStarted.KIND]
    newest: dict[tuple[str, object], ProgressRow] = {}
    for row in (row for row in rows if row.kind == kind):
        iteration = row.event.get("iteration")
        if iteration is None or kind == EngineStarted.KIND:
            newest[row.source, (row.lineage, row.seq)] = row
        elif not any(_voids(restart, row) for restart in restarts):
            newest[row.source, iteration] = row
    return sorted(newest.values(), key=lambda row: (row.lineage, row.seq))


def _voids(restart: ProgressRow, row: ProgressRow) -> bool:
    """Whether a newer lineage began at or before what `row` tells.

    A checkpoint and an evaluation are *of* a version, which the batches before it made; so going back to version 7
    leaves what was said of version 7 true, but not that batch 7 was trained.
    """
    if restart.source != row.source or restart.lineage <= row.lineage:
        return False
    first, told = int(restart.event["iteration"]), int(row.event["iteration"])
    return told >= first if row.kind == "iteration_done" else told > first


# --- opening -----------------------------------------------------------------------------------------


def _prepare_connection(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves: the driver's own would come too late
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA synchronous=FULL")  # an intent must outlive a power cut, or a node is forgotten
    connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")


def _begin(connection: Connection) -> None:
    mode = connection.get_execution_options().get("ledger_begin", "DEFERRED")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if mode == "IMMEDIATE" else "BEGIN")


def _revision(engine: Engine) -> str | None:
    with engine.connect() as connection:
        try:
            return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
        except OperationalError as error:
            if "no such table" in str(error):
                return None
            raise


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _check_unused(engine: Engine, is_in_use: Callable[[ControllerLease], bool]) -> None:
    """Raise Failure if a controller uses this ledger: one of an older spotrl, as the tables are older than ours."""
    if (_revision(engine) or REVISION) >= REVISION:
        return  # it is new, or of a newer spotrl
    with Session(engine) as session:
        held = [lease.run_id for lease in session.scalars(select(ControllerLease)) if is_in_use(lease)]
        rows = session.execute(select(Run.name, Run.code_version).where(Run.id.in_(held))).all()
    if rows:
        names = ", ".join(name for name, _ in rows)
        versions = ", ".join(sorted({version for _, version in rows}))
        raise Failure(
            f"{names} is looked after by a controller of an older spotrl ({versions}), and its ledger "
            f"{engine.url.database} has older tables ({_revision(engine)}; this spotrl needs {REVISION}), which are "
            f"not changed under it; use spotrl {versions} until it is over, or set SPOTRL_HOME to another folder"
        )


def _migrate(engine: Engine) -> None:
    tables = [name for name in inspect(engine).get_table_names() if name != "alembic_version"]
    if _revision(engine) is None and tables:
        raise Failure(
            f"{engine.url.database} is not a ledger of spotrl: it has tables like {tables[0]} and no version; move it "
            "away, or set SPOTRL_HOME to another folder"
        )
    from alembic import command  # slow to import, and needed once in a ledger's life
    from alembic.config import Config
    from alembic.util import CommandError

    raw = engine.raw_connection()
    try:
        raw.driver_connection.execute("PRAGMA journal_mode=WAL")  # type: ignore[union-attr]
    finally:
        raw.close()
    config = Config()
    config.set_main_option("script_location", "launcher.ledger:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError:
            newest = None
            with suppress(OperationalError):  # what a newer spotrl may have renamed
                newest = connection.exec_driver_sql("SELECT code_version FROM run ORDER BY id DESC LIMIT 1").scalar()
            its_run = f"; its newest run was launched by spotrl {newest}" if newest else ""
            raise Failure(
                f"{engine.url.database} was written by a newer spotrl (its tables are {_revision(engine)}, this one "
                f"knows {REVISION} at most{its_run}); use that version, or another folder (SPOTRL_HOME)"
            ) from None
