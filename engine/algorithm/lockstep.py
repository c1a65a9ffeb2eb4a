"""A rank's passes of an optimiser step whose weights are divided over the ranks (engine/parallel/sharding.py).

Every pass gathers weights from all ranks, so the ranks make the same number of passes. A rank with fewer rows repeats
rows with weight zero. FSDP2 adds the gradients of all ranks after each backward pass, and each rank keeps its part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.algorithm.health import EARLY, Health, figures_of, is_finite
from engine.algorithm.objective import Rows
from engine.algorithm.transaction import GroupRows, Trainer
from engine.diffusion.sampler import Plan
from engine.models.adapter import rows


class LockstepPasses:
    """The passes of one optimiser step. `planned_rows`: rows of the whole step, the divisor of the loss."""

    def __init__(self, trainer: Trainer, plan: Plan, planned_rows: int) -> None:
        self._trainer, self._plan, self._planned_rows = trainer, plan, planned_rows
        self.health = Health(neutral=trainer.objective.neutral, rows_per_forward=trainer.rows_per_forward)
        trainer.optimizer.zero_grad(set_to_none=True)

    def train(self, groups: Sequence[GroupRows], passes: int, *, counts: bool) -> "Round":
        """Make so many passes. The gradients of all ranks' groups wait until `Round.keep`.

        `groups`: of this rank, at least one. `counts`: False if another rank trains the same rows.
        """
        trainer, parameters = self._trainer, list(self._trainer.parameters.values())
        before = [parameter.grad for parameter in parameters]
        trainer.optimizer.zero_grad(set_to_none=True)
        encoded = trainer.adapter.encode([group.prompt for group in groups])
        whose = torch.tensor([place for place, group in enumerate(groups) for _ in range(len(group))])
        tensors = {name: torch.cat([group.tensors[name] for group in groups]) for name in groups[0].tensors}
        splits, finite = torch.arange(len(whose)).split(trainer.rows_per_forward), True
        summed_health = Health(neutral=trainer.objective.neutral)
        for number in range(passes):
            some = splits[min(number, len(splits) - 1)]
            moved = {name: value.to(trainer.device) for name, value in rows(tensors, some).items()}
            batch = Rows(conditioning=rows(encoded, whose[some].to(trainer.device)), tensors=moved)
            if any(group.is_early for group in groups):
                early = torch.tensor([group.is_early for group in groups])[whose[some]]
                batch = batch.with_tensors({EARLY: early.to(trainer.device)})
            weight = 1.0 if counts and number < len(splits) else 0.0
            health = self._pass(batch, weight)
            finite = finite and (health is not None or not weight)
            if weight and health is not None:
                summed_health.add(health)
        return Round(self, before, summed_health, is_finite=finite)

    def _pass(self, batch: Rows, weight: float) -> Health | None:
        """Make a forward and a backward pass. Returns None if a loss is not finite."""
        trainer = self._trainer
        with torch.no_grad():
            batch = batch.with_tensors(trainer.objective.constants(trainer.adapter, self._plan, batch))
        losses = trainer.objective.losses(trainer.adapter, self._plan, batch)
        health = figures_of(trainer.objective, batch, losses)
        total = losses.loss.sum() / self._planned_rows
        finite = is_finite(total, health)
        (total * weight).backward()  # also if not finite, because the other ranks wait for this rank's gradients
        return health if finite else None

    def restore(self, before: Sequence[Tensor | None], *, add: bool) -> None:
        """Add the gradients of the last passes to those before them, or drop them."""
        for parameter, old in zip(self._trainer.parameters.values(), before, strict=True):
            if old is None:
                parameter.grad = parameter.grad if add else None
            else:
                parameter.grad = old.add_(parameter.grad) if add and parameter.grad is not None else old


class Round:
    """Passes whose gradients are not counted yet. Single use: `keep` or `drop`, the same on all ranks."""

    def __init__(
        self, passes: LockstepPasses, before: Sequence[Tensor | None], health: Health, *, is_finite: bool
    ) -> None:
        self._passes, self._before, self._health = passes, before, health
        self.is_finite = is_finite
        """False if a loss of this rank's own rows is not finite."""

    def keep(self) -> None:
        self._passes.restore(self._before, add=True)
        self._passes.health.add(self._health)

    def drop(self) -> None:
        self._passes.restore(self._before, add=False)
