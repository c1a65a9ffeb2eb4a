"""What follows from a job: sizes, memory, ranks, seconds and the recipe of its iterations. Derived once, here.

    Job + folder of the model, if it is here -> resolve -> Resolved -> checks, plan, launch

Pure, but for the model's folder. Money, places and prices are the plan's (launcher/placement/).
"""

from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from engine.config import CandidateBudget
from engine.exploration.value import ASSUMED_RHO
from engine.lora_file import files_of, find_lora
from engine.memory.budget import usable_bytes
from engine.memory.job import JobMemory, job_memory, sent_bytes, sized_model, trained_bytes
from engine.memory.published import EMBEDDED, SizedModel
from engine.model_folder import FolderError
from engine.timing.job import JobSeconds, job_seconds, rows_of_an_image
from engine.timing.ranks import StepWork
from engine.trainer_ranks import LIMITS, RankLimits, groups_of_step, limits_of
from launcher.job.checked import CheckedJob, JobError
from launcher.job.gpu_checks import check_ranks, check_sp_degree, check_timings
from launcher.job.recipe import Recipe, gain_exponent
from launcher.job.schema import Job
from launcher.market.estimate import Basis, Estimate
from launcher.market.hazard import prior_of
from launcher.market.instance_types import instance_types

UNTIMED_SECONDS = 60.0
"""Assumed seconds of an iteration on one GPU, for a job without measurements. Plans name the value a guess."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A job with all that follows from it and from its model's folder. Bytes and seconds are those of one GPU."""

    job: Job
    workdir: Path | None
    """Folder of the job file, where the model's folder may be."""
    sized: SizedModel | None
    """None for models that ship with spotrl, as `memory` and `seconds`: they fit everywhere, and nobody timed them."""
    groups: int
    """Groups of an optimiser step."""
    ranks: int
    """Ranks on nodes with the GPUs that the job names: the least GPUs of all nodes of the trainer."""
    trainer_usable: int | None
    """Bytes that tensors may fill on the smallest such GPU. None: a GPU of unknown memory."""
    rollout_usable: int | None
    memory: JobMemory | None
    """Memory with `ranks` ranks."""
    seconds: JobSeconds | None
    """None also for GPUs of unknown speed."""
    trained_bytes: int
    """Bytes of the trained weights in fp32."""
    rows_of_image: int
    """Training rows of an image."""
    recipe: Recipe
    """Without `seconds`, a recipe that is marked as a guess."""

    @property
    def folder(self) -> Path | None:
        """Return the model's folder. It may be missing on this machine: then the published sizes count."""
        path = self.job.model.path
        return None if self.workdir is None or path is None else self.workdir / path

    @property
    def lora_files(self) -> list[Path]:
        """Return the files of the job's LoRA, which are sent to nodes beside the model. Empty if they are not here."""
        lora = self.job.model.lora
        try:
            return [] if self.workdir is None or lora is None else files_of(find_lora(self.workdir / lora))
        except FolderError:  # sent at the launch, and removed here since
            return []

    @property
    def have_room(self) -> bool:
        """Return whether the GPU of every rank has room to sample. Models that ship with spotrl fit."""
        return self.memory is None or self.memory.have_room

    def memory_of(self, ranks: int) -> JobMemory | None:
        """Return the memory with so many ranks."""
        if self.sized is None or ranks == self.ranks:
            return self.memory
        return _memory(self.job, self.sized, ranks, self.trainer_usable)


def resolve_checked(checked: CheckedJob) -> Resolved:
    """Return what a job file resolves to.

    Raises JobError, with the line, for ranks or a sequence-parallel degree that the nodes' GPUs do not allow, and as
    `resolve`.
    """
    check_timings(checked)
    check_ranks(checked)
    resolved = resolve(checked.job, checked.workdir)
    check_sp_degree(checked, resolved.sized)
    return resolved


