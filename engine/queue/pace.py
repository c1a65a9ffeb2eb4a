"""Step-time estimates, lease lengths and commit intervals."""

import math
from dataclasses import dataclass

STEPS_PER_LEASE = 4
"""A lease lasts at least this many of the slowest steps observed for its kind of work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Lease lengths and commit settings of a run."""

    lease_ms: int
    """The shortest lease, in ms."""
    first_lease_ms: int
    """Lease length in ms for a kind of work without any observed step."""
    commit_every: int | None
    """Steps between two commits. None: computed from commit cost and preemption risk (`commit_interval`)."""
    preemption_ms: int
    """Prior mean life of a spot node in ms, before the run has observed a preemption."""

    def lease_of(self, pace: "Pace") -> int:
        """Return the lease length in ms for this kind of work.

        The length counts from the grant or the worker's last call.
        """
        if not pace.slowest_ms:
            return max(self.lease_ms, self.first_lease_ms)
        return max(self.lease_ms, math.ceil(STEPS_PER_LEASE * pace.slowest_ms))


@dataclass(slots=True)
class Pace:
    """Step-time estimate for a kind of work, in ms per denoising step."""

    step_ms: float = 0.0
    """Moving average over finished leases, scoring and waiting included. 0: no lease has finished."""
    slowest_ms: float = 0.0
    """The slowest reported step, decaying slowly. 0: no step was reported."""

    def observe_step(self, step_ms: float) -> None:
        """Record the time of a reported step."""
        self.slowest_ms = max(step_ms, 0.98 * self.slowest_ms)

    def observe_lease(self, step_ms: float) -> None:
        """Record the mean step time of a finished lease."""
        self.step_ms = 0.8 * self.step_ms + 0.2 * step_ms if self.step_ms else step_ms


def commit_interval(cost_ms: float, life_ms: float, step_ms: float) -> int:
    """Return the cheapest number of steps between two commits, or of batches between two checkpoints: sqrt(2 c M) / t.

    `cost_ms`: c, the duration of a commit. `life_ms`: M, the mean time to a loss. `step_ms`: t, the duration of a step.
    All in milliseconds. The result is at least 1.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
    """
    return max(1, round(math.sqrt(2 * cost_ms * life_ms) / step_ms))
