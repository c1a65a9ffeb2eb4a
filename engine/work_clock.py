"""The clock of a run on the local infra: its time is work.

    a denoising step, a scored image, a trained row -> `WorkMeter.done(seconds on the reference machine)` -> RUN/clock

The engine reports the work of each process. The clock shows how far the process with the most work has come, `factor`
milliseconds for each millisecond of the reference machine. So hours, dollars and preemptions of a run do not depend on
the speed of this machine.

Promises:

- The clock never goes back. Every process of the run reads the same time from the file.
- While nobody reports work, the clock runs by the wall, `factor` times as fast: a run that lost its trainer still comes
  to its deadlines. Each report, each pass of the controller that sees a starting node, the start of a controller and
  the end of the engine hold the clock for `HOLD_SECONDS`.
- A process that is frozen while it holds the file's lock stops no other process.
- The clock does not pass an event of the local cloud unseen. New work waits for the controller's next pass if the clock
  is `LEAD_SECONDS` ahead of the last one, and for a node that takes longer to start than its work would allow. A
  controller that is dead or frozen is not waited for.

Leases, heartbeats and timeouts of processes use the wall clock (engine/clock.py). Standard library only.
"""

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from engine.clock import ScaledClock, boot_ms

HOLD_SECONDS = 10.0
"""Longest wall time between two reports of a process that computes. A training pass of a slow machine takes seconds."""

LEAD_SECONDS = 1.0
"""The clock may be this far ahead of the controller's last pass, in seconds of the reference machine. Four passes."""

WATCHED_SECONDS = 2.0
"""A controller without a pass for so long (wall time) is not waited for."""

LOCK_SECONDS = 0.2
"""A process holds the file's lock for microseconds, unless it is frozen."""

_LOOK_SECONDS, _LOCK_LOOK_SECONDS = 0.01, 0.001

