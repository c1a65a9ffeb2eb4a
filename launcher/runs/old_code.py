"""Remove copies of the code (own_code.py) that nothing uses any more: an upgrade leaves 17 MB behind.

A copy stays if one of these holds. Where none can be told, every copy stays.

    it is the copy of the running version
    a run that is not finished names it in its folder: controllers and nodes started from it, or it can be resumed
    a process of this machine has it in its environment: SkyPilot's API server outlives the run that started it

A run that names no copy and never had a controller keeps none: its launch has not come so far, or died before. A launch
that goes on makes its copy anew.

A controller is started under a shared lock: from the look for its copy until the run names the copy and the process is
there. Removal needs the lock for itself and does not wait for it, so a copy never goes between the two.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.durable import write_durably
from launcher.controller.lease import is_given_up
from launcher.decide.facts import OVER, Stage
from launcher.ledger.models import ControllerLease, Removal, Run
from launcher.ledger.store import current_status
from launcher.runs.own_code import copies_in, keep_code

NOTE = "code"
"""File in a run's folder with the names of the copies from which its controllers started, one a line."""

OLD = ".old-"
"""Beginning of the name of a copy that is being removed."""


@contextlib.contextmanager
def code_for(home: Path, run_folder: Path) -> Iterator[Path]:
    """Yield the copy of the running code, made if missing, and name it in the run's folder. Raises OSError.

    Start the process that uses the copy before the block ends. No copy is removed meanwhile.
    """
    with _lock(home, fcntl.LOCK_SH):
        code = keep_code(home)
        names = _noted(run_folder) or set()
        run_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if code.name not in names:
            write_durably(run_folder / NOTE, "".join(f"{name}\n" for name in sorted({*names, code.name})).encode())
        yield code


def remove_unused_code(session: Session, home: Path, current: Path) -> list[str]:
    """Remove every copy that nothing uses, and return their names. Does nothing while a controller is being started.

    `current`: the copy of the running version.
    """
    with contextlib.suppress(BlockingIOError), _lock(home, fcntl.LOCK_EX | fcntl.LOCK_NB):
        copies = {copy.name for copy in copies_in(home)} - {current.name}
        used = used_by_runs(session) if copies else set()
        if used is None:
            return []
        unused = copies - used
        unused -= used_by_processes(unused) if unused else set()
        for leftover in current.parent.glob(".*"):  # of a process that was killed while it made or removed a copy
            shutil.rmtree(leftover, ignore_errors=True)
        for name in unused:
            # A half removed copy must not have the name of a whole one.
            shutil.rmtree((current.parent / name).rename(current.parent / f"{OLD}{name}"), ignore_errors=True)
        return sorted(unused)
    return []


def used_by_runs(session: Session) -> set[str] | None:
    """Return the copies of runs that go on or can be resumed. None: one with a controller names none."""
    used: set[str] = set()
    for run in session.scalars(select(Run)):
        status = current_status(session, run)
        stage = Stage(status.status) if status is not None else Stage.PLANNED
        lease = session.get(ControllerLease, run.id)
        is_done = stage is Stage.FINISHED and is_given_up(lease)
        if is_done or session.get(Removal, run.id) is not None:
            continue
        names = _noted(Path(run.folder))
        if names is None and stage not in OVER and lease is not None:
            return None  # started by a version that wrote no note
        used |= names or set()
    return used


def used_by_processes(names: set[str]) -> set[str]:
    """Return which of these copies are in the environment of a process."""
    used: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            environment = "\n".join(process.environ().values())
            used |= {name for name in names if name in environment}
    return used


def _noted(run_folder: Path) -> set[str] | None:
    try:
        return set((run_folder / NOTE).read_text().split())
    except OSError:
        return None


@contextlib.contextmanager
def _lock(home: Path, how: int) -> Iterator[None]:
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(home / "code.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)
