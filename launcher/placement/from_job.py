"""Convert a job file into the plan's request to a cloud. Pure, but for the model's folder."""

from dataclasses import replace
from math import ceil
from pathlib import Path

from engine.config import CandidateBudget
from engine.memory.job import sent_bytes, weights_bytes
from engine.timing.job import is_timed, job_seconds, rows_of_an_image
from engine.timing.ranks import StepWork
from engine.trainer_ranks import RankLimits, limits_of, ranks_of_each_node
from launcher.job.schema import Job
from launcher.job.sections import NodeResources
from launcher.placement.iteration_time import Recipe
from launcher.placement.memory import memory_of_job, ranks_have_room, usable_of
from launcher.placement.ranks import asked_ranks, groups_of, wanted_ranks
from launcher.placement.recipes import timed, untimed
from launcher.placement.requirements import CloudRequirements, NodeRequirements, Spot


def cloud_requirements(
    job: Job, policy: str = "ours", folder: Path | None = None, limits: RankLimits | None = None
) -> CloudRequirements:
    """Return the needs of a job, as the planner's input. `folder`: the model's folder on this machine, if it is here.

    A job without timings needs all rollout nodes that the job file allows, because the number of nodes that pay is
    unknown. Raises ValueError for ranks that `check_ranks` refuses.
    """
    resources = job.resources
    trainer_gpus = ranks_of_each_node(wanted_ranks(job, limits), resources.trainer.num_nodes)
    min_nodes = resources.rollout.min_nodes
    if min_nodes is None:
        has_timings = is_timed(job, resources.trainer.accelerator, resources.rollout.accelerator)
        min_nodes = 0 if has_timings else resources.rollout.num_nodes
    return CloudRequirements(
        recipe=recipe_of(job, folder, limits),
        trainer=replace(_node(resources.trainer), gpus=trainer_gpus),
        trainer_gpus_named=resources.trainer.gpus,
        # Sharded weights need the memory of all GPUs that were checked.
        least_trainer_gpus=1 if asked_ranks(job) == "auto" and job.model.weights == "lora" else None,
        rollout=replace(_node(resources.rollout), pool_gpus=job.reward.pool_gpus),
        max_rollout_nodes=resources.rollout.num_nodes,
        min_rollout_nodes=min_nodes,
        clouds=job.clouds,
        checkpoint_every=job.checkpoint.every,
        trainer_on_spot=job.trains_on_spot,
        spot=Spot(job.spot) if job.rolls_out_on_spot else Spot.NEVER,
        max_hourly_micro_usd=job.budget.max_hourly,
        max_total_micro_usd=job.nodes_max_total,
        judge_micro_usd=job.reward.judge_micro_usd,
        deadline_ms=job.budget.deadline,
        max_runtime_ms=job.budget.max_runtime,
        policy=policy,
    )


def recipe_of(job: Job, folder: Path | None = None, limits: RankLimits | None = None) -> Recipe:
    """Return the recipe of a job from the timings of its model and GPUs, or an untimed recipe, marked as a guess."""
    recipe = _recipe_of_a_rank(job, folder)
    step = _step_of(job, recipe, folder)
    return replace(
        recipe,
        step=step,
        asked_ranks=asked_ranks(job),
        limits=limits or limits_of(job.model.weights, have_room=ranks_have_room(job, folder)),
        trainer_nodes=job.resources.trainer.num_nodes,
    )


def _step_of(job: Job, recipe: Recipe, folder: Path | None) -> StepWork:
    """Return an optimiser step of the job, from the training seconds of one GPU."""
    algorithm = job.algorithm
    rows = min(algorithm.rows_per_forward, rows_that_fit(job, folder) or algorithm.rows_per_forward)
    of_group = rows_of_an_image(job) * algorithm.images_per_prompt
    return StepWork(
        groups=groups_of(job),
        group_seconds=recipe.cost.train_seconds / algorithm.prompts_per_batch,
        passes_of_group=ceil(of_group / rows),
        groups_of_pass=max(1, rows // of_group),
        unit=algorithm.unit if isinstance(algorithm.unit, int) else 0,
        trained_bytes=weights_bytes(job.model, folder),
        is_sharded=job.model.weights == "full",
        gpu=job.resources.trainer.accelerator,
    )


def _recipe_of_a_rank(job: Job, folder: Path | None) -> Recipe:
    budget = job.exploration.budget
    max_candidates = budget.candidates if isinstance(budget, CandidateBudget) else budget.max_candidates
    algorithm = job.algorithm.name
    assert algorithm != "auto", "EngineConfig replaces auto by the recommended algorithm"
    trainer, rollout = job.resources.trainer.accelerator, job.resources.rollout.accelerator
    seconds = job_seconds(job, trainer=trainer, rollout=rollout, rows=rows_that_fit(job, folder), folder=folder)
    prompts, images = job.algorithm.prompts_per_batch, job.algorithm.images_per_prompt
    explores, copy_bytes = job.exploration.mode == "stale", sent_bytes(job.model, folder)
    if seconds is None:
        recipe = untimed(
            model=job.model.name,
            iterations=job.iterations,
            prompts=prompts,
            images_per_prompt=images,
            explores=explores,
            max_candidates=max_candidates,
            copy_bytes=copy_bytes,
            algorithm=algorithm,
            gpus=" and ".join(dict.fromkeys((trainer, rollout))),
        )
    else:
        recipe = timed(
            seconds=seconds,
            gpu=rollout,
            iterations=job.iterations,
            prompts=prompts,
            images_per_prompt=images,
            explores=explores,
            max_candidates=max_candidates,
            copy_bytes=copy_bytes,
            algorithm=algorithm,
        )
    if job.exploration.mode == "in-path":
        unplanned = "exploration in-path is not in the figures: neither what it costs, nor what it saves"
        return replace(recipe, never_run=(*recipe.never_run, unplanned))
    return recipe


def rows_that_fit(job: Job, folder: Path | None = None) -> int | None:
    """Return the rows of a training pass that fit on the trainer's GPU, at least 1. None: the memory is not known."""
    memory, usable = memory_of_job(job, folder), usable_of(job, job.resources.trainer.accelerator)
    if memory is None or usable is None:
        return None
    return max(1, memory.trainer.fitting(usable))


def _node(resources: NodeResources) -> NodeRequirements:
    return NodeRequirements(
        accelerator=resources.accelerator,
        gpus=resources.gpus,
        infra=resources.infra or "*",
        instance_type=resources.instance_type,
    )
