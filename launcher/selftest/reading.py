"""Read the facts of a selftest: from the ledger, and what is left from the cloud itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.events import CheckpointSaved, EngineStarted, IterationDone, NodeMissed, NodeServed
from launcher.clouds.base import CloudApi, Instance, InstanceState
from launcher.decide.facts import NodeRecord
from launcher.ledger.accounting import charges_of_run, side_costs_of_run
from launcher.ledger.billing import minimum_billed_ms
from launcher.ledger.models import BillingInterval, ProgressRow, Run
from launcher.ledger.node_history import node_records
from launcher.ledger.store import current_status, find_run, nodes_of, progress_of
from launcher.runs.runs import still_running
from launcher.runs.views import last_moment_ms, run_view
from launcher.selftest.facts import Batch, Facts, NodeFacts, Paid, Preempted, Saved, Start


@dataclass(kw_only=True)
class Seen:
    """What the selftest itself did and saw, beside the ledger."""

    order: Preempted | None = None
    stored: str | None = None
    stopped_ms: int | None = None
    resumed_ms: int | None = None
    in_cloud: tuple[str, ...] | None = field(default=None)


def read_facts(sessions: sessionmaker[Session], name: str, observed: Seen) -> Facts:
    """Return the facts of now. Asks no cloud."""
    running, view = still_running(sessions, name), run_view(sessions, name)
    with sessions() as session:
        run = find_run(session, name)
        status = current_status(session, run)
        algorithm, now_ms = run.job["algorithm"], last_moment_ms(session, run)
        done = progress_of(session, run, IterationDone.KIND)
        return Facts(
            cloud=run.infra,
            stage=status.status if status is not None else "",
            reason=status.reason if status is not None else "",
            max_total_micro_usd=run.max_total_micro_usd or 0,
            batch_size=int(algorithm["prompts_per_batch"]) * int(algorithm["images_per_prompt"]),
            spent_micro_usd=view.spent_micro_usd,
            beside_micro_usd=sum(cost.micro_usd or 0 for cost in side_costs_of_run(session, run, now_ms)),
            nodes=_nodes(session, run, observed),
            batches=[
                Batch(
                    iteration=row.event["iteration"],
                    lineage=row.lineage,
                    at_ms=row.at_ms,
                    made_by=row.event["made_by"],
                )
                for row in done
            ],
            starts=[
                Start(iteration=row.event["iteration"], lineage=row.lineage, at_ms=row.at_ms)
                for row in progress_of(session, run, EngineStarted.KIND)
            ],
            saved=[
                Saved(iteration=row.event["iteration"], name=PurePosixPath(row.event["path"]).name)
                for row in progress_of(session, run, CheckpointSaved.KIND)
            ],
            paid=_paid(session, run, now_ms),
            order=observed.order,
            stored=observed.stored,
            stopped_ms=observed.stopped_ms,
            resumed_ms=observed.resumed_ms,
            still_running=running,
            in_cloud=observed.in_cloud,
        )


def left_in_cloud(api: CloudApi, run: str, regions: list[str]) -> tuple[str, ...]:
    """Return what the cloud itself lists of a run, in the regions of its nodes and for resources without a region."""
    texts: list[str] = []
    for region in sorted({*regions, api.home}):
        texts += [
            f"machine {instance.name}"
            for instance in api.instances(region, run=run)
            if instance.state is not InstanceState.GONE
        ]
        texts += [
            f"{resource.kind} in {resource.region or 'all regions'}" for resource in api.resources(region, run=run)
        ]
    return tuple(texts)


def instance_of_node(api: CloudApi, region: str, run: str, node: str) -> Instance | None:
    """Return the running VM of a node, by its label."""
    alive = (instance for instance in api.instances(region, run=run) if instance.state is InstanceState.RUNNING)
    return next((instance for instance in alive if instance.name == node), None)


def regions_of(sessions: sessionmaker[Session], name: str) -> list[str]:
    with sessions() as session:
        return sorted({node.region for node in nodes_of(session, find_run(session, name))})


def _nodes(session: Session, run: Run, observed: Seen) -> list[NodeFacts]:
    served = {row.event["node"]: row.at_ms for row in reversed(progress_of(session, run, NodeServed.KIND))}
    missed = progress_of(session, run, NodeMissed.KIND)
    # A worker that crashed before the order lost its steps without the preemption.
    since_ms = {observed.order.node: observed.order.at_ms} if observed.order is not None else {}
    return [
        NodeFacts(
            name=record.name,
            slot=record.slot,
            generation=record.generation,
            role=record.role,
            market=record.market.value,
            zone=record.zone,
            instance_type=record.instance_type,
            micro_usd_per_hour=record.micro_usd_per_hour,
            requested_ms=record.requested_ms,
            happened=record.happened,
            ended_ms=record.ended_ms,
            evidence=record.evidence,
            reclaimed=record.reclaimed,
            served_ms=served.get(record.name),
            lost_steps=_lost_steps(missed, record, since_ms.get(record.name, 0)),
        )
        for record in node_records(session, run)
    ]


def _lost_steps(missed: Sequence[ProgressRow], node: NodeRecord, since_ms: int) -> int | None:
    """Return the denoising steps that a node lost from `since_ms` on."""
    lost = [int(row.event["lost_steps"]) for row in missed if row.event["node"] == node.name and row.at_ms >= since_ms]
    return sum(lost) if lost else None


def _paid(session: Session, run: Run, now_ms: int) -> list[Paid]:
    """Return the billed stretches. The last stretch of a node includes what is missing of the minimum billed time."""
    names = {node.id: node.name for node in nodes_of(session, run)}
    free = {
        (row.node_id, row.start_ms)
        for row in session.scalars(select(BillingInterval).where(BillingInterval.node_id.in_(names)))
        if "not billed" in row.basis
    }
    stretches = []
    for node_id, charges in charges_of_run(session, run, now_ms).items():
        began_ms = min((charge.start_ms for charge in charges), default=0)
        for number, charge in enumerate(charges):
            is_last = number == len(charges) - 1
            minimum_ms = max(0, minimum_billed_ms(run) - (charge.start_ms - began_ms)) if is_last else 0
            stretches.append(
                Paid(
                    node=names[node_id],
                    ms=charge.ms,
                    micro_usd_per_hour=charge.micro_usd_per_hour,
                    micro_usd=charge.micro_usd,
                    minimum_ms=minimum_ms,
                    is_free=(node_id, charge.start_ms) in free,
                    is_closed=charge.closed,
                )
            )
    return stretches
