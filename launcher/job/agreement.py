"""Check that the fields of a job agree with one another. Each check raises ValueError and says what to write instead.

A field by itself is checked where it is declared: schema.py, sections.py, and the engine's config.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.config import DRIFT
from engine.reward_config import LOCAL_MODELS
from launcher.money import dollars

if TYPE_CHECKING:
    from launcher.job.schema import Job

LEAST_EVALUATIONS = 6
"""Evaluations needed for the cost of a point (launcher/decide/point_cost.py): two smoothed scores of three evaluations
each without a common one."""

IN_A_ROW = 3
"""Evaluations in a row at which a point costs too much before a run ends: as many as a smoothed score has."""

SELF_CONTAINED = ("ocr", "ocr_strict", "ocr_smooth", "shapes", "shapes_strict")
"""Scorers without settings, models or servers of their own."""

REWARDS = (*SELF_CONTAINED, *LOCAL_MODELS, "http", "vlm")
"""Scorers that ship with spotrl (engine/rewards/). A user's own scorer is written `package.module:function`."""

METRICS = dict.fromkeys(SELF_CONTAINED, ("exact_match", "similarity", "reward")) | {
    "ocr_smooth": ("exact_match", "similarity", "smooth", "reward"),
    **dict.fromkeys(LOCAL_MODELS, ("reward",)),
    "geneval": ("accuracy", "reward"),
}
"""Metrics of each scorer that computes its own. A server, a vision-language model and a user's own scorer have
`reward` and the metrics that they return."""

BOUNDED_METRICS = ("exact_match", "similarity")
"""Metrics that are shares and cannot exceed 1."""


def the_reward_exists(job: "Job") -> None:
    for name in (reward.name for reward in job.reward.loaded):
        if ":" in name and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", name):
            raise ValueError(f"reward.name is {name!r}; write your own reward as package.module:function")
        if ":" not in name and name not in REWARDS:
            raise ValueError(f"reward.name is {name!r}; use {', '.join(REWARDS)}, or your own package.module:function")


def keys_are_secrets(job: "Job") -> None:
    # The message does not repeat the value, because a user may have written the key itself.
    unlisted = next((name for name in job.reward.key_names if name not in job.secrets), None)
    if unlisted is not None:
        of_vlm = any(reward.vlm is not None and reward.vlm.key == unlisted for reward in job.reward.loaded)
        raise ValueError(
            f"reward.{'vlm' if of_vlm else 'http'}.key names a variable that secrets does not list, so nodes would "
            "not get it; add it, like secrets: [JUDGE_KEY]"
        )


def the_pool_leaves_gpus_for_workers(job: "Job") -> None:
    if job.rollout_workers < 1:
        has = job.resources.rollout.gpus
        raise ValueError(
            f"reward.pool.gpus is {job.reward.pool_gpus}, but resources.rollout.accelerators is "
            f"{job.resources.rollout.accelerators}, which leaves no GPU of a node to sample on; use "
            f"{f'at most {has - 1}, or ' if has > 1 else ''}nodes with more GPUs"
        )


def ray_gives_workers_every_gpu(job: "Job") -> None:
    if job.reward.pool_gpus and job.runtime.name == "ray":
        raise ValueError(
            f"reward.pool.gpus is {job.reward.pool_gpus}, but runtime.name is ray, which gives workers all GPUs "
            "of a node; use runtime: local, or leave pool.gpus out"
        )


def judges_leave_money_for_nodes(job: "Job") -> None:
    if job.nodes_max_total is not None and job.nodes_max_total <= 0:
        raise ValueError(
            f"reward.vlm.max_usd is ${job.reward.judge_micro_usd / 1e6:.2f} in all, which leaves nodes no money "
            f"in budget.max_total ${(job.budget.max_total or 0) / 1e6:.2f}; use less, or a larger max_total"
        )


def the_target_can_be_reached(job: "Job") -> None:
    if job.target is None:
        return
    metrics, metric, value = METRICS.get(job.reward.name), job.target.metric, job.target.value
    if metrics and metric not in metrics:
        raise ValueError(f"target.metric is {metric!r}; the reward {job.reward.name} has {', '.join(metrics)}")
    guarded = (*metrics, DRIFT) if metrics else ()
    if guarded and (strange := [guard.metric for guard in job.target.guards if guard.metric not in guarded]):
        raise ValueError(
            f"target.guards has {strange[0]!r}; with the reward {job.reward.name} use {', '.join(guarded)}"
        )
    if metric in BOUNDED_METRICS and not 0 < value <= 1:
        raise ValueError(f"target.value is {value}; {metric} is a share, so use more than 0 and at most 1")
    possible = job.iterations // job.evaluation.every + 1
    if job.target.evaluations > possible:
        raise ValueError(
            f"target.evaluations is {job.target.evaluations}, but {job.iterations} iterations with one "
            f"evaluation every {job.evaluation.every} make {possible}; use fewer, or more iterations"
        )


