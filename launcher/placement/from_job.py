"""Convert a job file into the plan's request to a cloud. Pure."""

from dataclasses import replace

from engine.config import CandidateBudget
from launcher.job.schema import Job
from launcher.job.sections import NodeResources
from launcher.placement.iteration_time import TRAINED_ON_GPUS, Recipe
from launcher.placement.recipes import qwen_image_512, untimed
from launcher.placement.requirements import CloudRequirements, NodeRequirements, Spot


def cloud_requirements(job: Job, policy: str = "ours") -> CloudRequirements:
    """Return the needs of a job, as the planner's input.

    A job without timings needs all rollout nodes that the job file allows, because the number of nodes that pay is
    unknown.
    """
    resources = job.resources
    min_nodes = resources.rollout.min_nodes
    if min_nodes is None:
        min_nodes = 0 if is_timed(job) else resources.rollout.num_nodes
    return CloudRequirements(
        recipe=recipe_of(job),
        trainer=replace(_node(resources.trainer), gpus=min(resources.trainer.gpus, TRAINED_ON_GPUS)),
        trainer_gpus_named=resources.trainer.gpus,
        rollout=_node(resources.rollout),
        max_rollout_nodes=resources.rollout.num_nodes,
        min_rollout_nodes=min_nodes,
        clouds=job.clouds,
        spot=Spot(job.spot) if job.rolls_out_on_spot else Spot.NEVER,
        max_hourly_micro_usd=job.budget.max_hourly,
        max_total_micro_usd=job.budget.max_total,
        deadline_ms=job.budget.deadline,
        policy=policy,
    )


def is_timed(job: Job) -> bool:
    """Return whether comparable iterations were ever timed on cloud GPUs."""
    return job.model.name == "qwen-image"


def recipe_of(job: Job) -> Recipe:
    """Return the timed recipe that matches the job, or an untimed recipe, marked as a guess."""
    budget = job.exploration.budget
    max_candidates = budget.candidates if isinstance(budget, CandidateBudget) else budget.max_candidates
    algorithm = job.algorithm.name
    assert algorithm != "auto", "EngineConfig replaces auto by the recommended algorithm"
    if is_timed(job):
        recipe = qwen_image_512(
            iterations=job.iterations,
            prompts=job.algorithm.prompts_per_batch,
            images_per_prompt=job.algorithm.images_per_prompt,
            explores=job.exploration.mode == "stale",
            max_candidates=max_candidates,
            lora_rank=job.model.lora_rank if job.model.weights == "lora" else None,
            algorithm=algorithm,
        )
    else:
        recipe = untimed(
            model=job.model.name,
            iterations=job.iterations,
            prompts=job.algorithm.prompts_per_batch,
            images_per_prompt=job.algorithm.images_per_prompt,
            explores=job.exploration.mode == "stale",
            max_candidates=max_candidates,
            algorithm=algorithm,
        )
    if job.exploration.mode == "in-path":
        unplanned = "exploration in-path is not in the figures: neither what it costs, nor what it saves"
        return replace(recipe, never_run=(*recipe.never_run, unplanned))
    return recipe


def _node(resources: NodeResources) -> NodeRequirements:
    return NodeRequirements(
        accelerator=resources.accelerator,
        gpus=resources.gpus,
        infra=resources.infra or "*",
        instance_type=resources.instance_type,
    )
