"""Enforce the spend deadline of a cloud's instance, counted on the instance's own boot clock.

node.json's `money_left_ms`, or later `money.json` {"left_ms", "told"} -> milliseconds left at a moment of this boot

Promises: no clock jump moves the deadline, and a restarted agent does not extend the deadline (`armed.json` records the
start of the count and the order behind the deadline). After a reboot, the time with the machine off is counted by the
wall clock. No order moves the deadline past node.json's `money_longest_ms`, counted from the first order. A controller
with a wrong clock, or with a lost record of spending, can therefore not run an instance for ever.
`python -m engine.node.spend_guard FOLDER` is the guard: one process per node folder, in its own session. The guard
outlives the agent. The guard terminates the instance shortly after its deadline if the agent did not. The guard also
terminates an instance with neither an agent nor a controller (alone.py). Standard library only: the guard stays small,
and no engine code can break the guard.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.durable import write_durably
from engine.mark import MARK
from engine.node.alone import Alone, copy_logs
from engine.node.self_termination import terminate_instance

LATE_MS = 20_000
"""Milliseconds after the deadline before the guard acts. The agent acts first, because the agent copies its last
logs."""
LOOK_SECONDS = 1.0
KEEP_MS = 10_000
"""Interval between two writes of the remaining time. After a reboot the count starts from the last write."""
START_SECONDS = 5.0
"""Minimum seconds between two starts of a guard."""
AGAIN_SECONDS = 60.0
"""Seconds after which the guard repeats a termination that had no effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment by the machine's clocks. `boot_ms` runs on in a suspended machine, and cannot be set."""

    boot_id: str
    boot_ms: int
    wall_ms: int


def this_moment() -> Moment:
    return Moment(
        boot_id=boot_id(),
        boot_ms=time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000,
        wall_ms=time.time_ns() // 1_000_000,
    )


def boot_id() -> str:
    """Return the boot id, which changes at every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Armed:
    """A deadline in progress.

    At the moment `at`, the newest order left `left_ms`, and no order may leave more than `longest_ms`.

    `node` and `order` identify the orders behind the deadline.
    """

    at: Moment
    left_ms: int
    longest_ms: int | None
    node: str
    order: int | None

    def at_moment(self, now: Moment) -> "Armed":
        """Return the same deadlines, counted from `now`."""
        if now.boot_id == self.at.boot_id:
            passed_ms = now.boot_ms - self.at.boot_ms
        else:
            # The machine rebooted. The wall clock gives the time off, and the time of this boot is a lower bound.
            passed_ms = max(now.boot_ms, now.wall_ms - self.at.wall_ms)
        longest_ms = None if self.longest_ms is None else self.longest_ms - passed_ms
        return replace(self, at=now, left_ms=self.left_ms - passed_ms, longest_ms=longest_ms)


class TimeLeft:
    """Remaining time of the node. The agent and the guard each read the node's folder independently."""

    def __init__(self, folder: Path, now: Callable[[], Moment] = this_moment) -> None:
        self._folder, self._now = folder, now
        self._armed: Armed | None = None

    def left_ms(self) -> int | None:
        """Return the milliseconds until the deadline: negative after the deadline, None without a deadline."""
        now = self._now()
        node, node_left_ms, longest_ms = self._node_order()
        order, order_left_ms = self._latest_order()
        deadline = self._armed or self._kept()
        before = None if deadline is None else deadline.at_moment(now)
        if before is not None and before.longest_ms is not None:
            longest_ms = before.longest_ms  # the first order's limit stays
        armed = before
        # The newest order counts. If both files are new, nothing watched the folder before, and money.json is the newer
        # file.
        if order is not None and (before is None or before.order != order):
            known_node = "" if before is None else before.node
            armed = Armed(at=now, left_ms=order_left_ms, longest_ms=longest_ms, node=node or known_node, order=order)
        elif node_left_ms is not None and (before is None or before.node != node):
            armed = Armed(at=now, left_ms=node_left_ms, longest_ms=longest_ms, node=node, order=order)
        if armed is None:
            return None
        if longest_ms is not None:
            armed = replace(armed, left_ms=min(armed.left_ms, longest_ms), longest_ms=longest_ms)
        is_new = deadline is None or (armed.node, armed.order) != (deadline.node, deadline.order)
        if (
            deadline is None
            or is_new
            or deadline.at.boot_id != now.boot_id
            or now.boot_ms - deadline.at.boot_ms >= KEEP_MS
        ):
            self._keep(armed)
            self._armed = armed
        else:
            self._armed = deadline
        return armed.left_ms

    def _node_order(self) -> tuple[str, int | None, int | None]:
        """Return the digest of node.json, and from its content the time left and the longest lifetime, both in ms.

        An unreadable node.json gives an empty digest and no limits.
        """
        with contextlib.suppress(OSError, ValueError):
            raw = (self._folder / "node.json").read_bytes()
            spec = json.loads(raw)
            left_ms, longest_ms = (
                None if (value := spec.get(name)) is None else int(value)
                for name in ("money_left_ms", "money_longest_ms")
            )
            return hashlib.sha256(raw).hexdigest()[:16], left_ms, longest_ms
        return "", None, None

    def _latest_order(self) -> tuple[int | None, int]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads((self._folder / "money.json").read_text())
            return int(raw["told"]), int(raw["left_ms"])
        return None, 0

    def _kept(self) -> Armed | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads((self._folder / "armed.json").read_text())
            at = Moment(boot_id=raw["boot_id"], boot_ms=int(raw["boot_ms"]), wall_ms=int(raw["wall_ms"]))
            longest_ms = raw.get("longest_ms")
            return Armed(
                at=at,
                left_ms=int(raw["left_ms"]),
                longest_ms=None if longest_ms is None else int(longest_ms),
                node=raw["node"],
                order=raw["told"],
            )
        return None

    def _keep(self, armed: Armed) -> None:
        at = armed.at
        text = json.dumps(
            {
                "boot_id": at.boot_id,
                "boot_ms": at.boot_ms,
                "wall_ms": at.wall_ms,
                "left_ms": armed.left_ms,
                "longest_ms": armed.longest_ms,
                "node": armed.node,
                "told": armed.order,
            }
        )
        with contextlib.suppress(OSError):  # a full disk: this process keeps the value in memory
            write_durably(self._folder / "armed.json", text.encode())


