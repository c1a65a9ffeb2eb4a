"""Terminate an instance without work and without a controller.

    a controller called lately --------------------------> stay: it reads the last logs, or replaces a lost trainer
    no controller, agent runs, a coordinator answered ---> stay (the spend deadline of spend_guard.py still holds)
    no controller for 10 minutes, and no agent ----------> copy the logs to the bucket, then delete the instance
    no controller and no coordinator for 10 minutes -----> the same: the trainer is lost, and nobody replaces it

The remote console touches `heard` in the node's folder on every line from its controller, and the agent touches
`answered` on every answer of the coordinator. The guard notices the changed file times and counts the silence on the
machine's boot clock. No clock jump therefore ends an instance or keeps an instance alive, and a full disk does not hide
a controller. A trainer's checkpoints are in the bucket before the trainer reports the end. Standard library only,
because the guard uses this module.
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
"""Seconds of silence before termination. A restarted controller, or a controller with a network outage, is back within
minutes. Ten minutes cost less than a dollar for most instances. The spend deadline, which used to end such an instance,
is often a day away."""

ALONE = "SPOTRL_ALONE_SECONDS"
"""Environment variable with another number of seconds, for drills."""

LAST_CONTACT = "heard"

LAST_ANSWER = "answered"

COPY_TRIES, COPY_SECONDS, COPY_GAP_SECONDS = 3, 60.0, 10.0
"""Attempts to send the logs to the bucket, the seconds allowed for each, and the pause between: logs are worth no more
GPU time."""


def touch(file: Path) -> None:
    """Set a file's time to now, to record an event. Works on a full disk once the file exists."""
    with contextlib.suppress(OSError):
        try:
            os.utime(file)
        except FileNotFoundError:
            file.touch(mode=0o600)


def start_ticks(pid: int) -> int | None:
    """Return a process's start in ticks since the boot, immune to clock jumps.

    None: the process is gone or a zombie.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])


def limit_seconds() -> float:
    """Return the seconds of silence before termination."""
    return float(os.environ.get(ALONE, ALONE_SECONDS))


class _Silence:
    """The silence of a party that touches a file, from the first look or from the last touch after it."""

    def __init__(self, file: Path, now_ms: int) -> None:
        self._file, self._since_ms = file, now_ms
        self._touched_ns = self._touched()

    def ms(self, now_ms: int) -> int:
        """Return the milliseconds of silence at `now_ms` of the boot clock."""
        touched_ns = self._touched()
        if touched_ns != self._touched_ns:
            self._since_ms, self._touched_ns = now_ms, touched_ns
        return now_ms - self._since_ms

    def _touched(self) -> int | None:
        with contextlib.suppress(OSError):
            return self._file.stat().st_mtime_ns
        return None


class Alone:
    """Watcher of one node's folder. Counts silence from the first look."""

    def __init__(self, folder: Path, boot_ms: Callable[[], int], boot_id: str) -> None:
        self._folder, self._boot_ms, self._boot_id = folder, boot_ms, boot_id
        self._limit_ms = round(limit_seconds() * 1000)
        self._controller = _Silence(folder / LAST_CONTACT, boot_ms())
        self._coordinator = _Silence(folder / LAST_ANSWER, boot_ms())

    def why_ended(self) -> str:
        """Return why the node is to end: no controller called for ten minutes, and nothing works. Empty: it stays."""
        now_ms = self._boot_ms()
        called_ms, answered_ms = self._controller.ms(now_ms), self._coordinator.ms(now_ms)
        if called_ms < self._limit_ms:
            return ""
        for text, has_ended in (
            ("the agent has ended", not self._agent_runs()),
            (f"no coordinator has answered for {answered_ms / 60_000:.1f} minutes", answered_ms >= self._limit_ms),
        ):
            if has_ended:
                return f"{text}, and no controller has called for {called_ms / 60_000:.1f} minutes"
        return ""

    def _agent_runs(self) -> bool:
        """Return True if the agent named by agent.json runs.

        Every agent of the folder replaces agent.json. An unreadable file counts as no agent.
        """
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            agent = json.loads((self._folder / "agent.json").read_text())
            ticks = start_ticks(int(agent["pid"]))
            return ticks is not None and ticks == agent["ticks"] and agent["boot_id"] == self._boot_id
        return False


def copy_logs(folder: Path, report: Callable[[str], None]) -> bool:
    """Copy the node's files to the bucket, in a separate process. Returns True if the copy is complete."""
    for attempt in range(1, COPY_TRIES + 1):
        try:
            subprocess.run(
                [sys.executable, "-P", "-m", "engine.storage.ship", str(folder / "node.json")],
                stdin=subprocess.DEVNULL,
                timeout=COPY_SECONDS,
                check=True,
            )
            return True
        except (OSError, subprocess.SubprocessError) as error:
            report(f"copying the logs to the bucket, try {attempt} of {COPY_TRIES}: {error}")
        if attempt < COPY_TRIES:
            time.sleep(COPY_GAP_SECONDS)
    return False
