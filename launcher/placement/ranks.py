"""Ranks of the trainer in a plan: what a node's GPUs do. Pure.

The number of ranks comes from engine/trainer_ranks.py alone, so a plan never counts a rank that the engine does not
start.
"""

from dataclasses import dataclass

from launcher.job.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRanks:
    """Work of the GPUs of the trainer's nodes."""

    gpus: int
    """GPUs of each node."""
    nodes: int = 1
    """Nodes of the trainer, all equal."""
    ranks: int
    """GPUs of all nodes that train, a rank on each."""
    sampling: int
    """Ranks that sample rollouts while they have no group to train: all, or one if full weights leave no room."""
    groups: int | None
    """Groups of an optimiser step. None: not known."""
    rounds: int | None
    """Groups that the busiest rank trains in a step."""
    efficiency: float
    """Work of a rank, relative to the work of a GPU that trains alone."""
    basis: str
    """`measured`, `published` or `assumed`."""
    source: str

    @property
    def waiting(self) -> int:
        """Return the ranks that wait while the trainer has no complete group."""
        return self.ranks - self.sampling

    @property
    def idle(self) -> int:
        """Return the GPUs that are paid for and never used."""
        return self.all_gpus - self.ranks

    @property
    def all_gpus(self) -> int:
        """Return the GPUs of all nodes."""
        return self.nodes * self.gpus

    def text(self) -> str:
        """Return the ranks in words, like `8 of 8 GPUs train; 16 groups of a step take 2 rounds; efficiency 98.0%`."""
        parts = [f"{self.ranks} of {self.all_gpus} GPU{'s train' if self.all_gpus > 1 else ' trains'}"]
        if self.nodes > 1:
            parts[0] = f"{self.nodes} nodes, {parts[0]}"
        if self.ranks > 1 and self.rounds is not None:
            parts.append(f"{self.groups} groups of a step take {self.rounds} round{'s' if self.rounds > 1 else ''}")
        if self.ranks > 1:
            parts.append(f"efficiency {self.efficiency:.1%} ({self.basis})")
        if self.waiting:
            parts.append(f"GPUs that wait while no group can be trained: {self.waiting}")
        if self.idle:
            parts.append(f"GPUs that are paid for idle: {self.idle}")
        return "; ".join(parts)


def ranks_of_nodes(recipe: Recipe, gpus: int) -> TrainerRanks:
    """Return the work of the trainer's nodes, with so many GPUs each."""
    ranks, step = recipe.ranks(gpus), recipe.step
    efficiency = None if step is None or ranks == 1 else step.efficiency(ranks)
    return TrainerRanks(
        gpus=gpus,
        nodes=recipe.trainer_nodes,
        ranks=ranks,
        sampling=min(ranks, recipe.limits.sampling),
        groups=None if step is None else step.groups,
        rounds=None if step is None else step.rounds(ranks),
        efficiency=1.0 if efficiency is None else efficiency.value,
        basis="assumed" if efficiency is None else efficiency.source.basis,
        source="one rank divides nothing" if efficiency is None else efficiency.source.text,
    )