def resolve(job: Job, workdir: Path | None = None, limits: RankLimits | None = None) -> Resolved:
    """Return a job with all that follows from it.

    workdir  folder of the job file, where the model's folder may be; None: the published sizes count
    limits   numbers of ranks that the engine can run; None: those of this engine
    raises   JobError: the model's folder lacks a size. ValueError: ranks that `check_ranks` refuses
    """
    trainer, rollout, algorithm = job.resources.trainer, job.resources.rollout, job.algorithm
    folder = None if workdir is None or job.model.path is None else workdir / job.model.path
    try:
        sized = None if job.model.name in EMBEDDED else sized_model(job.model, folder)
    except FolderError as error:
        raise JobError(error.found, error.remedy, field=error.field) from None
    except ValueError as error:
        remedy = "download the model again, or give the folder that it was published as"
        raise JobError(str(error), remedy) from None
    groups, asked = groups_of_step(algorithm.prompts_per_batch, algorithm.updates_per_batch), job.runtime.trainer_ranks
    # Ranks of the local infra need no GPUs.
    gpus = trainer.gpus * trainer.num_nodes if job.clouds or asked == "auto" else asked
    ranks = (limits or LIMITS[job.model.weights]).ranks(asked, gpus=gpus, groups=groups)
    usable = usable_of(job, trainer.accelerator)
    memory = None if sized is None else _memory(job, sized, ranks, usable)
    rows = algorithm.rows_per_forward
    if memory is not None and usable is not None:
        rows = min(rows, max(1, memory.trainer.fitting(usable)))
    seconds, trainer_speed = None, 1.0
    if sized is not None:
        seconds = job_seconds(job, sized, trainer=trainer.accelerator, rollout=rollout.accelerator, rows=rows)
        if seconds is not None and trainer.accelerator != rollout.accelerator:
            alone = job_seconds(job, sized, trainer=trainer.accelerator, rollout=trainer.accelerator, rows=rows)
            trainer_speed = 1.0 if alone is None else seconds.rollout / alone.rollout
    rows_of_image = rows_of_an_image(job)
    rows_of_group = rows_of_image * algorithm.images_per_prompt
    trained = trained_bytes(job.model, EMBEDDED[job.model.name] if sized is None else sized.architecture)
    recipe = _recipe(job, seconds, sent_bytes(job.model, trained), trainer_speed)
    step = StepWork(
        groups=groups,
        group_seconds=recipe.train_seconds / recipe.prompts,
        passes_of_group=ceil(rows_of_group / rows),
        groups_of_pass=max(1, rows // rows_of_group),
        unit=algorithm.unit if isinstance(algorithm.unit, int) else 0,
        trained_bytes=trained,
        is_sharded=job.model.weights == "full",
        gpu=trainer.accelerator,
    )
    if limits is None:
        limits = limits_of(job.model.weights, have_room=memory is None or memory.have_room)
    return Resolved(
        job=job,
        workdir=workdir,
        sized=sized,
        groups=groups,
        ranks=ranks,
        trainer_usable=usable,
        rollout_usable=usable_of(job, rollout.accelerator),
        memory=memory,
        seconds=seconds,
        trained_bytes=trained,
        rows_of_image=rows_of_image,
        recipe=replace(recipe, step=step, limits=limits),
    )


def usable_of(job: Job, accelerator: str) -> int | None:
    """Return the bytes that tensors may fill on the smallest such GPU. None for a GPU of unknown memory."""
    sizes = [machine.gpu_mem_gib for machine in instance_types(job.clouds, [accelerator])]
    return usable_bytes(accelerator, min(sizes)) if sizes else None


def _memory(job: Job, sized: SizedModel, ranks: int, usable: int | None) -> JobMemory:
    return job_memory(
        job,
        sized,
        ranks=ranks,
        trainer_nodes=job.resources.trainer.num_nodes,
        rollout_gpus=job.rollout_workers,
        usable=usable,
    )


def _recipe(job: Job, seconds: JobSeconds | None, copy_bytes: int, trainer_speed: float) -> Recipe:
    """Return the recipe of a job on one GPU from the seconds of its images, or a guess of a minute an iteration.

    `trainer_speed`: as of `Recipe`.
    """
    trainer, rollout, algorithm = job.resources.trainer, job.resources.rollout, job.algorithm
    assert algorithm.name != "auto", "EngineConfig replaces auto by the recommended algorithm"
    budget, prompts = job.exploration.budget, algorithm.prompts_per_batch
    images = prompts * algorithm.images_per_prompt
    if seconds is None:
        gpus = " and ".join(dict.fromkeys((trainer.accelerator, rollout.accelerator)))
        most, of_iterations = job.iterations, "the job's own number, at most"
        measured_on, source = "nothing: a guess", f"a guess: {UNTIMED_SECONDS:.0f} s an iteration on one GPU"
        rollout_seconds = candidate_seconds = UNTIMED_SECONDS / 2 / images
        train_seconds = UNTIMED_SECONDS / 2
        never_run = [
            f"nobody has timed {job.model.name} on {gpus}: cost and time are a guess of {UNTIMED_SECONDS:.0f} s an "
            "iteration, and the budget is what holds",
            "as many rollout nodes are bought as the job names, because nobody knows how many pay",
        ]
    else:
        gpu = rollout.accelerator
        most = job.iterations * 2
        of_iterations = "the job's own number; half and twice, because seeds of digits-ocr needed 22 to 60"
        measured_on = f"1 {gpu}"
        source = ", ".join(dict.fromkeys(f"{name} {of.basis} ({of.text})" for name, of in seconds.sources))
        rollout_seconds, candidate_seconds = seconds.rollout, seconds.candidate
        train_seconds = seconds.train * prompts * algorithm.images_per_prompt
        assumed = [f"{name}: {of.text}" for name, of in seconds.sources if of.basis == "assumed"]
        never_run = [
            f"spotrl has never trained {seconds.model}: its seconds are of random weights, or published",
            *([f"assumed, not measured: {'; '.join(assumed)}"] if assumed else []),
            "how many iterations the target takes is assumed, and so is what exploration saves of them",
            f"spotrl never watched a spot {gpu}: how soon one is preempted is a prior ({prior_of(gpu, 1).source})",
            "a week of watching does not forecast the next: shares of time with spot were off by .2 on average",
        ]
    if job.exploration.mode == "in-path":
        never_run.append("exploration in-path is not in the figures: neither what it costs, nor what it saves")
    return Recipe(
        prompts=prompts,
        images_per_prompt=algorithm.images_per_prompt,
        sampling_gpus=1,
        sampling_speed=trainer_speed,
        rollout_gpu_seconds=rollout_seconds,
        candidate_gpu_seconds=candidate_seconds,
        train_seconds=train_seconds,
        max_candidates=budget.candidates if isinstance(budget, CandidateBudget) else budget.max_candidates,
        iterations=Estimate(
            mean=job.iterations, low=job.iterations / 2, high=most, basis=Basis.ASSUMED, source=of_iterations
        ),
        explores=job.exploration.mode == "stale",
        trains_candidates=job.exploration.trains == "candidates",
        rho=ASSUMED_RHO,
        gain_exponent=gain_exponent(algorithm.name),
        copy_bytes=copy_bytes,
        measured_on=measured_on,
        source=source,
        asked_ranks=job.runtime.trainer_ranks,
        trainer_nodes=trainer.num_nodes,
        never_run=tuple(never_run),
    )
