r"""Compare a job's memory with the GPUs that it names, before anything is bought. Pure, but for the model's folder.

job + folder of the model -> budgets (engine/memory/) -> memory of the trainer's and of a rollout worker's GPU
                                                      \-> PlacementError that says what would fit
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.memory.budget import GIB, Budget, Role, usable_bytes
from engine.memory.job import JobMemory, job_memory, smaller_settings
from engine.memory.scorers import pool_bytes
from engine.trainer_ranks import LIMITS
from launcher.job.schema import Job
from launcher.job.sections import NodeResources
from launcher.market.instance_types import instance_types, is_too_old
from launcher.placement.plan import PlacementError
from launcher.placement.ranks import asked_ranks, groups_of, wanted_ranks

MOST_GPUS = 99
"""More GPUs than any node has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """Memory of each GPU of a role. Bytes; counts are rows of a training pass, or images of a rollout pass."""

    role: Role
    accelerator: str
    model: str
    """Model, size and checkpointing that the figures are for."""
    ranks: int
    """GPUs of all nodes of the trainer, which train together; 1 for rollout workers. With LoRA each holds all parts,
    else a share."""
    usable: int
    """Bytes that tensors may fill: the GPU's memory without CUDA's context and what the allocator loses."""
    parts: Mapping[str, int]
    """Parts that are always there."""
    start: int
    """Need while the model is loaded, with the text encoders on the GPU."""
    unit: str
    bytes_each: int
    least_beside: int
    """Least need beside the parts, whatever the count: a set of gradients, or the decoder's tensors."""
    asked: int
    """Count that the job asks for on one GPU."""
    fitting: int
    """Largest count that fits."""

    @property
    def count(self) -> int:
        """Return the rows or images of a pass. The engine halves a pass that does not fit."""
        return min(self.asked, self.fitting)

    @property
    def busy(self) -> int:
        """Return the bytes beside the parts during a pass."""
        return max(self.count * self.bytes_each, self.least_beside)

    @property
    def parts_and_pass(self) -> int:
        return sum(self.parts.values()) + self.busy

    @property
    def free(self) -> int:
        """Return the bytes that stay free at the largest moment: during a pass, or while the model is loaded."""
        return self.usable - max(self.parts_and_pass, self.start)


def memory_of_job(job: Job, folder: Path | None = None, ranks: int | None = None) -> JobMemory | None:
    """Return the memory that a job needs. None for models that ship with spotrl.

    `folder`: the model's folder, if it is here. `ranks`: GPUs that train; None: as many as the job's own nodes have.
    Raises PlacementError for a folder that lacks a size.
    """
    try:
        ranks = wanted_ranks(job) if ranks is None else ranks
        trainer = job.resources.trainer
        return job_memory(
            job,
            folder,
            ranks=ranks,
            trainer_nodes=trainer.num_nodes,
            rollout_gpus=job.rollout_workers,
            usable=usable_of(job, trainer.accelerator),
        )
    except ValueError as error:
        raise PlacementError(
            f"{error}; download the model again, or give the folder that it was published as"
        ) from None


def ranks_have_room(job: Job, folder: Path | None = None) -> bool:
    """Return whether the GPU of every rank of the trainer has room to sample. Models that ship with spotrl fit.

    Raises as `memory_of_job`.
    """
    memory = memory_of_job(job, folder)
    return memory is None or memory.have_room


def check_memory(job: Job, memory: JobMemory, folder: Path | None = None) -> None:
    """Refuse GPUs on which not even one row, or one image, fits. Raises PlacementError, which says what would fit."""
    roles = {"trainer": (job.resources.trainer, memory.trainer), "rollout": (job.resources.rollout, memory.rollout)}
    for role, (resources, budget) in roles.items():
        usable = usable_of(job, resources.accelerator)
        if usable is None or budget.fitting(usable) or (role == "rollout" and not resources.num_nodes):
            continue
        raise PlacementError(
            f"resources.{role}.accelerators is {resources.accelerators}, and one {budget.unit} of {memory.text} needs "
            f"{gib(budget.needed(1))} GiB of a GPU's memory ({_parts(budget)}), where {gib(usable)} GiB can be used; "
            f"{' or '.join(_remedies(job, budget, resources, folder))}"
        )


def pool_bytes_of_job(job: Job) -> int:
    """Return the bytes of the scorers' models on each GPU that only scores. 0: no model, or no such GPU."""
    return pool_bytes(job.reward)


