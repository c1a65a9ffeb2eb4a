"""The money deadline of a cloud's machine: how long its money lasts, counted on the machine's own boot clock.

node.json's `money_left_ms`, or `money.json` {"left_ms", "told"} since -> so much was left at this moment of this boot

The promises: no clock jump moves it, and an agent that starts again does not extend it (`armed.json` says what was
counted from when, and by which order). A reboot counts the time that the machine was off, by the wall clock.
`python -m engine.runtime.money FOLDER` is the guard: a process of its own session, one per node folder, that outlives
the agent and ends the machine shortly after its deadline if the agent did not. Standard library only: it stays small,
and nothing of the engine can break it.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

MARK = "SPOTRL_NODE_FOLDER"
"""By this variable the launcher finds what belongs to an agent; the guard does not end with it, so it bears none."""


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
    """`left_ms` was left at `at`. `node`, `told`: the orders that said so."""

    at: Moment
    left_ms: int
    node: str
    told: int | None

    def left_at(self, now: Moment) -> int:
        if now.boot_id == self.at.boot_id:
            return self.left_ms - (now.boot_ms - self.at.boot_ms)
        # Off in between: the wall clock says how long, and it was at least as long as this boot lasts.
        return self.left_ms - max(now.boot_ms, now.wall_ms - self.at.wall_ms)


class Money:
    """What is left, for the agent and for the guard, each by its own reading of the node's folder."""

    def __init__(self, folder: Path, now: Callable[[], Moment] = this_moment) -> None:
        self._folder, self._now = folder, now
        self._armed: Armed | None = None

    def left_ms(self) -> int | None:
        """Until the deadline; below 0 when it has passed, None when there is none."""
        now = self._now()
        node, node_left_ms = self._node_order()
        told, told_left_ms = self._told_order()
        known = self._armed or self._kept()
        armed = known
        # What was told last counts; both are new only where nobody watched, and then money.json came after.
        if told is not None and (armed is None or armed.told != told):
            known_node = "" if armed is None else armed.node
            armed = Armed(at=now, left_ms=told_left_ms, node=node or known_node, told=told)
        elif node_left_ms is not None and (armed is None or armed.node != node):
            armed = Armed(at=now, left_ms=node_left_ms, node=node, told=told)
        if armed is None:
            return None
        left = armed.left_at(now)
        if armed is not known or armed.at.boot_id != now.boot_id or now.boot_ms - armed.at.boot_ms >= KEEP_MS:
            armed = Armed(at=now, left_ms=left, node=armed.node, told=armed.told)
            self._keep(armed)
        self._armed = armed
        return left

    def _node_order(self) -> tuple[str, int | None]:
        with contextlib.suppress(OSError, ValueError):
            raw = (self._folder / "node.json").read_bytes()
            left_ms = json.loads(raw).get("money_left_ms")
            return hashlib.sha256(raw).hexdigest()[:16], None if left_ms is None else int(left_ms)
        return "", None

    def _told_order(self) -> tuple[int | None, int]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads((self._folder / "money.json").read_text())
            return int(raw["told"]), int(raw["left_ms"])
        return None, 0

    def _kept(self) -> Armed | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads((self._folder / "armed.json").read_text())
            at = Moment(boot_id=raw["boot_id"], boot_ms=int(raw["boot_ms"]), wall_ms=int(raw["wall_ms"]))
            return Armed(at=at, left_ms=int(raw["left_ms"]), node=raw["node"], told=raw["told"])
        return None

    def _keep(self, armed: Armed) -> None:
        at = armed.at
        text = json.dumps(
            {
                "boot_id": at.boot_id,
                "boot_ms": at.boot_ms,
                "wall_ms": at.wall_ms,
                "left_ms": armed.left_ms,
                "node": armed.node,
                "told": armed.told,
            }
        )
        fresh = self._folder / f"armed.{os.getpid()}.new"  # agent and guard both write it
        with contextlib.suppress(OSError):  # a full disk: this process knows it all the same
            fresh.write_text(text)
            fresh.replace(self._folder / "armed.json")


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
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        with contextlib.suppress(OSError), (self._folder / "logs" / "agent.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.runtime.money", str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )


def guard(folder: Path) -> None:
    """Watch the deadline of the node in `folder` until the machine ends, or the folder is gone."""
    lock = (folder / "guard.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    with contextlib.suppress(OSError):
        (folder / "guard.json").write_text(json.dumps({"pid": os.getpid()}))
    money = Money(folder)
    while folder.exists():
        left = money.left_ms()
        if left is not None and left <= -LATE_MS:
            _say(f"guard: the money deadline passed {-left / 1000:.0f} s ago and this machine is still here")
            end_machine(_cloud_of(folder), _say)
            time.sleep(AGAIN_SECONDS)
        time.sleep(LOOK_SECONDS)


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
