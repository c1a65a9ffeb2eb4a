"""Judge if a process of the node is frozen, by its signs of life and by facts of the kernel.

    signs of life ── silent for FROZEN_SECONDS ──> stopped (state T)?               yes: frozen
                                                   no work for FROZEN_SECONDS too?  yes: frozen
                                                   silent for LONGEST_SILENCE_SECONDS?  yes: frozen
                                                   otherwise: alive

A Python thread gives the signs of life, and that thread is silent while another thread holds the GIL, for instance
during a long serialisation. Silence alone therefore proves nothing. A silent process works if one of its threads uses
CPU time, waits for a disk (state D), or if the process reads or writes bytes.

A process in an endless loop that holds the GIL looks like work. LONGEST_SILENCE_SECONDS ends it.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FROZEN_SECONDS = 5.0
"""Seconds without a sign of life and without work after which a process is killed and restarted."""

LONGEST_SILENCE_SECONDS = 600.0
"""Seconds without a sign of life after which a process is killed even if it works: an endless loop looks like work. The
longest hold of the GIL that was measured took 5 s (5 GB serialised)."""

WORKING_CPU_SHARE = 0.02
"""Share of one core that counts as work. A Python thread that waits for the GIL wakes every 5 ms and used
0.1 to 0.6 %, measured on a busy machine. A thread that computes beside ten others on one core gets 9 %."""

WORKING_BYTES = 1 << 20
"""Bytes read or written that count as work. Small messages of native threads, which need no GIL, are no work."""

LISTEN_SECONDS = 1.0
"""Seconds of silence after which the facts are read. The sign of life comes every 0.2 s."""


class Facts(NamedTuple):
    """Facts of the kernel about one process."""

    stopped: bool
    """All threads are stopped by a signal (state T)."""
    in_disk_wait: bool
    """A thread waits for a disk or another device (state D)."""
    cpu_seconds: dict[int, float]
    """CPU seconds used, by thread."""
    moved_bytes: int
    """Bytes read or written since the start, from files or from disks."""


def read_facts(pid: int) -> Facts | None:
    """Return the facts about a process from /proc, or None if the process or /proc is absent."""
    folder = Path("/proc") / str(pid)
    states, cpu_seconds, moved = [], {}, 0
    try:
        threads = os.listdir(folder / "task")
    except OSError:
        return None
    for thread in threads:
        with contextlib.suppress(OSError):  # the thread ended between the two reads
            # The command's name is in parentheses and may hold spaces. State is field 3, CPU ticks are 14 and 15.
            words = (folder / "task" / thread / "stat").read_text().rpartition(")")[2].split()
            states.append(words[0])
            cpu_seconds[int(thread)] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    if not states:
        return None
    with contextlib.suppress(OSError):  # not readable: CPU time decides
        lines = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
        moved = sum(int(lines[key]) for key in ("rchar", "wchar", "read_bytes", "write_bytes"))
    return Facts(all(state == "T" for state in states), "D" in states, cpu_seconds, moved)


@dataclass
class Stillness:
    """Judge of one process's life. Call `is_frozen` at every look."""

    seconds: float = FROZEN_SECONDS
    read: Callable[[int], Facts | None] = read_facts
    clock: Callable[[], float] = time.monotonic
    _before: Facts | None = None
    """Facts at the last time that the silent process had worked."""
    _worked_at: float = 0.0
    _pid: int | None = None

    def is_frozen(self, pid: int, last_sign: float) -> bool:
        """Return True if the process is frozen.

        `last_sign` is the monotonic time of the last sign of life. Where /proc is absent, silence alone decides.
        """
        now = self.clock()
        silent = now - last_sign
        if silent <= min(LISTEN_SECONDS, self.seconds / 5):
            self._pid = None
            return False
        facts = self.read(pid)
        if facts is None or facts.stopped:
            return silent > self.seconds
        if silent > LONGEST_SILENCE_SECONDS:
            return True
        if self._pid != pid or self._before is None or self._has_worked(self._before, facts):
            self._pid, self._before, self._worked_at = pid, facts, now
        return silent > self.seconds and now - self._worked_at > self.seconds

    def _has_worked(self, before: Facts, now: Facts) -> bool:
        enough = WORKING_CPU_SHARE * self.seconds
        computed = any(used - before.cpu_seconds.get(thread, 0.0) >= enough for thread, used in now.cpu_seconds.items())
        return computed or now.in_disk_wait or now.moved_bytes - before.moved_bytes >= WORKING_BYTES
