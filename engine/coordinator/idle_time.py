"""The idle time of spot workers, from which the exploration budget follows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.clock import Clock
from engine.exploration.budget import PHASES, candidates_that_fit, seconds_until_trained


@dataclass
class IdleTime:
    """Estimate of the time in which spot workers have nothing better to do.

    The exploration budget is computed from the estimate.

    The estimate is not stored: a restarted coordinator begins with no measurements, like a new run.
    """

    explorers: dict[str, str] = field(default_factory=dict)
    """Node of each exploring worker."""
    phase_seconds: list[float] = field(default_factory=list)
    """Wall seconds of the last training phases, each from the last rollout of a batch to the next weights."""
    since_ms: int | None = None
    """Arrival of the last rollout of the open batch (run's clock); None while rollouts are missing."""
    exploring_ms: float = 0.0
    candidates: int = 0

    def begins(self, now_ms: int) -> None:
        if self.since_ms is None:
            self.since_ms = now_ms

    def ends(self, clock: Clock) -> None:
        if self.since_ms is not None:
            self.phase_seconds = [*self.phase_seconds[1 - PHASES :], clock.wall_seconds(clock.now_ms() - self.since_ms)]
            self.since_ms = None

    def fit(self, nodes: Sequence[str], pending: int, clock: Clock, now_ms: int) -> int:
        """Return the number of candidates to add, given the live nodes and `pending` candidates in progress."""
        elapsed = 0.0 if self.since_ms is None else clock.wall_seconds(now_ms - self.since_ms)
        per_candidate = clock.wall_seconds(round(self.exploring_ms)) / self.candidates if self.candidates else None
        return candidates_that_fit(
            seconds_until_trained(self.phase_seconds, elapsed_seconds=elapsed),
            gpus=sum(node in nodes for node in self.explorers.values()),
            gpu_seconds_per_candidate=per_candidate or None,
            pending=pending,
        )
