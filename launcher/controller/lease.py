"""One controller per run: a lease in the ledger, with an epoch that fences the previous holder.

A controller takes the lease over when the holder is dead or did not renew the lease in time. In the second case the
old holder may be alive (a frozen process, for example). Every transaction of a controller therefore checks the epoch
first, and a controller without the lease stops there.

A ledger can be copied: to another laptop, from a backup. The copy names a process of the first machine, so a holder is
a process of one machine since its last start. The lease in the bucket (launcher/storage/store_lease.py) tells a copy
from its original: its holder is one ledger file of one machine, and nothing in the copied folder says which.
"""

import os
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

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


@cache
def this_machine() -> str:
    """Return a name for this machine since its last start, and for the container that this process sees.

    Machines made from one image may share `/etc/machine-id`. The kernel draws the id of a start at random.
    """
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = _start_id_of_macos() or f"{uuid.getnode()}-{round(psutil.boot_time())}"
    try:
        container = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        container = ""
    return blake2b(f"{started} {container}".encode(), digest_size=8).hexdigest()


def _start_id_of_macos() -> str:
    if sys.platform != "darwin":
        return ""
    asked = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True)
    return asked.stdout.strip()


def this_process() -> str:
    """Return a name for this process: host, machine, pid and start time; unique also against later processes."""
    return f"{socket.gethostname()} {this_machine()} {os.getpid()}@{psutil.Process().create_time()}"


def this_ledger(file: Path) -> str:
    """Return a name for a ledger's file on this machine. A copy of the file has another name.

    Controllers of one ledger file share the name: the lease in the ledger decides between them. The file keeps its
    inode as long as it is the same file.
    """
    stat = file.stat()
    return f"{this_machine()} {stat.st_dev} {stat.st_ino}"


def _parts(row: ControllerLease) -> tuple[str, str, str]:
    """Return start time, machine and host of the holder; empty where the holder does not name them."""
    process, _, started = row.holder.partition("@")
    host, machine, _ = ["", "", *process.split(" ")][-3:]
    return started, machine, host


def host_of(row: ControllerLease) -> str:
    """Return the host of the holder; empty if it is this machine, or not named."""
    _, machine, host = _parts(row)
    return host if machine not in ("", this_machine()) else ""


def holder_alive(row: ControllerLease) -> bool:
    """Return whether the holder's process lives. A process of another machine cannot be seen, so it counts as alive."""
    started, machine, _ = _parts(row)
    if machine not in ("", this_machine()):
        return True
    return is_alive(row.pid, float(started) if started else None)


def was_elsewhere(row: ControllerLease | None) -> bool:
    """Return whether the last controller of this ledger ran on another host and did not finish: this is a copy."""
    return row is not None and not is_given_up(row) and host_of(row) not in ("", socket.gethostname())


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
                f"{run.name} has a controller already (process {row.pid}{_on(row)}); `spotrl status {run.name}` shows "
                f"what it does, `spotrl down {run.name}` ends the run"
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
        taker = "nobody" if row is None else f"process {row.pid}{_on(row)}"
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


def _on(row: ControllerLease) -> str:
    host = host_of(row)
    return f" on {host}, seen in this copy of its ledger" if host else ""


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
