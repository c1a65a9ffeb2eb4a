"""The state of a batch, as a schedule sees it: rollouts that wait, are under way and are done, and trained groups."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from engine.schedule.values import Gpus, Work

SCORER = -1
"""Stands for a GPU where images wait for their score: the GPU that sampled them is free."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image to sample.

    `rest`: share of its denoising steps that is left. `is_old`: its group was begun early, with the weights of one
    version before, which only rollout GPUs still hold.
    """

    batch: int
    group: int
    rest: float = 1.0
    is_old: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Lease:
    """Images that a rollout GPU samples, or with the GPU `SCORER`, images that wait for their score.

    `ends`: seconds on the clock of the state, as expected.
    """

    ends: float
    gpu: int
    groups: tuple[tuple[int, int], ...]
    """(batch, group) of each image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The facts of a moment."""

    work: Work
    gpus: Gpus
    batch: int
    now: float
    waiting: tuple[Image, ...]
    """Images that nobody samples, in the order of the queue."""
    early: tuple[Image, ...]
    """Images of the next batch that idle rollout GPUs may sample."""
    leases: tuple[Lease, ...]
    free: tuple[tuple[float, int], ...]
    """(free since, number) of the rollout GPUs without a lease."""
    done: Mapping[tuple[int, int], int]
    """Sampled images by (batch, group)."""
    trained: frozenset[int]
    weights_at: float
    """The moment at which rollout GPUs have the weights of this batch."""
    help_left: int | None = None
    """Leases of help that the kept plan still has. None: no plan was made for the present facts."""

    help_ahead: bool = False
    """The leases of the kept plan come before any training."""
    samples: bool = False
    """The trainer is prepared for sampling, and not for training."""

    def may_help(self) -> bool:
        """Return whether an image waits that the trainer's weights may sample."""
        return any(not image.is_old for image in self.waiting)

    def wanted(self) -> tuple[int, ...]:
        """Return the groups of the current optimiser step that are not trained. Empty: the batch is trained."""
        for number in range(self.work.updates):
            untrained = tuple(group for group in self.work.minibatch(number) if group not in self.trained)
            if untrained:
                return untrained
        return ()

    def is_complete(self, group: int) -> bool:
        return self.done.get((self.batch, group), 0) >= self.work.images

    def ready(self, unit: int) -> tuple[int, ...]:
        """Return the first complete unit of the current optimiser step, or nothing.

        A unit is a fixed slice of the step's groups. A unit as large as the batch waits for all rollouts.
        """
        if unit >= self.work.groups:
            return self.wanted() if all(map(self.is_complete, range(self.work.groups))) else ()
        untrained = set(self.wanted())
        for number in range(self.work.updates):
            groups = self.work.minibatch(number)
            for first in range(groups.start, groups.stop, unit):
                slice_ = tuple(range(first, min(first + unit, groups.stop)))
                if untrained.issuperset(slice_) and all(map(self.is_complete, slice_)):
                    return slice_
                if self.work.in_order and untrained.intersection(slice_):
                    return ()
        return ()

    def problems(self) -> tuple[str, ...]:
        """Return the images that nobody will ever sample, in words. Empty: the facts are whole."""
        counts = Counter(self.done)
        counts.update((image.batch, image.group) for image in self.waiting)
        for lease in self.leases:
            counts.update(lease.groups)
        untrained = (group for group in range(self.work.groups) if group not in self.trained)
        missing = {group: self.work.images - counts[self.batch, group] for group in untrained}
        return tuple(f"{count} images of group {group} are nowhere" for group, count in missing.items() if count > 0)
