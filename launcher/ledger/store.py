"""Open the ledger, and answer the queries that several folders share.

The ledger is one SQLite file in WAL mode: one writer at a time, readers never wait. Many short-lived processes open the
ledger (a controller per run, every command), so two processes may open the ledger at the same moment.

The promise: an event read twice is kept once (`append_progress`), and an iteration redone under a newer lineage counts
once (`progress_of`).
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import psutil
from sqlalchemy import URL, bindparam, create_engine, event, func, inspect, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

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
    TroubleRow,
)

REVISION = "0015"
"""The newest migration. A ledger at this revision opens without loading alembic. A test compares the value with the
folder."""

BUSY_MS = 10_000
"""Time that a writer waits for another writer, in milliseconds. Transactions are short, so only a machine in trouble
takes longer."""


_READ_ONCE = "progress read once"

CHECKPOINT_PAGES = 1
"""Pages written by a transaction after which SQLite copies the write-ahead log into the ledger's file, as far as
readers allow. A ledger that lost its `-wal` file, or was copied without the file, must still name every node. The
copy costs 0.3 ms."""


NETWORK_FILE_SYSTEMS = {
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.glusterfs",
    "fuse.sshfs",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "smb3",
    "smbfs",
}
"""File systems on which other computers write too. SQLite's write-ahead log needs memory that all its users share, and
their locks may be no locks: two controllers could each believe that they hold the ledger."""


def open_ledger(path: Path, is_in_use: Callable[[ControllerLease], bool] = lambda _: False) -> sessionmaker[Session]:
    """Open the ledger in the file `path`, and create or migrate the ledger if needed.

    Only the owner may read the file.

    `is_in_use`: returns whether a controller holds the given lease. Tables are not migrated while a controller of an
    older spotrl uses the ledger.

    Raises Failure if the file is no ledger, if the ledger is from a newer spotrl, if a controller of an older spotrl
    uses the ledger, or if its folder is on a network file system.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_network_folder(path.parent)
    # Never open an existing file here. Closing a file ends all POSIX locks of this process on the file, SQLite's locks
    # too. The next process that closes the ledger would then remove the write-ahead log under a reader without a lock.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    # SQLite makes `-wal` and `-shm` with the file's own mode. Files made by older versions are narrowed here.
    for file in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", ".lock"))):
        with suppress(FileNotFoundError):
            if file.stat().st_mode & 0o077:
                file.chmod(0o600)
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"timeout": BUSY_MS / 1000},
        json_deserializer=read_json,
    )
    event.listen(engine, "connect", _prepare_connection)
    event.listen(engine, "begin", _begin)
    if _revision(engine) != REVISION:
        with _only_one(path.with_name(path.name + ".lock")):
            if _revision(engine) != REVISION:
                _check_unused(engine, is_in_use)
                _migrate(engine)
    return sessionmaker(engine, expire_on_commit=False)


