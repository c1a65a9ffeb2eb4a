"""How fast work goes, and what follows from it: how long a lease lasts and how often state is committed."""

import math
from dataclasses import dataclass

STEPS_PER_LEASE = 4
"""A lease lasts at least so many of the slowest steps that were seen of its kind of work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How long leases last and how often in-flight state is committed."""

    lease_ms: int
    """The shortest lease."""
    first_lease_ms: int
    """The lease of work of which no step was seen yet."""
    commit_every: int | None
    """Steps between two commits; None: by cost and risk (`commit_interval`)."""
    preemption_ms: int
    """Mean life of a spot node to start from, before the run has seen any end."""

    def lease_of(self, pace: "Pace") -> int:
        """How long a lease of this kind of work lasts, from now or from the last word of its worker."""
        if not pace.slowest_ms:
            return max(self.lease_ms, self.first_lease_ms)
        return max(self.lease_ms, math.ceil(STEPS_PER_LEASE * pace.slowest_ms))


@dataclass(slots=True)
class Pace:
    """How fast a kind of work goes: ms per denoising step."""

    step_ms: float = 0.0
    """Of finished leases, scoring and waiting included: an average that follows. 0: none was finished."""
    slowest_ms: float = 0.0
    """The slowest step that was heard of, forgotten slowly. 0: none was heard of."""

    def hear(self, step_ms: float) -> None:
        self.slowest_ms = max(step_ms, 0.98 * self.slowest_ms)

    def learn(self, step_ms: float) -> None:
        self.step_ms = 0.8 * self.step_ms + 0.2 * step_ms if self.step_ms else step_ms


def commit_interval(cost_ms: float, preemption_ms: float, step_ms: float) -> int:
    """Steps between commits that lose least: sqrt(2 c M) / t (Young 1974; research notes engine 4), at least 1."""
    return max(1, round(math.sqrt(2 * cost_ms * preemption_ms) / step_ms))
