"""The money deadline of a cloud's machine: how long its money lasts, counted on the machine's own boot clock.

node.json's `money_left_ms`, or `money.json` {"left_ms", "told"} since -> so much was left at this moment of this boot

The promises: no clock jump moves it, and an agent that starts again does not extend it (`armed.json` says what was
counted from when, and by which order). A reboot counts the time that the machine was off, by the wall clock.
No order moves the deadline past node.json's `money_longest_ms`, counted from when the node was first told: a controller
whose clock is wrong, or that forgot what was spent, cannot let a machine run for ever.
`python -m engine.runtime.money FOLDER` is the guard: a process of its own session, one per node folder, that outlives
the agent and ends the machine shortly after its deadline if the agent did not. It also ends a machine that has neither
an agent nor a controller (alone.py). Standard library only: it stays small, and nothing of the engine can break it.
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
from engine.runtime.alone import Alone, copy_logs
from engine.runtime.self_end import end_machine

LATE_MS = 20_000
"""How long after the deadline the guard leaves the end to the agent, which copies its last logs first."""
LOOK_SECONDS = 1.0
KEEP_MS = 10_000
"""How often what is left is written down: a reboot counts from there."""
START_SECONDS = 5.0
"""At least so long between two starts of a guard."""
AGAIN_SECONDS = 60.0
"""A machine that is still there after it was ended is ended again after so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """One moment by the machine's clocks. `boot_ms` runs on in a suspended machine, and nobody can set it."""

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
    """Another one after every start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Armed:
    """`left_ms` was left at `at`, and `longest_ms` at most, whatever is told later. `node`, `told`: who said so."""

    at: Moment
    left_ms: int
    longest_ms: int | None
    node: str
    told: int | None

    def at_moment(self, now: Moment) -> "Armed":
        """The same deadlines, counted from `now`."""
        if now.boot_id == self.at.boot_id:
            passed_ms = now.boot_ms - self.at.boot_ms
        else:
            # Off in between: the wall clock says how long, and it was at least as long as this boot lasts.
            passed_ms = max(now.boot_ms, now.wall_ms - self.at.wall_ms)
        longest_ms = None if self.longest_ms is None else self.longest_ms - passed_ms
        return replace(self, at=now, left_ms=self.left_ms - passed_ms, longest_ms=longest_ms)


class Money:
    """What is left, for the agent and for the guard, each by its own reading of the node's folder."""

    def __init__(self, folder: Path, now: Callable[[], Moment] = this_moment) -> None:
        self._folder, self._now = folder, now
        self._armed: Armed | None = None

    def left_ms(self) -> int | None:
        """Until the deadline; below 0 when it has passed, None when there is none."""
        now = self._now()
        node, node_left_ms, longest_ms = self._node_order()
        told, told_left_ms = self._told_order()
        known = self._armed or self._kept()
        before = None if known is None else known.at_moment(now)
        if before is not None and before.longest_ms is not None:
            longest_ms = before.longest_ms  # as it was told first
        armed = before
        # What was told last counts; both are new only where nobody watched, and then money.json came after.
        if told is not None and (before is None or before.told != told):
            known_node = "" if before is None else before.node
            armed = Armed(at=now, left_ms=told_left_ms, longest_ms=longest_ms, node=node or known_node, told=told)
        elif node_left_ms is not None and (before is None or before.node != node):
            armed = Armed(at=now, left_ms=node_left_ms, longest_ms=longest_ms, node=node, told=told)
        if armed is None:
            return None
        if longest_ms is not None:
            armed = replace(armed, left_ms=min(armed.left_ms, longest_ms), longest_ms=longest_ms)
        is_new = known is None or (armed.node, armed.told) != (known.node, known.told)
        if known is None or is_new or known.at.boot_id != now.boot_id or now.boot_ms - known.at.boot_ms >= KEEP_MS:
            self._keep(armed)
            self._armed = armed
        else:
            self._armed = known
        return armed.left_ms

    def _node_order(self) -> tuple[str, int | None, int | None]:
        """Return which order it is, what is left by it, and the longest that the node may live."""
        with contextlib.suppress(OSError, ValueError):
            raw = (self._folder / "node.json").read_bytes()
            spec = json.loads(raw)
            left_ms, longest_ms = (
                None if (value := spec.get(name)) is None else int(value)
                for name in ("money_left_ms", "money_longest_ms")
            )
            return hashlib.sha256(raw).hexdigest()[:16], left_ms, longest_ms
        return "", None, None

    def _told_order(self) -> tuple[int | None, int]:
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
                told=raw["told"],
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
                "told": armed.told,
            }
        )
        with contextlib.suppress(OSError):  # a full disk: this process knows it all the same
            write_durably(self._folder / "armed.json", text.encode())


class Guard:
    """The guard as its agent sees it: started if there is none, again if it died or stands still."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._looked = -START_SECONDS

    @property
    def pid(self) -> int | None:
        """Of the one that this agent started."""
        return None if self._process is None else self._process.pid

    def keep_alive(self) -> None:
        """Returns at once. One more than needed ends by itself: there is a lock."""
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
        # The guard does not end with what belongs to the agent, so it has no mark.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        with contextlib.suppress(OSError), (self._folder / "logs" / "agent.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.runtime.money", str(self._folder)],
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
    end: Callable[[str, Callable[[str], None]], None] = end_machine,
    copy: Callable[[Path, Callable[[str], None]], bool] = copy_logs,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """End the machine when its money is spent, or when it has neither work nor a controller (alone.py).

    Returns when the folder is gone, or another guard watches it.
    """
    lock = (folder / "guard.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    with contextlib.suppress(OSError):
        (folder / "guard.json").write_text(json.dumps({"pid": os.getpid()}))
    money, alone = Money(folder, now), Alone(folder, lambda: now().boot_ms, now().boot_id)
    has_copied = False
    while folder.exists():
        left = money.left_ms()
        if left is not None and left <= -LATE_MS:
            _say(f"guard: the money deadline passed {-left / 1000:.0f} s ago and this machine is still here")
            end(_cloud_of(folder), _say)
            sleep(AGAIN_SECONDS)
        elif alone.has_ended():
            _say(f"guard: the agent has ended, and no controller was heard for {alone.minutes():.1f} minutes")
            has_copied = has_copied or copy(folder, _say)
            if alone.has_ended():  # still, after the copy
                end(_cloud_of(folder), _say)
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


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}", flush=True)


def main(arguments: list[str] = sys.argv) -> Any:
    guard(Path(arguments[1]))


if __name__ == "__main__":
    main()
