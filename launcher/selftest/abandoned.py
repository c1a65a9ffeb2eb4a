"""Find runs that their selftest has left behind: it was killed (SIGKILL, a reboot), or its cleanup did not end in time.

Such a run goes on: its controller is a process of its own, and only the run's budget or deadline would end it. A living
selftest holds a lock on a file, and the kernel releases the lock when the process is gone, in whatever way. So a run
that may still cost money is left behind if the lock of its selftest is free.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from launcher.exit_codes import Failure
from launcher.ledger.models import Run
from launcher.runs.runs import still_running
from launcher.settings import home

LOCK = ".lock"
"""End of the lock's name. The lock lies beside the job's folder, because nodes are sent that folder."""


def folder_of(run: str) -> Path:
    """Return the folder of a selftest's job."""
    return home() / "selftests" / run


@contextmanager
def alive(run: str) -> Iterator[None]:
    """Hold the lock of a selftest. Children do not inherit it. Raises Failure if another process holds it."""
    with _lock_of(run).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(f"a selftest called {run} runs already; give this one another name (--name)") from None
        yield


def is_abandoned(sessions: sessionmaker[Session], run: str) -> bool:
    """Return whether a run was left by its selftest and may still cost money."""
    return _is_free(_lock_of(run)) and bool(still_running(sessions, run))


def abandoned(sessions: sessionmaker[Session]) -> list[str]:
    """Return the runs that their selftests left, and that may still cost money, by name."""
    locks = {path.name.removesuffix(LOCK) for path in (home() / "selftests").glob(f"*{LOCK}")}
    with sessions() as session:
        runs = [name for name in session.scalars(select(Run.name)) if name in locks]
    return sorted(name for name in runs if is_abandoned(sessions, name))


def _lock_of(run: str) -> Path:
    folder = folder_of(run)
    return folder.with_name(folder.name + LOCK)


def _is_free(lock: Path) -> bool:
    """Return whether a selftest held this lock and no longer does. False without the file."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
