"""A recorded or made market: the spot capacity and price of each pool over time, as one table.

    t_s,cloud,region,zone,instance_type,capacity,usd_per_hour

A row holds from `t_s` until the pool's next row. `capacity` counts the nodes that the pool would run at that time.
`usd_per_hour` may be empty: the price was not recorded. Every reader (readers.py) refuses bad rows with the line.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.exit_codes import ExitCode, Failure


class TraceRefused(Failure):
    """A trace that cannot be trusted. The message names the file and the line."""

    exit_code = ExitCode.INVALID_JOB


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolTrace:
    """One pool over time: parallel tuples, sorted by time. Times are milliseconds since the trace began."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    t_ms: tuple[int, ...]
    capacity: tuple[int, ...]
    micro_usd_per_hour: tuple[int | None, ...]

    def capacity_at(self, at_ms: int) -> int:
        """Return the capacity at a time; 0 before the first row."""
        row = bisect_right(self.t_ms, at_ms) - 1
        return self.capacity[row] if row >= 0 else 0

    def price_at(self, at_ms: int) -> int | None:
        """Return the price at a time in micro-dollars an hour, or None if none was recorded."""
        row = bisect_right(self.t_ms, at_ms) - 1
        return self.micro_usd_per_hour[max(row, 0)]

    def drops_between(self, after_ms: int, until_ms: int) -> Sequence[int]:
        """Return the times in (after, until] at which the capacity falls."""
        first, last = bisect_right(self.t_ms, after_ms), bisect_right(self.t_ms, until_ms)
        return [self.t_ms[n] for n in range(max(first, 1), last) if self.capacity[n] < self.capacity[n - 1]]

    def most_between(self, from_ms: int, until_ms: int) -> int:
        """Return the largest capacity in [from, until)."""
        first, last = max(0, bisect_right(self.t_ms, from_ms) - 1), bisect_right(self.t_ms, until_ms - 1)
        return max(self.capacity[first:last], default=0)

    def cheapest_between(self, from_ms: int, until_ms: int) -> int | None:
        """Return the lowest recorded price in [from, until), or None."""
        first, last = max(0, bisect_right(self.t_ms, from_ms) - 1), bisect_right(self.t_ms, until_ms - 1)
        return min((price for price in self.micro_usd_per_hour[first:last] if price is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The pools of one recording, over one unbroken time."""

    name: str
    pools: tuple[PoolTrace, ...]
    end_ms: int
    """End of the recording: nothing is known from here on."""

    def pool_of(self, cloud: str, region: str, zone: str) -> PoolTrace | None:
        """Return the pool of a zone, or None if the trace does not have the zone."""
        for pool in self.pools:
            if (pool.cloud, pool.region, pool.zone) == (cloud, region, zone):
                return pool
        return None

    def share_with_capacity(self, nodes: int = 1) -> float:
        """Return the share of pool-time with capacity for at least so many nodes."""
        there = 0
        for pool in self.pools:
            for at_ms, until_ms, capacity in zip(pool.t_ms, (*pool.t_ms[1:], self.end_ms), pool.capacity, strict=True):
                there += (until_ms - at_ms) * (capacity >= nodes)
        return there / (self.end_ms * len(self.pools)) if self.pools and self.end_ms else 0.0
