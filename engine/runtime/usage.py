"""Where a worker's time goes, by phase: what the report shares a node's dollars out by."""

import contextlib
import time
from collections.abc import Iterator

from engine.clock import Clock
from engine.events import Phase


class Usage:
    """Milliseconds of the run's clock by phase. Time measured inside another measurement counts once, inside."""

    def __init__(self, clock: Clock) -> None:
        self._ms_per_second = 1.0 / clock.wall_seconds(1)
        self._fresh: dict[str, float] = {}
        self.total: dict[str, float] = {}
        """Everything since the beginning."""
        self._counted_seconds = 0.0

    @contextlib.contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        begun, counted = time.perf_counter(), self._counted_seconds
        try:
            yield
        finally:
            inside = self._counted_seconds - counted
            self.add(phase, time.perf_counter() - begun - inside)

    def add(self, phase: Phase, wall_seconds: float) -> None:
        self._counted_seconds += wall_seconds
        for book in (self._fresh, self.total):
            book[str(phase)] = book.get(str(phase), 0.0) + wall_seconds * self._ms_per_second

    def take(self) -> dict[str, float]:
        """What was spent since the last call, to be reported once."""
        spent, self._fresh = self._fresh, {}
        return spent