def check_pool(job: Job) -> None:
    """Refuse GPUs of a pool that do not hold the models of its processes. Raises PlacementError."""
    resources, needed = job.resources.rollout, pool_bytes_of_job(job)
    usable = usable_of(job, resources.accelerator) if resources.num_nodes else None
    if usable is not None and needed > usable:
        raise PlacementError(
            f"resources.rollout.accelerators is {resources.accelerators}, and the models of the scoring processes need "
            f"{gib(needed)} GiB of each GPU of the pool, where {gib(usable)} GiB can be used; use fewer "
            "reward.pool.processes, more reward.pool.gpus, or a larger GPU"
        )


def gpus_of_job(job: Job, memory: JobMemory, ranks: int = 1) -> tuple[GpuMemory, ...]:
    """Return the memory of the trainer's GPU and of a rollout GPU, for a job that `check_memory` accepts.

    `memory`: of so many ranks that train.
    """
    both = [(job.resources.trainer, memory.trainer, ranks)]
    both += [(job.resources.rollout, memory.rollout, 1)] if job.resources.rollout.num_nodes else []
    return tuple(
        GpuMemory(
            role=budget.role,
            accelerator=resources.accelerator,
            model=memory.text,
            ranks=ranks,
            usable=usable,
            parts=budget.parts_on(usable),
            start=budget.start,
            unit=budget.unit,
            bytes_each=budget.bytes_each,
            least_beside=budget.least_beside,
            asked=budget.asked,
            fitting=budget.fitting(usable),
        )
        for resources, budget, ranks in both
        if (usable := usable_of(job, resources.accelerator)) is not None
    )


def usable_of(job: Job, accelerator: str) -> int | None:
    """Return the bytes that tensors may fill on the smallest such GPU. None for a GPU of unknown memory."""
    sizes = [machine.gpu_mem_gib for machine in instance_types(job.clouds, [accelerator])]
    return usable_bytes(accelerator, min(sizes)) if sizes else None


def _remedies(job: Job, budget: Budget, resources: NodeResources, folder: Path | None) -> Iterator[str]:
    """Yield changes that would fit: larger GPUs, then gentler settings on the same GPU, then both."""
    larger = _larger(job, budget)
    if larger:
        yield f"take {' or '.join(larger)}"
    settings = [(words, _budget(changed, budget.role, folder)) for words, changed in smaller_settings(job, folder)]
    here = usable_of(job, resources.accelerator) or 0
    same = [words for words, less in settings if less.fitting(here)]
    yield from (f"set {words}" for words in same)
    more = _more_gpus(job, budget, resources, folder)
    yield from more
    if larger or same or more:
        return
    for words, less in settings:
        if found := _larger(job, less):
            yield f"set {words} and take {' or '.join(found)}"
            return
    yield "train a smaller model: no GPU on offer has that much"


def _more_gpus(job: Job, budget: Budget, resources: NodeResources, folder: Path | None) -> list[str]:
    """Return the smallest node of the same GPU on which a row fits because more ranks share the weights."""
    usable = usable_of(job, resources.accelerator) or 0
    most = LIMITS[job.model.weights].ranks("auto", gpus=MOST_GPUS, groups=groups_of(job))
    if budget.role != "trainer" or job.model.weights != "full" or asked_ranks(job) != "auto":
        return []
    for machine in sorted(instance_types(job.clouds, [resources.accelerator]), key=lambda machine: machine.gpus):
        if resources.gpus < machine.gpus <= most and _budget(job, "trainer", folder, machine.gpus).fitting(usable):
            return [f"set resources.trainer.accelerators: {resources.accelerator}:{machine.gpus}"]
    return []


def _larger(job: Job, budget: Budget) -> list[str]:
    """Return the accelerators of the job's clouds on which a row or an image fits, the smallest memory first."""
    sizes = {machine.accelerator: machine.gpu_mem_gib for machine in instance_types(job.clouds)}
    return [
        name
        for name, size in sorted(sizes.items(), key=lambda item: (item[1], item[0]))
        if not is_too_old(name) and budget.fitting(usable_bytes(name, size))
    ]


def _budget(job: Job, role: Role, folder: Path | None, ranks: int | None = None) -> Budget:
    memory = memory_of_job(job, folder, ranks)
    assert memory is not None, "a shipped model has no memory to compare"
    return memory.trainer if role == "trainer" else memory.rollout


def _parts(budget: Budget) -> str:
    parts = [f"{name} {gib(count)}" for name, count in budget.parts.items()]
    if budget.needed(1) == budget.start:
        return f"{', '.join(parts)}; while it is loaded, with its text encoders, {gib(budget.start)}"
    return f"{', '.join(parts)}, a {budget.unit} {gib(budget.bytes_each)}"


def gib(count: int, digits: int = 1) -> str:
    """Return bytes as GiB in words."""
    return f"{count / GIB:.{digits}f}"
