"""Delete a run's files from this machine. The ledger keeps the run's rows and all its spending.

    run is over, no node is left -> write the removal into the ledger -> delete the folder

The removal is written first: from then on no command starts a controller in a half deleted folder. If this process is
killed between the two steps, a second removal of the run deletes the rest.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

from launcher.controller.bucket_sizes import Count, count_now
from launcher.controller.lease import is_held
from launcher.decide.facts import OVER, Stage
from launcher.exit_codes import Failure
from launcher.ledger.left_in_buckets import LeftInBucket, left_in_buckets, size_row
from launcher.ledger.models import ControllerLease, Removal, Run
from launcher.ledger.store import current_status, find_run, writing
from launcher.runs.own_folder import check_own_folder
from launcher.runs.run_buckets import buckets_of
from launcher.runs.runs import still_running


class NotRemovable(Failure):
    """The run goes on, or some of its nodes may still cost money."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remains:
    """The folder of a run on this machine, and its folders in buckets, which are never deleted."""

    folder: Path
    bytes: int
    buckets: tuple[str, ...]
    was_removed: bool
    """True if the run was removed before. The folder still exists if the earlier removal was interrupted."""


def look_at_remains(sessions: sessionmaker[Session], run_name: str) -> Remains:
    """Return the files that `remove_run` would delete and would keep. Raises NotRemovable."""
    with sessions() as session:
        run = find_run(session, run_name)
        check_removable(sessions, session, run)
        was_removed = session.get(Removal, run.id) is not None
    folder = Path(run.folder)
    # Files only: the sizes of folders and links depend on the file system.
    size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return Remains(folder=folder, bytes=size, buckets=buckets_of(run), was_removed=was_removed)


def remove_run(sessions: sessionmaker[Session], run_name: str) -> None:
    """Delete the run's folder. May be repeated, also after an interruption. Raises NotRemovable."""
    with writing(sessions) as session:
        run = find_run(session, run_name)
        check_removable(sessions, session, run)
        if session.get(Removal, run.id) is None:
            session.add(Removal(run_id=run.id, at_wall_ms=time.time_ns() // 1_000_000))
    if Path(run.folder).exists():
        shutil.rmtree(run.folder)


def count_buckets(sessions: sessionmaker[Session], run_name: str, count: Count = count_now) -> tuple[LeftInBucket, ...]:
    """Count the run's folders in buckets again, and return what the ledger then says. Blocks for some seconds at most.

    A folder that cannot be listed now keeps its earlier count.
    """
    with sessions() as session:
        run = find_run(session, run_name)
        before = {left.url: left for left in left_in_buckets(session, [run.id]).get(run.id, ())}
    if not before:
        return ()
    sizes = [size for size in count([*before]) if size.bytes is not None or before[size.url].bytes is None]
    with writing(sessions) as session:
        session.add_all(size_row(run, size) for size in sizes)
    with sessions() as session:
        return left_in_buckets(session, [run.id]).get(run.id, ())


def check_removable(sessions: sessionmaker[Session], session: Session, run: Run) -> None:
    """Raise NotRemovable unless the run is over, every node has a recorded end and the controller has left.

    Raises CopiedLedger for files that belong to another ledger.
    """
    check_own_folder(run)
    status = current_status(session, run)
    if status is None or Stage(status.status) not in OVER:
        status_text = "without a status" if status is None else status.status
        raise NotRemovable(
            f"{run.name} is {status_text}, and only a run that is finished, stopped or failed can be removed; "
            f"`spotrl down {run.name}` ends it"
        )
    if running := still_running(sessions, run.name):
        raise NotRemovable(
            f"{run.name} is {status.status}, but these may still cost money: {', '.join(running)}; "
            f"`spotrl down {run.name}` releases them, and `spotrl reap` ends what it cannot"
        )
    lease = session.get(ControllerLease, run.id)
    if lease is not None and is_held(lease):
        raise NotRemovable(
            f"{run.name} is {status.status}, but its controller (process {lease.pid}) still writes to its folder; "
            "try again in a few seconds"
        )
