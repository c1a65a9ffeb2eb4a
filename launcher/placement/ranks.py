"""Ranks of the trainer in a plan: what a job asks for, what is refused, and what a node's GPUs do. Pure.

The number of ranks comes from engine/trainer_ranks.py alone, so a plan never counts a rank that the engine does not
start.
"""

from dataclasses import dataclass

from engine.trainer_ranks import LIMITS, Asked, RankLimits, groups_of_step
from launcher.job.checked import CheckedJob
from launcher.job.schema import Job
from launcher.market.instance_types import instance_types
from launcher.placement.iteration_time import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRanks:
    """Work of the GPUs of the trainer's node."""

    gpus: int
    """GPUs of the node."""
    ranks: int
    """GPUs that train, a rank on each."""
    sampling: int
    """Ranks that sample rollouts while no complete group waits for training. The other ranks wait then."""
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
        return self.gpus - self.ranks

    def text(self) -> str:
        """Return the ranks in words, like `8 of 8 GPUs train; 16 groups of a step take 2 rounds; efficiency 98.0%`."""
        parts = [f"{self.ranks} of {self.gpus} GPU{'s train' if self.gpus > 1 else ' trains'}"]
        if self.ranks > 1 and self.rounds is not None:
            parts.append(f"{self.groups} groups of a step take {self.rounds} round{'s' if self.rounds > 1 else ''}")
        if self.ranks > 1:
            parts.append(f"efficiency {self.efficiency:.1%} ({self.basis})")
        if self.waiting:
            parts.append(f"GPUs that wait while no group can be trained: {self.waiting}")
        if self.idle:
            parts.append(f"GPUs that are paid for idle: {self.idle}")
        return "; ".join(parts)


def ranks_of_node(recipe: Recipe, gpus: int) -> TrainerRanks:
    """Return the work of a trainer node with so many GPUs."""
    ranks, step = recipe.ranks(gpus), recipe.step
    efficiency = None if step is None or ranks == 1 else step.efficiency(ranks)
    return TrainerRanks(
        gpus=gpus,
        ranks=ranks,
        sampling=min(ranks, recipe.limits.sampling),
        groups=None if step is None else step.groups,
        rounds=None if step is None else step.rounds(ranks),
        efficiency=1.0 if efficiency is None else efficiency.value,
        basis="assumed" if efficiency is None else efficiency.source.basis,
        source="one rank divides nothing" if efficiency is None else efficiency.source.text,
    )


def asked_ranks(job: Job) -> Asked:
    """Return the ranks that a job asks for."""
    return job.runtime.trainer_ranks


def groups_of(job: Job) -> int:
    """Return the groups of an optimiser step."""
    return groups_of_step(job.algorithm.prompts_per_batch, job.algorithm.updates_per_batch)


def wanted_ranks(job: Job, limits: RankLimits | None = None) -> int:
    """Return the ranks on a node with the GPUs that the job names: the least GPUs of a trainer node.

    Ranks of the local infra need no GPUs. `limits`: None: of this engine. Raises ValueError for a job that
    `check_ranks` refuses.
    """
    limits = limits or LIMITS[job.model.weights]
    asked = asked_ranks(job)
    gpus = job.resources.trainer.gpus if job.clouds or asked == "auto" else asked
    return limits.ranks(asked, gpus=gpus, groups=groups_of(job))


def check_ranks(checked: CheckedJob, limits: RankLimits | None = None) -> None:
    """Raise JobError for more ranks than the groups, the node's GPUs or the engine allow, or GPUs that a node lacks.

    Nodes of the local infra have the GPUs of this machine, whatever the job names, so their GPUs are not compared.
    `limits`: None: of this engine.
    """
    limits = limits or LIMITS[checked.job.model.weights]
    job, field = checked.job, "runtime.trainer_ranks"
    _check_instance_type(checked)
    asked, groups, named = asked_ranks(job), groups_of(job), job.resources.trainer.gpus
    if asked == "auto":
        return
    if asked > groups:
        algorithm = job.algorithm
        raise checked.error(
            field,
            f"{field} is {asked}, and an optimiser step has {groups} group{'s' if groups > 1 else ''} "
            f"(algorithm.prompts_per_batch {algorithm.prompts_per_batch} / updates_per_batch "
            f"{algorithm.updates_per_batch}), of which each rank trains at least one",
            f"use {groups} or fewer, or auto; or set algorithm.prompts_per_batch: "
            f"{asked * algorithm.updates_per_batch}",
        )
    if job.clouds and asked > named:
        name = job.resources.trainer.accelerator
        raise checked.error(
            field,
            f"{field} is {asked}, and a trainer node with {job.resources.trainer.accelerators} "
            f"(resources.trainer.accelerators) has {named} GPU{'s' if named > 1 else ''}, one for each rank",
            f"use {named} or fewer, or auto; or set resources.trainer.accelerators: {name}:{asked}",
        )
    if asked > limits.most:
        raise checked.error(
            field,
            f"{field} is {asked}, and this version trains model.weights {job.model.weights} with {limits.most} "
            f"rank{'s' if limits.most > 1 else ''} at most",
            f"use {limits.most} or auto",
        )


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
