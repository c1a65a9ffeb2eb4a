"""Time: one clock rules the controller, leases, notices, prices and bills of a run.

On a real cloud the factor is 1. On the local infra it may run faster, so that hours of a spot market
pass in minutes; every process of the run shares origin and factor, so they all agree on the time.
Everything that is summed is an integer of milliseconds. Standard library only.
"""

import time
from dataclasses import dataclass, field
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
        return self.origin_ms + round((self._wall_ms() - self.origin_ms) * self.factor)

    def wall_seconds(self, duration_ms: int) -> float:
        return duration_ms / 1000 / self.factor

    def _wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyClock(ScaledClock):
    """The wall clock as it was when this one was made, carried on by what has passed since: no jump moves it.

    For whoever meters money on machines that have clocks of their own: an hour that never was must not end a run.
    """

    began_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000 - boot_ms())
    """When this machine was switched on."""

    def _wall_ms(self) -> int:
        return self.began_ms + boot_ms()


def boot_ms() -> int:
    """Since this machine was switched on; goes on while a laptop sleeps, and nobody can set it."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)) // 1_000_000
