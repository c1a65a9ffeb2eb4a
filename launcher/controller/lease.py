"""One controller per run: a lease in the ledger, with an epoch that fences the previous holder.

A controller takes the lease over when the holder is dead or did not renew the lease in time. In the second case the
old holder may be alive (a frozen process, for example). Every transaction of a controller therefore checks the epoch
first, and a controller without the lease stops there.
"""

import os
import time
from dataclasses import dataclass

import psutil
from sqlalchemy.orm import Session, sessionmaker

from launcher.ledger.models import ControllerLease, Run
from launcher.ledger.store import writing
from launcher.provision.local.processes import is_alive
from launcher.storage.store_lease import LeaseHeld, LeaseLost

LEASE_MS = 15_000
"""Longest silence of a controller (ms, wall time). A pass takes milliseconds; a busy machine delays a pass by
seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    run_id: int
    holder: str
    epoch: int


def this_process() -> str:
    """Return a name for this process: pid and start time, unique also against later processes."""
    return f"{os.getpid()}@{psutil.Process().create_time()}"


def holder_alive(row: ControllerLease) -> bool:
    started = row.holder.partition("@")[2]
    return is_alive(row.pid, float(started) if started else None)


def is_held(row: ControllerLease | None, now_ms: int | None = None) -> bool:
    """Return whether a live controller holds the run's lease now."""
    now_ms = _wall_ms() if now_ms is None else now_ms
    return row is not None and now_ms < row.expires_wall_ms and holder_alive(row)


def is_given_up(row: ControllerLease | None) -> bool:
    """Return whether the run never had a controller, or its last controller left after finishing all work."""
    return row is None or row.expires_wall_ms == 0


def take_lease(sessions: sessionmaker[Session], run: Run, holder: str, pid: int, now_ms: int | None = None) -> Lease:
    """Become the run's controller. Raises LeaseHeld with the process id of the current controller."""
    now_ms = _wall_ms() if now_ms is None else now_ms
    with writing(sessions) as session:
        row = session.get(ControllerLease, run.id)
        if row is not None and row.holder != holder and is_held(row, now_ms):
            raise LeaseHeld(
                f"{run.name} has a controller already (process {row.pid}); `spotrl status {run.name}` shows what it "
                f"does, `spotrl down {run.name}` ends the run"
            )
        if row is None:
            row = ControllerLease(run_id=run.id, epoch=0)
            session.add(row)
        row.holder, row.pid, row.epoch, row.expires_wall_ms = holder, pid, row.epoch + 1, now_ms + LEASE_MS
        return Lease(run_id=run.id, holder=holder, epoch=row.epoch)


def renew(session: Session, lease: Lease, now_ms: int | None = None) -> None:
    """Check and renew the lease. Call first in every writing transaction. Raises LeaseLost after a takeover."""
    now_ms = _wall_ms() if now_ms is None else now_ms
    row = session.get(ControllerLease, lease.run_id)
    if row is None or (row.holder, row.epoch) != (lease.holder, lease.epoch):
        taker = "nobody" if row is None else f"process {row.pid}"
        raise LeaseLost(f"the lease of this run went to {taker} while this controller was silent")
    if row.expires_wall_ms < now_ms + LEASE_MS * 3 // 4:  # not in every pass: each renewal waits for the disk
        row.expires_wall_ms = now_ms + LEASE_MS


def give_up(sessions: sessionmaker[Session], lease: Lease) -> None:
    """Give the lease back, so that the next controller can start at once.

    Call only when the run is over and no work is left. Does nothing if another controller has taken the lease.
    """
    with writing(sessions) as session:
        row = session.get(ControllerLease, lease.run_id)
        if row is not None and (row.holder, row.epoch) == (lease.holder, lease.epoch):
            row.expires_wall_ms = 0


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