_RECORD = struct.Struct("<5q")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """The contents of the file. Times named `boot` are on this machine's boot clock, the others on the run's clock."""

    run_ms: int
    boot_ms: int
    """Moment at which the clock showed `run_ms`."""
    held_until_boot_ms: int
    """The clock stands still until then."""
    watched_ms: int
    """Time of the controller's last pass."""
    watched_boot_ms: int

    def now_ms(self, boot_now_ms: int, factor: float) -> int:
        """Return the time of the run. `factor`: milliseconds of the run's clock in a free millisecond."""
        free_ms = boot_now_ms - max(self.boot_ms, self.held_until_boot_ms)
        return self.run_ms + round(max(0, free_ms) * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkClock:
    """The clock in a run's file. Without the file, as in runs of older versions, a scaled wall clock."""

    path: Path
    origin_ms: int
    factor: float
    boot: Callable[[], int] = field(default=boot_ms, compare=False)

    def begin(self, newest_ms: int) -> None:
        """Make the file, or repair it after a reboot of this machine. Call before a controller's first pass.

        `newest_ms`: the newest time in the ledger. The clock does not start before it, and is held: the controller's
        own start is no work.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(os.O_RDWR | os.O_CREAT) as file:
            now, record = self.boot(), _read(file)
            run_ms = max(newest_ms, self.origin_ms, 0 if record is None else record.run_ms)
            os.ftruncate(file, _RECORD.size)
            if record is not None and record.boot_ms <= now:
                run_ms = max(run_ms, record.now_ms(now, self.factor))
            held_until = now + round(HOLD_SECONDS * 1000)
            _write(
                file,
                _Record(
                    run_ms=run_ms, boot_ms=now, held_until_boot_ms=held_until, watched_ms=run_ms, watched_boot_ms=now
                ),
            )

    def now_ms(self) -> int:
        try:
            with self._locked(os.O_RDONLY) as file:
                record = _read(file)
        except FileNotFoundError:
            record = None
        if record is None:
            return ScaledClock(origin_ms=self.origin_ms, factor=self.factor).now_ms()
        return record.now_ms(self.boot(), self.factor)

    def wall_seconds(self, duration_ms: int) -> float:
        """Return the seconds in which `duration_ms` pass on the reference machine, or on this one without work."""
        return duration_ms / 1000 / self.factor

    def watched(self, at_ms: int) -> None:
        """Record a pass of the controller: all that was due at `at_ms` is carried out."""
        self._change(lambda record, now: replace(record, watched_ms=at_ms, watched_boot_ms=now))

    def hold(self) -> None:
        """Keep the clock from running by the wall for `HOLD_SECONDS`: a node starts or ends, which is no work."""
        held_ms = round(HOLD_SECONDS * 1000)
        self._change(
            lambda record, now: replace(record, held_until_boot_ms=max(record.held_until_boot_ms, now + held_ms))
        )

    def advance_to(self, at_ms: int) -> None:
        """Move the clock forward to `at_ms`, and hold it."""
        held_ms = round(HOLD_SECONDS * 1000)
        self._change(
            lambda record, now: replace(
                record,
                run_ms=max(at_ms, record.run_ms),
                held_until_boot_ms=max(record.held_until_boot_ms, now + held_ms),
            )
        )

    def keep_pace(self) -> None:
        """Wait for the controller, if the clock is far ahead of its last pass."""
        while (record := self._change(lambda record, now: record)) is not None and self._is_ahead(record):
            time.sleep(_LOOK_SECONDS)

    def _is_ahead(self, record: _Record) -> bool:
        lead_ms = LEAD_SECONDS * 1000 * self.factor
        is_watched = self.boot() - record.watched_boot_ms < WATCHED_SECONDS * 1000
        return is_watched and record.run_ms - record.watched_ms > lead_ms

    def _change(self, change: Callable[[_Record, int], _Record]) -> _Record | None:
        """Change the record, which is first brought to the present moment. None: the run has no file."""
        with contextlib.suppress(FileNotFoundError), self._locked(os.O_RDWR) as file:
            while (record := _read(file)) is not None:
                now = self.boot()
                changed = change(replace(record, run_ms=record.now_ms(now, self.factor), boot_ms=now), now)
                if _read(file) == record:  # else this process was frozen, and another went on without the lock
                    _write(file, changed)
                    return changed
        return None

    @contextlib.contextmanager
    def _locked(self, flags: int) -> Iterator[int]:
        file = os.open(self.path, flags, 0o600)
        try:
            self._lock(file, fcntl.LOCK_SH if flags == os.O_RDONLY else fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _lock(self, file: int, kind: int) -> None:
        """Take the lock, or go on without it after `LOCK_SECONDS`: its holder is frozen, with its node perhaps."""
        until = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < until:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_LOCK_LOOK_SECONDS)


def _read(file: int) -> _Record | None:
    """Return the record, or None if the file is empty or damaged."""
    data = os.pread(file, _RECORD.size + 1, 0)
    if len(data) != _RECORD.size:
        return None
    run_ms, boot, held, watched_ms, watched_boot = _RECORD.unpack(data)
    return _Record(
        run_ms=run_ms, boot_ms=boot, held_until_boot_ms=held, watched_ms=watched_ms, watched_boot_ms=watched_boot
    )


def _write(file: int, record: _Record) -> None:
    os.pwrite(
        file,
        _RECORD.pack(
            record.run_ms, record.boot_ms, record.held_until_boot_ms, record.watched_ms, record.watched_boot_ms
        ),
        0,
    )


class WorkMeter(Protocol):
    """Reports the work of one process to the run's clock. Call from one thread."""

    def done(self, seconds: float) -> None:
        """Report work that takes `seconds` on the reference machine."""

    def waited(self) -> None:
        """Report that the process had nothing to do until now. Its next work begins at the present time."""

    def keep_pace(self) -> None:
        """Wait for the local cloud, if the work is ahead of it. Call without a lease, which could expire."""


class NoMeter:
    """The meter of a process on a cloud, where the run's clock is the wall clock."""

    def done(self, seconds: float) -> None: ...

    def waited(self) -> None: ...

    def keep_pace(self) -> None: ...


class ProcessMeter:
    """The meter of a process on the local infra.

    Each process has come to a time of its own. Processes that compute at the same time advance the clock once, as they
    would on machines of their own.
    """

    def __init__(self, clock: WorkClock) -> None:
        self._clock = clock
        self._at_ms: float | None = None
        """Time to which the process has come. None: it reported nothing yet."""

    def done(self, seconds: float) -> None:
        begun_ms = self._clock.now_ms() if self._at_ms is None else self._at_ms
        self._at_ms = begun_ms + seconds * 1000 * self._clock.factor
        self._clock.advance_to(round(self._at_ms))

    def waited(self) -> None:
        self._at_ms = self._clock.now_ms()

    def keep_pace(self) -> None:
        self._clock.keep_pace()
