"""Check the job's sequence-parallel degree against the workers of a rollout node, which share images. Pure."""

from engine.memory.published import SizedModel
from engine.parallel.worker_group import Degrees, allowed_degrees
from launcher.job.checked import CheckedJob
from launcher.job.schema import Job

BRANCHES = 2
"""Branches of classifier-free guidance: with the prompt, and without."""

HEADS = {"digits-ocr": 4, "shapes": 4}
"""Attention heads of the models that ship with spotrl. The heads of a user's own model are known after the engine
has read the model."""


def degrees_of(job: Job) -> Degrees:
    """Return the degrees that fit into a rollout node and are allowed by the model, in ascending order.

    For a model with unknown heads, every degree up to the number of workers counts.
    """
    workers = job.rollout_workers
    if job.runtime.cfg_parallel:
        return tuple(range(1, min(workers, BRANCHES) + 1))
    heads = HEADS.get(job.model.name) if job.model.path is None else None
    if heads is None:
        return tuple(range(1, workers + 1))
    return allowed_degrees(heads, most=workers)


def check_sp_degree(checked: CheckedJob, sized: SizedModel | None) -> None:
    """Raise JobError for a fixed degree that is not possible; the error names the possible degrees.

    `sized`: the job's model. A network that takes the scale of guidance as an input has one branch. None: a model that
    ships with spotrl.
    """
    job = checked.job
    if job.runtime.cfg_parallel and sized is not None and sized.architecture.takes_guidance:
        raise checked.error(
            "runtime.cfg_parallel",
            f"runtime.cfg_parallel is true, but {sized.text} takes guidance as an input and has one branch",
            "use cfg_parallel: false, which shares the sequence",
        )
    degree, workers, degrees = job.runtime.sp_degree, job.rollout_workers, degrees_of(job)
    if degree == "auto" or degree in degrees:
        return
    remedy = f"use {', '.join(map(str, degrees))} or auto"
    if degree > workers:
        raise checked.error(
            "runtime.sp_degree",
            f"runtime.sp_degree is {degree}, but a rollout node has {workers} worker{'s' if workers > 1 else ''} "
            f"(resources.rollout.accelerators is {job.resources.rollout.accelerators}, and a group never spans nodes)",
            f"{remedy}; or nodes with more GPUs",
        )
    raise checked.error(
        "runtime.sp_degree",
        f"runtime.sp_degree is {degree}, which does not divide the {HEADS[job.model.name]} attention heads of "
        f"{job.model.name}",
        f"{remedy}: every worker of a group takes whole heads",
    )