def a_point_can_be_priced(job: "Job") -> None:
    if job.stop.usd_per_point is None:
        return
    field = f"stop.usd_per_point is {dollars(job.stop.usd_per_point)} for +.01 of score"
    if job.target is None:
        raise ValueError(
            f"{field}, but the job has no target, whose metric is the score; add one, like target: {{metric: "
            "exact_match, value: 0.9}, or leave stop out"
        )
    possible, least = job.iterations // job.evaluation.every + 1, LEAST_EVALUATIONS + IN_A_ROW - 1
    if possible < least:
        raise ValueError(
            f"{field}, which takes at least {least} evaluations, but {job.iterations} iterations with one evaluation "
            f"every {job.evaluation.every} make {possible}; use a smaller evaluation.every, more iterations, or leave "
            "stop out"
        )


def resources_are_where_infra_is(job: "Job") -> None:
    for role in ("trainer", "rollout"):
        infra = getattr(job.resources, role).infra
        cloud = (infra or "").partition("/")[0]
        if job.clouds and cloud and cloud not in job.clouds:
            raise ValueError(
                f"resources.{role}.infra is {infra}, but infra is {job.infra}; add {cloud} to infra, or leave "
                f"resources.{role}.infra out"
            )


def this_machine_has_one_kind_of_node(job: "Job") -> None:
    for role in ("trainer", "rollout"):
        kinds = getattr(job.resources, role).kinds
        if not job.clouds and len(kinds) > 1:
            raise ValueError(
                f"resources.{role}.accelerators names {len(kinds)} nodes to choose from, {', '.join(kinds)}, but infra "
                f"is local, where nothing is bought; use one, like {kinds[0]}, or name clouds in infra"
            )


def trainer_nodes_can_be_had(job: "Job") -> None:
    """Allow several trainer nodes only with the runtime that starts them, and with as many ranks on each."""
    field, nodes = "resources.trainer.num_nodes", job.resources.trainer.num_nodes
    asked = job.runtime.trainer_ranks
    if nodes == 1:
        return
    if job.runtime.name != "local":
        raise ValueError(f"{field} is {nodes}, but runtime.name is {job.runtime.name}; use 1, or runtime.name: local")
    if asked == "auto" or asked % nodes:
        raise ValueError(
            f"{field} is {nodes}, but runtime.trainer_ranks is {asked}; set runtime.trainer_ranks: {nodes}, one on "
            f"each node, or another multiple of {nodes}"
        )


def the_store_is_where_infra_is(job: "Job") -> None:
    strange = sorted(set(job.store) - set(job.clouds)) if job.clouds else []
    if strange:
        raise ValueError(
            f"store is a bucket of {', '.join(strange)}, which infra does not name ({job.infra}); add it to "
            "infra, or leave it out"
        )


def resources_are_where_the_network_is(job: "Job") -> None:
    for role in ("trainer", "rollout"):
        infra: str | None = getattr(job.resources, role).infra
        cloud, region, *_ = [*(infra or "").split("/"), "", ""]
        if job.clouds and region not in ("", "*") and not job.network.reaches(cloud, region):
            named = ", ".join(job.network.regions(cloud))
            raise ValueError(
                f"resources.{role}.infra is {infra}, but network.{cloud} is in {named}; name the network in "
                f"{region} too, or leave resources.{role}.infra out"
            )


def spot_only_has_spot(job: "Job") -> None:
    if job.spot == "only" and not job.resources.rollout.use_spot:
        raise ValueError(
            "spot is only, but resources.rollout.use_spot is false; use spot: never for rollout nodes on demand, "
            "or use_spot: true"
        )


def why_never_on_spot(job: "Job") -> tuple[str, str] | None:
    """Return why no node could take the role of this job's lost trainer, and what to use. None: one could.

    A lost trainer's role goes to another node (launcher/decide/promotion.py), which not every run can do.
    """
    trainer = job.resources.trainer
    if job.spot == "never":
        return "spot is never", "spot: auto"
    if trainer.num_nodes > 1:
        return (
            f"resources.trainer.num_nodes is {trainer.num_nodes}, and the loss of any of several nodes stops the whole "
            "trainer",
            "one node",
        )
    if job.runtime.name == "ray":
        return "runtime.name is ray, whose cluster ends with the trainer's node", "runtime: {name: local}"
    return None


def a_trainer_on_spot_can_be_replaced(job: "Job") -> None:
    refusal = why_never_on_spot(job)
    if job.resources.trainer.use_spot is True and refusal is not None:
        why, use = refusal
        raise ValueError(f"resources.trainer.use_spot is true, but {why}; use false, or {use}")


CHECKS: tuple[Callable[["Job"], None], ...] = (
    the_reward_exists,
    keys_are_secrets,
    the_pool_leaves_gpus_for_workers,
    ray_gives_workers_every_gpu,
    judges_leave_money_for_nodes,
    the_target_can_be_reached,
    a_point_can_be_priced,
    resources_are_where_infra_is,
    this_machine_has_one_kind_of_node,
    trainer_nodes_can_be_had,
    the_store_is_where_infra_is,
    resources_are_where_the_network_is,
    spot_only_has_spot,
    a_trainer_on_spot_can_be_replaced,
)
"""All checks, in the order in which they are made. The first that fails is reported."""
