"""The NodeSpec of a node: everything that a node gets at its start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from engine.events import Market
from engine.node_spec import ClockConfig, NodeSpec, role_token
from launcher.decide.facts import NodeRecord
from launcher.job.schema import Job
from launcher.ledger.models import Node, Run
from launcher.placement.plan import SlotRole, number_of_trainer_slot
from launcher.provision.local.provisioner import node_folder
from launcher.storage.stores import run_store

_ROLES: Mapping[str, SlotRole] = {role: role for role in get_args(SlotRole)}
"""Roles by their name in the ledger."""


def node_spec(
    run: Run,
    job: Job,
    node: Node,
    *,
    now: NodeRecord | None = None,
    is_cloud: bool,
    money_deadline_ms: int | None,
    money_longest_ms: int | None,
) -> NodeSpec:
    """Return the NodeSpec of a node. `now`: the same node with the role that it has now; None: as it was bought.

    On a real cloud the provisioner adds the folder, the addresses and the digest.
    """
    folder = Path(run.folder)
    has = now or node
    role = _ROLES[has.role]
    store = run_store(job.store, node.cloud, run.name) if is_cloud else (folder / "store").as_uri()
    return NodeSpec(
        run=run.name,
        node=node.name,
        role=role,
        trainer_nodes=1 if role == "rollout" else job.resources.trainer.num_nodes,
        trainer_node=number_of_trainer_slot(has.slot) if role == "ranks" else 0,
        ranks_have_room=role != "rollout" and bool(run.plan.get("ranks_have_room")),
        generation=has.generation,
        market=Market(node.market),
        workers=max(1, node.gpus - (job.reward.pool_gpus if role == "rollout" else 0)),
        folder=str(node_folder(folder, node.name)),
        store=store,
        coordinator_port=run.coordinator_port,
        token=run.token if role == "trainer" else role_token(run.token, role),
        clock=_clock_of(run, is_cloud=is_cloud),
        life_hours=run.plan.get("trainer_life_hours") if node.market == Market.SPOT and role == "trainer" else None,
        engine=job.engine() if is_cloud else job.engine().model_copy(update={"model": run.with_whole_path(job.model)}),
        judges_micro_usd=run.max_judges_micro_usd,
        workdir=run.workdir,
        cloud=_cloud(node.cloud) if is_cloud else "local",
        money_deadline_ms=money_deadline_ms,
        money_longest_ms=money_longest_ms,
    )


def _clock_of(run: Run, *, is_cloud: bool) -> ClockConfig:
    clock = None if is_cloud else run.work_clock
    file = "" if clock is None else str(clock.path)
    return ClockConfig(origin_ms=run.clock_origin_ms, factor=1.0 if is_cloud else run.clock_factor, file=file)


def _cloud(name: str) -> Literal["aws", "gcp"]:
    return "aws" if name == "aws" else "gcp"
