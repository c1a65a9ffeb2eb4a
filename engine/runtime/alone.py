"""A machine without work and without a controller ends itself.

    agent runs ------------------------------------------> it stays (the spend deadline of money.py holds all the same)
    agent ended, a controller was heard lately ----------> it stays: the controller reads its last words and ends it
    agent ended, no controller was heard for 10 minutes -> its logs go to the bucket, then the machine is deleted

The window touches `heard` in the node's folder whenever it hears its controller. The guard sees the file's time
change, and counts on the machine's boot clock how long ago that was: no clock jump ends a machine or keeps it, and a
full disk does not hide a controller. A trainer's checkpoints are in the bucket before it says that it is finished.
Standard library only, because the guard uses it.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ALONE_SECONDS = 600.0
"""A controller that is started again, or whose network is away for a while, is back within minutes. Ten of them cost
less than a dollar for most instances. The spend deadline, which ended such a machine before, is often a day away."""

ALONE = "SPOTRL_ALONE_SECONDS"
"""Environment variable: another number of seconds, for drills."""

HEARD = "heard"

COPY_TRIES, COPY_SECONDS, COPY_GAP_SECONDS = 3, 60.0, 10.0
"""Tries to send the logs to the bucket, the limit of each, and the pause between: logs are worth no more GPU time."""


def touch(file: Path) -> None:
    """Note by a file's time that something happened just now. A full disk is no obstacle once the file is there."""
    with contextlib.suppress(OSError):
        try:
            os.utime(file)
        except FileNotFoundError:
            file.touch(mode=0o600)


def start_ticks(pid: int) -> int | None:
    """Return a process's start in ticks since the boot, which no clock jump moves. None: it is gone, or a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(rest[18])


class Alone:
    """Watches one node's folder. Counts from its first look, or from when the controller was heard since."""

    def __init__(self, folder: Path, boot_ms: Callable[[], int], boot_id: str) -> None:
        self._folder, self._boot_ms, self._boot_id = folder, boot_ms, boot_id
        self._limit_ms = round(float(os.environ.get(ALONE, ALONE_SECONDS)) * 1000)
        self._heard_ms, self._seen = boot_ms(), self._touched()

    def has_ended(self) -> bool:
        """Return whether the node has no agent, and no controller was heard for ten minutes."""
        now_ms, touched = self._boot_ms(), self._touched()
        if touched != self._seen:
            self._heard_ms, self._seen = now_ms, touched
        return now_ms - self._heard_ms >= self._limit_ms and not self._agent_runs()

    def minutes(self) -> float:
        """For how long no controller was heard."""
        return (self._boot_ms() - self._heard_ms) / 60_000

    def _touched(self) -> int | None:
        with contextlib.suppress(OSError):
            return (self._folder / HEARD).stat().st_mtime_ns
        return None

    def _agent_runs(self) -> bool:
        """By agent.json, which every agent of this folder replaces. An unreadable one is nobody's."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            agent = json.loads((self._folder / "agent.json").read_text())
            ticks = start_ticks(int(agent["pid"]))
            return ticks is not None and ticks == agent["ticks"] and agent["boot_id"] == self._boot_id
        return False


def copy_logs(folder: Path, say: Callable[[str], None]) -> bool:
    """Send what the node wrote to the bucket, in a process of its own. Returns whether all of it is there."""
    for attempt in range(1, COPY_TRIES + 1):
        try:
            subprocess.run(
                [sys.executable, "-P", "-m", "engine.runtime.ship", str(folder / "node.json")],
                stdin=subprocess.DEVNULL,
                timeout=COPY_SECONDS,
                check=True,
            )
            return True
        except (OSError, subprocess.SubprocessError) as error:
            say(f"copying the logs to the bucket, try {attempt} of {COPY_TRIES}: {error}")
        if attempt < COPY_TRIES:
            time.sleep(COPY_GAP_SECONDS)
    return False
