"""Time: one clock rules the controller, leases, notices, prices and bills of a run.

On a real cloud the factor is 1. On the local infra it may run faster, so that hours of a spot market
pass in minutes; every process of the run shares origin and factor, so they all agree on the time.
Everything that is summed is an integer of milliseconds. Standard library only.
"""

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Tells the time of a run. Tests pass one that they move by hand."""

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC, on the run's clock."""

    def wall_seconds(self, duration_ms: int) -> float:
        """How long a real process must sleep for `duration_ms` of this clock to pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledClock:
    """The wall clock, running `factor` times faster since `origin_ms`."""

    origin_ms: int
    factor: float = 1.0

    def now_ms(self) -> int:
        wall_ms = time.time_ns() // 1_000_000
        return self.origin_ms + round((wall_ms - self.origin_ms) * self.factor)

    def wall_seconds(self, duration_ms: int) -> float:
        return duration_ms / 1000 / self.factor
