"""Define time: one clock rules the controller, leases, notices, prices and bills of a run.

On a real cloud the factor is 1. On the local infra the clock may run faster, so hours of a spot market pass in minutes.
Every process of the run shares origin and factor, so all processes agree on the time. Summed times are integers of
milliseconds. Standard library only.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol


class Clock(Protocol):
    """Clock of a run. Tests pass a clock moved by hand."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC, on the run's clock."""

    def wall_seconds(self, duration_ms: int) -> float:
        """Return the wall seconds in which `duration_ms` of this clock pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledClock:
    """The wall clock, running `factor` times faster since `origin_ms`."""

    origin_ms: int
    factor: float = 1.0

    def now_ms(self) -> int:
        return self.origin_ms + round((self._wall_ms() - self.origin_ms) * self.factor)

    def wall_seconds(self, duration_ms: int) -> float:
        return duration_ms / 1000 / self.factor

    def _wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyClock(ScaledClock):
    """Wall clock read once at creation and advanced by the boot clock, so no clock jump moves the time.

    Use this clock to meter money on machines with clocks of their own: a jump of an hour must not end a run.
    """

    began_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000 - boot_ms())
    """Time at which this machine was switched on (ms UTC)."""

    def _wall_ms(self) -> int:
        return self.began_ms + boot_ms()


def boot_ms() -> int:
    """Return milliseconds since this machine was switched on.

    The count goes on while a laptop sleeps, and cannot be set.
    """
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000


def run_ms(clock: Clock, wall_seconds: float) -> int:
    """Convert wall time to milliseconds of the run's clock."""
    return round(wall_seconds / clock.wall_seconds(1))
