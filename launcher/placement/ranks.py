"""Ranks of the trainer in a plan: what a job asks for, what is refused, and what a node's GPUs do. Pure.

The number of ranks comes from engine/trainer_ranks.py alone, so a plan never counts a rank that the engine does not
start.
"""

from dataclasses import dataclass

from engine.trainer_ranks import LIMITS, RankLimits, groups_of_step, ranks_of_each_node
from launcher.job.checked import CheckedJob
from launcher.job.recipe import Recipe
from launcher.market.instance_types import instance_types


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


def check_ranks(checked: CheckedJob, limits: RankLimits | None = None) -> None:
    """Raise JobError for more ranks than the groups, the nodes' GPUs or the engine allow, or GPUs that a node lacks.

    Nodes of the local infra have the GPUs of this machine, whatever the job names, so their GPUs are not compared.
    `limits`: None: of this engine.
    """
    limits = limits or LIMITS[checked.job.model.weights]
    job, field = checked.job, "runtime.trainer_ranks"
    _check_instance_type(checked)
    asked, named = job.runtime.trainer_ranks, job.resources.trainer.gpus
    groups = groups_of_step(job.algorithm.prompts_per_batch, job.algorithm.updates_per_batch)
    nodes = job.resources.trainer.num_nodes
    if asked == "auto":
        return
    if asked > groups:
        algorithm = job.algorithm
        raise checked.error(
            field,
            f"{field} is {asked}, and an optimiser step has {groups} group{'s' if groups > 1 else ''} "
            f"(algorithm.prompts_per_batch {algorithm.prompts_per_batch} / updates_per_batch "
            f"{algorithm.updates_per_batch}), of which each rank trains at least one",
            f"{_at_most(groups, nodes)}; or set algorithm.prompts_per_batch: {asked * algorithm.updates_per_batch}",
        )
    if job.clouds and asked > named * nodes:
        trainer, all_gpus = job.resources.trainer, named * nodes
        several = f"{nodes} trainer nodes" if nodes > 1 else "a trainer node"
        raise checked.error(
            field,
            f"{field} is {asked}, and {several} with {trainer.accelerators} (resources.trainer.accelerators) "
            f"{'have' if nodes > 1 else 'has'} {all_gpus} GPU{'s' if all_gpus > 1 else ''}, one for each rank",
            f"{_at_most(all_gpus, nodes)}; or set resources.trainer.accelerators: "
            f"{trainer.accelerator}:{ranks_of_each_node(asked, nodes)}",
        )
    if asked > limits.most:
        raise checked.error(
            field,
            f"{field} is {asked}, and this version trains model.weights {job.model.weights} with {limits.most} "
            f"rank{'s' if limits.most > 1 else ''} at most{', on all nodes together' if nodes > 1 else ''}",
            f"use {limits.most} or auto" if nodes == 1 else _at_most(limits.most, nodes),
        )


def _at_most(ranks: int, nodes: int) -> str:
    """Return what to write for `ranks` ranks at most. Several nodes have as many ranks each."""
    if nodes == 1:
        return f"use {ranks} or fewer, or auto"
    if ranks < nodes:
        return f"use {ranks} or fewer, and resources.trainer.num_nodes: {ranks} or fewer"
    each = ranks // nodes
    fewer = ", or fewer on each" if each > 1 else ""
    return f"use {each * nodes}, {each} on each of the {nodes} nodes{fewer}"


def _check_instance_type(checked: CheckedJob) -> None:
    """Raise JobError if the trainer's instance type lacks the GPUs that the job names. Unknown types are left alone."""
    trainer = checked.job.resources.trainer
    known = [one for one in instance_types(checked.job.clouds) if one.instance_type == trainer.instance_type]
    for machine in known:
        if machine.accelerator.lower() == trainer.accelerator.lower() and machine.gpus >= trainer.gpus:
            return
    if known:
        has = f"{known[0].accelerator}:{known[0].gpus}"
        field = "resources.trainer.accelerators"
        raise checked.error(
            field,
            f"{field} is {trainer.accelerators}, and resources.trainer.instance_type {trainer.instance_type} has {has}",
            f"use accelerators: {has}, or leave instance_type out",
        )
