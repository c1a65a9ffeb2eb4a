"""Measure a worker's time by phase. The report splits a node's dollars by phase, and the trace shows the spans.

Spans are measured by the wall. `meter` moves the clock of a local run (engine/work_clock.py).
"""

import contextlib
import time
from collections.abc import Iterator

from engine.clock import Clock
from engine.events import Phase
from engine.work_clock import NoMeter, WorkMeter

Span = tuple[str, float, float]
"""Phase, begin and end: milliseconds of the engine's clock (`ClockConfig.clock`)."""

SAME_WALL_SECONDS = 0.002
"""Maximum gap between two spans of one phase to merge the spans."""


class Usage:
    """Timer of spans that do not overlap: an inner measurement interrupts the outer measurement. For one thread."""

    def __init__(self, clock: Clock, meter: WorkMeter | None = None) -> None:
        self._clock, self.meter = clock, meter or NoMeter()
        self.ms_per_second = 1.0 / clock.wall_seconds(1)
        """Milliseconds of the engine's clock in a wall second."""
        self._fresh: list[Span] = []
        self.total: dict[str, float] = {}
        """Milliseconds by phase since the beginning."""
        self._phases: list[str] = []
        self._since = 0.0
        self._anchor()

    @contextlib.contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        self._cut()
        self._phases.append(str(phase))
        try:
            yield
        finally:
            self._cut()
            self._phases.pop()

    def take(self) -> list[Span]:
        """Return the spans since the last call, each reported once. An open span is reported up to now."""
        self._cut()
        spans, self._fresh = self._fresh, []
        self._anchor()
        return spans

    def _anchor(self) -> None:
        """Read the clock. Between two anchors, the finer performance counter measures time."""
        self._anchor_seconds, self._anchor_ms = time.perf_counter(), self._clock.now_ms()

    def _cut(self) -> None:
        now = time.perf_counter()
        if self._phases:
            phase = self._phases[-1]
            begun, ended = self._at_ms(self._since), self._at_ms(now)
            self.total[phase] = self.total.get(phase, 0.0) + ended - begun
            before = self._fresh[-1] if self._fresh else ("", 0.0, 0.0)
            if before[0] == phase and begun - before[2] <= SAME_WALL_SECONDS * self.ms_per_second:
                # The gap is short enough to count as part of the span.
                begun = before[1]
                self._fresh.pop()
            self._fresh.append((phase, begun, ended))
        self._since = now

    def _at_ms(self, seconds: float) -> float:
        return self._anchor_ms + (seconds - self._anchor_seconds) * self.ms_per_second