class Guard:
    """Keeper of the guard process, used by the agent.

    Starts the guard if none runs, and again after a death or freeze.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._looked = -START_SECONDS

    @property
    def pid(self) -> int | None:
        """Return the pid of the guard started by this agent, or None."""
        return None if self._process is None else self._process.pid

    def keep_alive(self) -> None:
        """Start the guard process if this agent has none running. Kill a frozen guard; a later call starts a new guard.

        Does not wait. If another guard of this folder holds the lock, the new guard exits by itself.
        """
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            if _is_stopped(self._process.pid):
                self._process.kill()
            return
        if time.monotonic() - self._started < START_SECONDS:
            return
        self._started = time.monotonic()
        # The guard must survive the agent's cleanup, so the guard's environment has no mark.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        with contextlib.suppress(OSError), (self._folder / "logs" / "agent.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.node.spend_guard", str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )


def guard(
    folder: Path,
    *,
    now: Callable[[], Moment] = this_moment,
    end: Callable[[str, Callable[[str], None]], None] = terminate_instance,
    copy: Callable[[Path, Callable[[str], None]], bool] = copy_logs,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Terminate the instance after its spend deadline, or with neither work nor a controller (alone.py).

    Returns when the folder is gone, or when another guard holds the lock.
    """
    lock = (folder / "guard.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    with contextlib.suppress(OSError):
        write_durably(folder / "guard.json", json.dumps({"pid": os.getpid()}).encode())
    money, alone = TimeLeft(folder, now), Alone(folder, lambda: now().boot_ms, now().boot_id)
    has_copied = False
    while folder.exists():
        left_ms = money.left_ms()
        if left_ms is not None and left_ms <= -LATE_MS:
            _print(f"guard: the money deadline passed {-left_ms / 1000:.0f} s ago and this instance is still here")
            end(_cloud_of(folder), _print)
            sleep(AGAIN_SECONDS)
        elif why := alone.why_ended():
            _print(f"guard: {why}")
            has_copied = has_copied or copy(folder, _print)
            if alone.why_ended():  # check again: a controller may have come during the copy
                end(_cloud_of(folder), _print)
                sleep(AGAIN_SECONDS)
        sleep(LOOK_SECONDS)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _cloud_of(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((folder / "node.json").read_text())["cloud"])
    return ""


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}", flush=True)


def main(arguments: list[str] = sys.argv) -> Any:
    guard(Path(arguments[1]))


if __name__ == "__main__":
    main()
