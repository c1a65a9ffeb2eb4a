r"""Compare a job's memory with the GPUs that it names, before anything is bought. Pure, but for the model's folder.

Resolved -> memory of the trainer's and of a rollout worker's GPU
        \-> PlacementError that says what would fit
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.memory.budget import GIB, Budget, Role, usable_bytes
from engine.memory.job import smaller_settings
from engine.memory.scorers import pool_bytes
from engine.trainer_ranks import LIMITS
from launcher.job.resolved import Resolved, resolve
from launcher.job.schema import Job
from launcher.market.instance_types import instance_types, is_too_old
from launcher.placement.plan import PlacementError

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
    """Need while the model is loaded: the text encoders, which leave the GPU, then the weights."""
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


class TooSmall(PlacementError):
    """The GPUs of a role do not hold the model."""

    def __init__(self, text: str, role: str) -> None:
        super().__init__(text)
        self.role = role


def check_memory(resolved: Resolved) -> None:
    """Refuse GPUs on which not even one row, or one image, fits. Raises TooSmall, which says what would fit."""
    job, memory = resolved.job, resolved.memory
    if memory is None:
        return
    trainer, rollout = job.resources.trainer, job.resources.rollout
    roles = [(trainer, memory.trainer, resolved.trainer_usable)]
    roles += [(rollout, memory.rollout, resolved.rollout_usable)] if rollout.num_nodes else []
    for resources, budget, usable in roles:
        if usable is not None and not budget.fitting(usable):
            raise TooSmall(
                f"resources.{budget.role}.accelerators is {resources.accelerators}, and one {budget.unit} of "
                f"{memory.text} needs {gib(budget.needed(1))} GiB of a GPU's memory ({_parts(budget)}), where "
                f"{gib(usable)} GiB can be used; {' or '.join(_remedies(resolved, budget, usable))}",
                budget.role,
            )


def pool_bytes_of_job(job: Job) -> int:
    """Return the bytes of the scorers' models on each GPU that only scores. 0: no model, or no such GPU."""
    return pool_bytes(job.reward)


def check_pool(resolved: Resolved) -> None:
    """Refuse GPUs of a pool that do not hold the models of its processes. Raises PlacementError."""
    resources, needed = resolved.job.resources.rollout, pool_bytes_of_job(resolved.job)
    usable = resolved.rollout_usable if resources.num_nodes else None
    if usable is not None and needed > usable:
        raise PlacementError(
            f"resources.rollout.accelerators is {resources.accelerators}, and the models of the scoring processes need "
            f"{gib(needed)} GiB of each GPU of the pool, where {gib(usable)} GiB can be used; use fewer "
            "reward.pool.processes, more reward.pool.gpus, or a larger GPU"
        )


def gpu_memory(resolved: Resolved, ranks: int) -> tuple[GpuMemory, ...]:
    """Return the memory of the trainer's GPU, of so many ranks, and of a rollout GPU.

    For a job that `check_memory` accepts. Empty for models that ship with spotrl.
    """
    memory, trainer, rollout = resolved.memory_of(ranks), resolved.job.resources.trainer, resolved.job.resources.rollout
    if memory is None:
        return ()
    roles = [(trainer, memory.trainer, resolved.trainer_usable, ranks)]
    roles += [(rollout, memory.rollout, resolved.rollout_usable, 1)] if rollout.num_nodes else []
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
        for resources, budget, usable, ranks in roles
        if usable is not None
    )


def _remedies(resolved: Resolved, budget: Budget, usable: int) -> Iterator[str]:
    """Yield changes that would fit: larger GPUs, then gentler settings on the same GPU, then both."""
    job, role = resolved.job, budget.role
    larger = _larger(job, budget)
    if larger:
        yield f"take {' or '.join(larger)}"
    settings = []
    for words, changed in smaller_settings(job, resolved.folder):
        memory = resolve(changed, resolved.workdir).memory
        assert memory is not None, "a shipped model has no memory to compare"
        settings.append((words, memory.trainer if role == "trainer" else memory.rollout))
    on_same_gpu = [words for words, less in settings if less.fitting(usable)]
    yield from (f"set {words}" for words in on_same_gpu)
    more = _more_gpus(resolved, usable) if role == "trainer" else []
    yield from more
    if larger or on_same_gpu or more:
        return
    for words, less in settings:
        if accelerators := _larger(job, less):
            yield f"set {words} and take {' or '.join(accelerators)}"
            return
    yield "train a smaller model: no GPU on offer has that much"


def _more_gpus(resolved: Resolved, usable: int) -> list[str]:
    """Return the smallest node of the same GPU on which a row fits because more ranks share the weights."""
    job, trainer = resolved.job, resolved.job.resources.trainer
    if job.model.weights != "full" or job.runtime.trainer_ranks != "auto":
        return []
    most = LIMITS["full"].ranks("auto", gpus=MOST_GPUS, groups=resolved.groups)
    for machine in sorted(instance_types(job.clouds, [trainer.accelerator]), key=lambda machine: machine.gpus):
        memory = resolved.memory_of(machine.gpus) if trainer.gpus < machine.gpus <= most else None
        if memory is not None and memory.trainer.fitting(usable):
            return [f"set resources.trainer.accelerators: {trainer.accelerator}:{machine.gpus}"]
    return []


def _larger(job: Job, budget: Budget) -> list[str]:
    """Return the accelerators of the job's clouds on which a row or an image fits, the smallest memory first."""
    sizes = {machine.accelerator: machine.gpu_mem_gib for machine in instance_types(job.clouds)}
    return [
        name
        for name, size in sorted(sizes.items(), key=lambda item: (item[1], item[0]))
        if not is_too_old(name) and budget.fitting(usable_bytes(name, size))
    ]


def _parts(budget: Budget) -> str:
    parts = [f"{name} {gib(count)}" for name, count in budget.parts.items()]
    if budget.needed(1) == budget.start:
        return f"{', '.join(parts)}; while its text encoders encode, {gib(budget.start)}"
    return f"{', '.join(parts)}, a {budget.unit} {gib(budget.bytes_each)}"


def gib(count: int, digits: int = 1) -> str:
    """Return bytes as GiB in words."""
    return f"{count / GIB:.{digits}f}"
