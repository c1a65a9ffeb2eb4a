"""SP groups of a node as values: allowed degrees, aligned subsets and the difference between two plans.

The promise: the first member of a group pulls, so the order of the members is the order of the ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Degrees = tuple[int, ...]
"""Degrees of a node's groups, the largest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """Workers of a node that share a request's sequence."""

    members: tuple[str, ...]
    """Workers in rank order. The first member pulls."""
    first: str | None = None
    """The request class the group serves first. Without waiting requests of the class, the group serves any class.
    None: the group serves any class, the longest request first."""

    @property
    def degree(self) -> int:
        return len(self.members)


def node_of(worker: str) -> str:
    """Return the node of a worker named NODE/PLACE."""
    return worker.rpartition("/")[0]


def allowed_degrees(heads: int, *, most: int = 8) -> Degrees:
    """Return the degrees up to `most` that divide the number of heads, ascending.

    Each rank computes heads / degree heads. Sequence lengths need not divide: missing tokens are padded
    (engine/parallel/ulysses.py). Raises ValueError if `heads` is below 1.
    """
    if heads < 1:
        raise ValueError(f"a model of {heads} attention heads; give its number of heads, 1 or more")
    return tuple(degree for degree in range(1, min(heads, most) + 1) if heads % degree == 0)


def aligned_subsets(gpus: int, degrees: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of GPU indices with a communicator from the node's start: (0, 1), (2, 3), ..., (0, 1, 2, 3), ...

    There are 7 sets for a node of 8 with degrees 1, 2, 4 and 8. Any other group must make its own communicator first.
    """
    return tuple(
        tuple(range(start, start + degree))
        for degree in sorted(set(degrees))
        if degree > 1
        for start in range(0, gpus - degree + 1, degree)
    )


def regroups(now: Iterable[WorkerGroup], planned: Iterable[WorkerGroup]) -> tuple[WorkerGroup, ...]:
    """Return the wanted groups that do not exist yet.

    A group with the same members exists, even with another `first`.
    """
    existing = {frozenset(group.members) for group in now}
    return tuple(group for group in planned if frozenset(group.members) not in existing)
