"""What does it cost not to know the future? The arithmetic of a start whose spot is gone at first, for the replay page.

A policy that must not pay more than a share e above all on demand may wait for

    hours = e x all on demand / (P_T - all on demand an hour x r(0) / r(n))

with the trainer alone, as long as spot has saved nothing: an hour of waiting costs the trainer, less what it does by
itself. Then it holds nodes on demand until spot is back, for it cannot know when. `least` takes the time of that from
the recording, and charges no start, no preemption and no doubt.
"""

from dataclasses import dataclass

from launcher.decide.work_left import WorkLeft
from launcher.money import HOUR_MS
from launcher.replay.trace import Trace

BACK_HOURS = 2
"""Spot is back when the region has had capacity for half of the nodes for so long."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A start of a scenario, with its hourly prices in micro-dollars."""

    trace: Trace
    start_ms: int
    work: WorkLeft
    trainer: int
    on_demand: int
    spot: int

    @property
    def back_hours(self) -> float:
        """Return the hours from the start until spot is back."""
        step_ms = 600_000
        there_ms = 0
        for at_ms in range(self.start_ms, self.trace.end_ms, step_ms):
            count = sum(pool.capacity_at(at_ms) for pool in self.trace.pools)
            there_ms = there_ms + step_ms if 2 * count >= self.work.nodes else 0
            if there_ms >= BACK_HOURS * HOUR_MS:
                return (at_ms + step_ms - there_ms - self.start_ms) / HOUR_MS
        return (self.trace.end_ms - self.start_ms) / HOUR_MS

    def wait_hours(self, share: float) -> float:
        """Return the hours that may be waited before spot has saved anything."""
        whole = self.trainer + self.work.nodes * self.on_demand
        loses = self.trainer - whole * self.work.per_hour(0) / self.work.per_hour(self.work.nodes)
        return share * whole * self.work.left_ms(self.work.nodes) / HOUR_MS / loses

    def least(self, share: float) -> float:
        """Return the least micro-dollars of a policy that keeps within `share` above all on demand."""
        nodes, back = self.work.nodes, self.back_hours
        waits = min(back, self.wait_hours(share))
        full_hours = self.work.left_ms(nodes) / HOUR_MS
        bought = min(full_hours, back - waits)
        alone = waits * self.work.per_hour(0) / self.work.per_hour(nodes)
        rest = max(0.0, full_hours - bought - alone)
        return (
            waits * self.trainer
            + bought * (self.trainer + nodes * self.on_demand)
            + rest * (self.trainer + nodes * self.spot)
        )
