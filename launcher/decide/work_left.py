"""The work that a run has left, and how fast rollout nodes do it. Pure.

pace: the planner's own model of an iteration, one time for each number of rollout nodes at work
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkLeft:
    """Iterations left of a run, and the time of one with 0, 1, 2, ... rollout nodes at work."""

    iterations: float
    """Iterations that the target is expected to take in all."""
    done: float
    """Iterations done so far."""
    iteration_ms: Sequence[float]
    """Milliseconds of an iteration by the number of rollout nodes at work. Never rises. The last entry is the plan
    with every node at work; more nodes than that are no faster."""

    saved_every: int = 1
    """Iterations between two checkpoints."""

    @property
    def lost_ms(self) -> float:
        """Return the mean work since the last checkpoint, in milliseconds, with every node at work."""
        return self.saved_every * self.iteration_ms[-1] / 2

    @property
    def left(self) -> float:
        return max(0.0, self.iterations - self.done)

    @property
    def nodes(self) -> int:
        """Return the number of rollout nodes of the plan."""
        return len(self.iteration_ms) - 1

    def per_hour(self, nodes: int) -> float:
        """Return the iterations of an hour with so many rollout nodes at work."""
        return 3_600_000 / self.iteration_ms[min(nodes, self.nodes)]

    def left_ms(self, nodes: int) -> float:
        """Return the time that the rest takes with so many rollout nodes at work."""
        return self.left * self.iteration_ms[min(nodes, self.nodes)]
