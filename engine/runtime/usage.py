"""Where a worker's time goes, by phase: what the report shares a node's dollars out by, and what the trace shows."""

import contextlib
import time
from collections.abc import Iterator

from engine.clock import Clock
from engine.events import Phase

Span = tuple[str, float, float]
"""A phase, and from when to when it took: milliseconds of the run's clock."""

SAME_WALL_SECONDS = 0.002
"""Two spans of one phase that are no further apart are told as one."""


class Usage:
    """Spans that do not overlap: what is measured inside another measurement interrupts it. For one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ms_per_second = 1.0 / clock.wall_seconds(1)
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
        """The spans since the last call, to be reported once; one that goes on is told as far as it got."""
        self._cut()
        spans, self._fresh = self._fresh, []
        self._anchor()
        return spans

    def _anchor(self) -> None:
        """Where the run's clock is now: between two anchors a finer one is read."""
        self._anchor_seconds, self._anchor_ms = time.perf_counter(), self._clock.now_ms()

    def _cut(self) -> None:
        now = time.perf_counter()
        if self._phases:
            phase = self._phases[-1]
            begun, ended = self._at_ms(self._since), self._at_ms(now)
            self.total[phase] = self.total.get(phase, 0.0) + ended - begun
            before = self._fresh[-1] if self._fresh else ("", 0.0, 0.0)
            if before[0] == phase and begun - before[2] <= SAME_WALL_SECONDS * self._ms_per_second:
                # What lay between them is so short that it may as well be counted here.
                begun = before[1]
                self._fresh.pop()
            self._fresh.append((phase, begun, ended))
        self._since = now

    def _at_ms(self, seconds: float) -> float:
        return self._anchor_ms + (seconds - self._anchor_seconds) * self._ms_per_second
