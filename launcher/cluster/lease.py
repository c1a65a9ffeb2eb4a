"""One controller per run: a lease in the ledger, with an epoch that fences whoever held it before.

A lease is taken over when its holder is dead, or has not renewed it in time. The second case may find the old
holder alive (it was frozen, say): every transaction of a controller therefore checks the epoch first, and the one
that lost it stops there.
"""

import os
import time
from dataclasses import dataclass

import psutil
from sqlalchemy.orm import Session, sessionmaker

from launcher.cluster.processes import is_alive
from launcher.exit_codes import Failure
from launcher.ledger.models import ControllerLease, Run
from launcher.ledger.store import writing

LEASE_MS = 15_000
"""How long a controller may be silent (wall time). A pass takes milliseconds; a busy machine delays it by seconds."""


class LeaseHeld(Failure):
    """Another controller looks after this run."""


class LeaseLost(Failure):
    """Another controller has taken over; this one must not act any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    run_id: int
    holder: str
    epoch: int


def this_process() -> str:
    """A holder's name: pid and start, which no later process shares."""
    return f"{os.getpid()}@{psutil.Process().create_time()}"


def holder_alive(row: ControllerLease) -> bool:
    started = row.holder.partition("@")[2]
    return is_alive(row.pid, float(started) if started else None)


def is_held(row: ControllerLease | None, now_ms: int | None = None) -> bool:
    """Whether somebody controls the run now."""
    now_ms = _wall_ms() if now_ms is None else now_ms
    return row is not None and now_ms < row.expires_wall_ms and holder_alive(row)


def is_given_up(row: ControllerLease | None) -> bool:
    """Whether nobody ever controlled the run, or its last controller left with nothing more to do."""
    return row is None or row.expires_wall_ms == 0


def take_lease(sessions: sessionmaker[Session], run: Run, holder: str, pid: int, now_ms: int | None = None) -> Lease:
    """Become the run's controller. LeaseHeld names the one there is."""
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
    """The fence: call it first in every writing transaction. LeaseLost when somebody else took over."""
    now_ms = _wall_ms() if now_ms is None else now_ms
    row = session.get(ControllerLease, lease.run_id)
    if row is None or (row.holder, row.epoch) != (lease.holder, lease.epoch):
        taker = "nobody" if row is None else f"process {row.pid}"
        raise LeaseLost(f"the lease of this run went to {taker} while this controller was silent")
    if row.expires_wall_ms < now_ms + LEASE_MS * 3 // 4:  # not in every pass: each renewal waits for the disk
        row.expires_wall_ms = now_ms + LEASE_MS


def give_up(sessions: sessionmaker[Session], lease: Lease) -> None:
    """The run is over and nothing is left to do: let the next controller start at once."""
    with writing(sessions) as session:
        row = session.get(ControllerLease, lease.run_id)
        if row is not None and (row.holder, row.epoch) == (lease.holder, lease.epoch):
            row.expires_wall_ms = 0


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
