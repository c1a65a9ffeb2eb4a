"""Refuse ranks and a sequence-parallel degree that the GPUs of a job do not allow, before anything is bought. Pure."""

from engine.memory.published import EMBEDDED, SizedModel
from engine.parallel.worker_group import Degrees, allowed_degrees
from engine.timing.seconds import known_speed
from engine.trainer_ranks import LIMITS, RankLimits, groups_of_step, ranks_of_each_node
from launcher.job.checked import CheckedJob
from launcher.job.schema import Job
from launcher.market.instance_types import instance_types

BRANCHES = 2
"""Branches of classifier-free guidance: with the prompt, and without."""


def degrees_of(job: Job) -> Degrees:
    """Return the degrees that fit into a rollout node and are allowed by the model, in ascending order.

    The heads of a user's own model are known after the engine has read the model. Until then every degree up to the
    number of workers counts.
    """
    workers = job.rollout_workers
    if job.runtime.cfg_parallel:
        return tuple(range(1, min(workers, BRANCHES) + 1))
    if job.model.path is not None or job.model.name not in EMBEDDED:
        return tuple(range(1, workers + 1))
    return allowed_degrees(EMBEDDED[job.model.name].heads, most=workers)


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
        f"runtime.sp_degree is {degree}, which does not divide the {EMBEDDED[job.model.name].heads} attention heads of "
        f"{job.model.name}",
        f"{remedy}: every worker of a group takes whole heads",
    )


def check_timings(checked: CheckedJob) -> None:
    """Raise JobError for a GPU of cloud nodes on which nobody timed the job's model: hours and dollars are unknown."""
    job = checked.job
    if not job.clouds or job.model.name in EMBEDDED:
        return
    for role, resources in (("trainer", job.resources.trainer), ("rollout", job.resources.rollout)):
        if known_speed(resources.accelerator) is None:
            field = f"resources.{role}.accelerators"
            sold = {machine.accelerator for machine in instance_types(job.clouds)}
            raise checked.error(
                field,
                f"{field} is {resources.accelerators}, a GPU without timings: hours and dollars of {job.model.name} on "
                "it would be a guess",
                f"use one of {', '.join(sorted(name for name in sold if known_speed(name) is not None))}",
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
    ranks_each = ranks // nodes
    fewer = ", or fewer on each" if ranks_each > 1 else ""
    return f"use {ranks_each * nodes}, {ranks_each} on each of the {nodes} nodes{fewer}"


def _check_instance_type(checked: CheckedJob) -> None:
    """Raise JobError if the trainer's instance type lacks the GPUs that the job names. Unknown types are left alone."""
    trainer = checked.job.resources.trainer
    machines = [
        machine for machine in instance_types(checked.job.clouds) if machine.instance_type == trainer.instance_type
    ]
    for machine in machines:
        if machine.accelerator.lower() == trainer.accelerator.lower() and machine.gpus >= trainer.gpus:
            return
    if machines:
        has = f"{machines[0].accelerator}:{machines[0].gpus}"
        field = "resources.trainer.accelerators"
        raise checked.error(
            field,
            f"{field} is {trainer.accelerators}, and resources.trainer.instance_type {trainer.instance_type} has {has}",
            f"use accelerators: {has}, or leave instance_type out",
        )
