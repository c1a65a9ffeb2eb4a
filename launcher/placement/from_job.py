"""From a job file to what a plan asks of a cloud. Pure."""

from dataclasses import replace

from engine.config import CandidateBudget
from launcher.job import Job, NodeResources
from launcher.placement.ask import CloudAsk, NodeAsk, Spot
from launcher.placement.iteration_time import Recipe
from launcher.placement.plan import PlacementError
from launcher.placement.recipes import qwen_image_512


def cloud_ask(job: Job, policy: str = "ours") -> CloudAsk:
    """Raises PlacementError for a job whose iterations nobody has timed on cloud GPUs."""
    resources = job.resources
    return CloudAsk(
        recipe=recipe_of(job),
        trainer=_node(resources.trainer),
        rollout=_node(resources.rollout),
        max_rollout_nodes=resources.rollout.num_nodes,
        clouds=job.clouds,
        spot=Spot(job.spot) if job.rolls_out_on_spot else Spot.NEVER,
        max_hourly_micro_usd=job.budget.max_hourly,
        max_total_micro_usd=job.budget.max_total,
        deadline_ms=job.budget.deadline,
        policy=policy,
    )


def recipe_of(job: Job) -> Recipe:
    """The timed recipe that the job is an instance of."""
    if job.model.name != "qwen-image":
        raise PlacementError(
            f"model.name is {job.model.name}, and nobody has timed its iterations on cloud GPUs, so what it would cost "
            "cannot be said; plan qwen-image, or run this one here (--infra local)"
        )
    budget = job.exploration.budget
    recipe = qwen_image_512(
        iterations=job.iterations,
        prompts=job.algorithm.prompts_per_batch,
        images_per_prompt=job.algorithm.images_per_prompt,
        explores=job.exploration.mode == "stale",
        max_candidates=budget.candidates if isinstance(budget, CandidateBudget) else budget.max_candidates,
        lora_rank=job.model.lora_rank if job.model.weights == "lora" else None,
    )
    if job.exploration.mode == "in-path":
        unplanned = "exploration in-path is not in the figures: neither what it costs, nor what it saves"
        return replace(recipe, never_run=(*recipe.never_run, unplanned))
    return recipe


def _node(resources: NodeResources) -> NodeAsk:
    return NodeAsk(
        accelerator=resources.accelerator,
        gpus=resources.gpus,
        infra=resources.infra or "*",
        instance_type=resources.instance_type,
    )