def open_read_only(path: Path, wait_ms: int = 1000) -> sessionmaker[Session]:
    """Open the ledger in the file `path` to read only. The ledger must exist; the tables are not migrated.

    Each session has a connection of its own, closed with the session, so an idle reader holds no lock and no file.
    `wait_ms`: time that a read waits for a locked ledger before OperationalError.
    """
    engine = create_engine(
        URL.create("sqlite", database=f"file:{quote(str(path))}", query={"mode": "ro", "uri": "true"}),
        connect_args={"timeout": wait_ms / 1000},
        json_deserializer=read_json,
        poolclass=NullPool,
    )
    return sessionmaker(engine, expire_on_commit=False)


Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(sessions: sessionmaker[Session]) -> Stamp:
    """Return inode, size and time of change of the files of a ledger opened read-only; a missing file counts as none.

    An unchanged stamp means that there is most likely nothing new to read, at a hundredth of the cost of a query.
    """
    path = unquote(str(sessions.kw["bind"].url.database).removeprefix("file:"))
    found = []
    for name in (path, f"{path}-wal"):
        try:
            file = os.stat(name)
            found.append((file.st_ino, file.st_size, file.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def read_json(text: str) -> Any:
    """Read a JSON column. A long run has tens of thousands of events, and msgspec takes a third of the time of `json`.

    Only `json` reads a NaN, which an event of an older version may hold.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text)


@contextmanager
def writing(sessions: sessionmaker[Session]) -> Iterator[Session]:
    """Open a transaction that is the only writer from the start.

    Rows that the transaction reads stay true until its end.
    """
    with sessions() as session, session.begin():
        session.connection(execution_options={"ledger_begin": "IMMEDIATE"})
        yield session


def find_run(session: Session, name: str) -> Run:
    """Return the run called `name`. Raises LookupError with the nearest names."""
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
    """Return the newest status of the run; None only for a run that `create_run` did not make."""
    return session.scalar(select(RunStatus).where(RunStatus.run_id == run.id).order_by(RunStatus.id.desc()).limit(1))


def append_status(session: Session, run: Run, status: str, reason: str, at_ms: int) -> None:
    session.add(RunStatus(run_id=run.id, at_ms=at_ms, status=status, reason=reason))


def trouble_of(session: Session, run: Run) -> str:
    """Return the errors of the controller's last pass, in words; empty if the pass succeeded."""
    newest = select(TroubleRow.text).where(TroubleRow.run_id == run.id).order_by(TroubleRow.id.desc()).limit(1)
    return session.scalar(newest) or ""


def newest_event(session: Session, run: Run) -> int:
    """Return the id of the newest event of the run's nodes; 0 if none. Ids only grow."""
    of_run = select(Node.id).where(Node.run_id == run.id)
    return session.scalar(select(func.max(NodeEvent.id)).where(NodeEvent.node_id.in_(of_run))) or 0


def append_progress(session: Session, run: Run, lines: Sequence[Progress]) -> int:
    """Append the new events of `lines`, and skip sequence numbers already in the ledger.

    Return the number of new events.
    """
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
    # One row per statement, because SQLite then reports for each row if the row was new.
    keep = insert(ProgressRow).on_conflict_do_nothing()
    return sum(session.connection().execute(keep, row).rowcount for row in rows)


def newest_ms(session: Session, run: Run) -> int:
    """Return the newest time that a controller of the run recorded (run's clock); 0 if none."""
    of_run = select(Node.id).where(Node.run_id == run.id)
    newest = (
        select(func.max(RunStatus.at_ms)).where(RunStatus.run_id == run.id),
        select(func.max(Node.requested_ms)).where(Node.run_id == run.id),
        select(func.max(NodeEvent.at_ms)).where(NodeEvent.node_id.in_(of_run)),
        select(func.max(BillingInterval.end_ms)).where(BillingInterval.node_id.in_(of_run)),
        select(func.max(ProgressRow.at_ms)).where(ProgressRow.run_id == run.id),
    )
    return max(session.scalar(question) or 0 for question in newest)


NODES_OF_RUN = select(Node).where(Node.run_id == bindparam("run_id")).order_by(Node.id)
NODE_IDS_OF_RUN = select(Node.id).where(Node.run_id == bindparam("run_id"))
"""Statements with the parameter `run_id`. A pass of a controller asks about thirty questions, and writing a statement
takes twice as long as the answer, so the frequent ones are written once."""


def nodes_of(session: Session, run: Run) -> list[Node]:
    """Return every node that was ever requested, oldest first."""
    return list(session.scalars(NODES_OF_RUN, {"run_id": run.id}))


def node_events(session: Session, run: Run) -> list[tuple[Node, NodeEvent]]:
    """Return the events of a run's nodes, oldest first."""
    rows = session.execute(
        select(Node, NodeEvent)
        .join(NodeEvent, NodeEvent.node_id == Node.id)
        .where(Node.run_id == run.id)
        .order_by(NodeEvent.at_ms, NodeEvent.id)
    )
    return [(node, event) for node, event in rows]


def progress_of(session: Session, run: Run, kind: str) -> list[ProgressRow]:
    """Return the valid events of one kind, oldest first.

    A run that lost its trainer goes back to a checkpoint, under the next lineage. Events of older lineages are void
    from the checkpoint's iteration on, because the iterations were redone or will be. If an iteration was reported
    twice, the newest report counts. Kinds without an iteration are returned unchanged.
    """
    kept: dict[tuple[int, str], list[ProgressRow]] | None = session.info.get(_READ_ONCE)
    if kept is None:
        return _progress_of(session, run, kind)
    if (run.id, kind) not in kept:
        kept[run.id, kind] = _progress_of(session, run, kind)
    return list(kept[run.id, kind])


@contextmanager
def reading_once(session: Session) -> Iterator[None]:
    """Within the block, `progress_of` reads the events of each kind once. The block must not add events.

    A report asks for the same events many times, and a long run has thousands.
    """
    if _READ_ONCE in session.info:
        yield
        return
    session.info[_READ_ONCE] = {}
    try:
        yield
    finally:
        del session.info[_READ_ONCE]


def _progress_of(session: Session, run: Run, kind: str) -> list[ProgressRow]:
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
    """Return whether a newer lineage began at or before the iteration of `row`.

    A checkpoint and an evaluation belong to a weight version, which the batches before that version have trained. A
    return to version 7 keeps the events of version 7 true, but voids the training of batch 7.
    """
    if restart.source != row.source or restart.lineage <= row.lineage:
        return False
    first, reported = int(restart.event["iteration"]), int(row.event["iteration"])
    return reported >= first if row.kind == "iteration_done" else reported > first


# --- opening -----------------------------------------------------------------------------------------


def _refuse_network_folder(folder: Path) -> None:
    place = folder.resolve()
    mounts = [
        (len(Path(mount.mountpoint).parts), number, mount)
        for number, mount in enumerate(psutil.disk_partitions(all=True))
        if place.is_relative_to(mount.mountpoint)
    ]
    kind = max(mounts)[2].fstype.lower() if mounts else ""
    if kind in NETWORK_FILE_SYSTEMS:
        raise Failure(
            f"{folder} is on a network file system ({kind}), where SQLite cannot keep a ledger safely; name a folder "
            "on a disk of this machine: export SPOTRL_HOME=/a/local/folder"
        )


def _prepare_connection(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the code sends BEGIN itself: the driver's own BEGIN would come too late
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
    """Raise Failure if a controller of an older spotrl uses this ledger.

    Only called with tables older than this spotrl's.
    """
    if (_revision(engine) or REVISION) >= REVISION:
        return  # a new ledger, or a ledger of a newer spotrl
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
        (mode,) = raw.driver_connection.execute("PRAGMA journal_mode=WAL").fetchone()  # type: ignore[union-attr]
    finally:
        raw.close()
    if mode != "wal":
        raise Failure(
            f"{engine.url.database} cannot have a write-ahead log (its journal is {mode!r}), which its readers need; "
            "name a folder on a disk of this machine: export SPOTRL_HOME=/a/local/folder"
        )
    config = Config()
    config.set_main_option("script_location", "launcher.ledger:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError:
            newest = None
            with suppress(OperationalError):  # a newer spotrl may have renamed the column
                newest = connection.exec_driver_sql("SELECT code_version FROM run ORDER BY id DESC LIMIT 1").scalar()
            its_run = f"; its newest run was launched by spotrl {newest}" if newest else ""
            raise Failure(
                f"{engine.url.database} was written by a newer spotrl (its tables are {_revision(engine)}, this one "
                f"knows {REVISION} at most{its_run}); use that version, or another folder (SPOTRL_HOME)"
            ) from None
