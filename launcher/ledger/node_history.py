"""The nodes of a run in the ledger: read their records, write their events, prices and ends."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.events import Market
from launcher.decide.facts import ENDS, INSTANCE_ENDS, KEPT, PROMOTED, NodeRecord, promotion_of
from launcher.decide.node_events import Note
from launcher.decide.price_events import Paid
from launcher.ledger.accounting import charges_of_run, prices_of_run, unpaid_lives
from launcher.ledger.billing import NOT_PRICED, bill, minimum_billed_ms, side_costs
from launcher.ledger.models import LOCAL, BillingInterval, Node, NodeEvent, NodePrice, Preemption, Run, SideCost
from launcher.ledger.store import NODE_IDS_OF_RUN, nodes_of
from launcher.placement.options import Option
from launcher.placement.placement import Placement


def metered_micro_usd(session: Session, run: Run, now_ms: int) -> int:
    """Return the cost of the run's nodes until now, in micro-dollars."""
    return sum(charge.micro_usd for charges in charges_of_run(session, run, now_ms).values() for charge in charges)


def metered_at(session: Session, run: Run, at_ms: Mapping[str, int], now_ms: int) -> dict[str, int]:
    """Return the cost of the run's nodes up to each of these times, in micro-dollars."""
    charges = [charge for of_node in charges_of_run(session, run, now_ms).values() for charge in of_node]
    return {name: sum(charge.until(moment) for charge in charges) for name, moment in at_ms.items()}


_EVENTS = (
    select(NodeEvent.node_id, NodeEvent.kind, NodeEvent.at_ms, NodeEvent.evidence)
    .where(NodeEvent.node_id.in_(NODE_IDS_OF_RUN))
    .order_by(NodeEvent.id)
)
_PREEMPTED = select(Preemption.node_id).where(Preemption.node_id.in_(NODE_IDS_OF_RUN))


def node_records(session: Session, run: Run) -> list[NodeRecord]:
    happened: defaultdict[int, dict[str, int]] = defaultdict(dict)
    evidence: dict[int, str] = {}
    roles: dict[int, tuple[str, int]] = {}
    for event in session.execute(_EVENTS, {"run_id": run.id}):
        known = happened[event.node_id]
        if event.kind == "up":  # a VM that lives on after the end of its node is billed again
            for kind in known.keys() & INSTANCE_ENDS:
                del known[kind]
            evidence.pop(event.node_id, None)
        if event.kind == PROMOTED:
            roles[event.node_id] = promotion_of(event.evidence)
            known.pop(PROMOTED, None)
            known.pop("ready", None)
        known.setdefault(event.kind, event.at_ms)
        if event.kind == KEPT or (event.kind in ENDS and KEPT not in known):  # the failure, not what ended the VM later
            evidence[event.node_id] = event.evidence
    taken = set(session.scalars(_PREEMPTED, {"run_id": run.id}))
    prices, is_cloud = prices_of_run(session, run), run.infra != LOCAL
    now = {node_id: changes[-1] for node_id, changes in prices.items()}
    return [
        NodeRecord(
            name=node.name,
            slot=roles[node.id][0] if node.id in roles else node.slot,
            generation=roles[node.id][1] if node.id in roles else node.generation,
            role="trainer" if node.id in roles else node.role,
            market=Market(node.market),
            micro_usd_per_hour=now.get(node.id, node).micro_usd_per_hour,
            requested_ms=node.requested_ms,
            reserved_micro_usd=node.reserved_micro_usd,
            happened=happened[node.id],
            evidence=evidence.get(node.id, ""),
            reclaimed=node.id in taken,
            wanted=option_of(node) if is_cloud else None,
            zone=now.get(node.id, node).zone,
            instance_type=now.get(node.id, node).instance_type,
        )
        for node in nodes_of(session, run)
    ]


def option_of(node: Node) -> Option:
    """Return the requested offer of a node, from the ledger."""
    return Option(
        placement=Placement(
            cloud=node.cloud,
            region=node.region,
            zone=node.zone,
            instance_type=node.instance_type,
            gpus=node.gpus,
            accelerator=node.accelerator,
            market=Market(node.market),
            micro_usd_per_hour=node.micro_usd_per_hour,
            price_source=node.price_source,
            price_observed_at=node.price_observed_at,
            disk_gib=node.disk_gib,
        ),
        on_demand_micro_usd_per_hour=node.on_demand_micro_usd_per_hour,
    )


def node_of(
    run: Run,
    option: Option,
    *,
    name: str,
    slot: str,
    generation: int,
    role: str,
    requested_ms: int,
    reserved_micro_usd: int,
) -> Node:
    """Return the row of a node that is about to be requested: the opposite of `option_of`."""
    placement = option.placement
    return Node(
        run_id=run.id,
        name=name,
        slot=slot,
        generation=generation,
        role=role,
        market=placement.market,
        cloud=placement.cloud,
        region=placement.region,
        zone=placement.zone,
        instance_type=placement.instance_type,
        accelerator=placement.accelerator,
        gpus=placement.gpus,
        micro_usd_per_hour=placement.micro_usd_per_hour,
        on_demand_micro_usd_per_hour=option.on_demand_micro_usd_per_hour,
        price_source=placement.price_source,
        price_observed_at=placement.price_observed_at,
        requested_ms=requested_ms,
        reserved_micro_usd=reserved_micro_usd,
        disk_gib=placement.disk_gib,
    )


def last_trainer_cloud(records: Sequence[NodeRecord], trainer: NodeRecord) -> str | None:
    """Return the cloud of the last trainer before this one, whose bucket has the newest checkpoint. None: no such node.

    A bought trainer may have trained once it came up, a promoted one once its new processes had called in.
    """
    earlier = [
        other
        for other in records
        if other.role == "trainer" and other.generation < trainer.generation
        if ("ready" if PROMOTED in other.happened else "up") in other.happened
    ]
    last = max(earlier, key=lambda other: other.generation, default=None)
    return last.site[0] if last is not None and last.site is not None else None


def write_note(session: Session, run: Run, node: Node, note: Note) -> None:
    """Record an event of a node.

    If the event ends the node, the same transaction adds the bill of a node that came up, and the preemption of a node
    that the cloud preempted.
    """
    session.add(NodeEvent(node_id=node.id, at_ms=note.at_ms, kind=note.kind, evidence=_evidence(note)))
    if note.kind not in ENDS:
        return
    session.flush()
    events = session.scalars(select(NodeEvent).where(NodeEvent.node_id == node.id).order_by(NodeEvent.id)).all()
    intervals = session.scalars(select(BillingInterval).where(BillingInterval.node_id == node.id)).all()
    prices = session.scalars(select(NodePrice).where(NodePrice.node_id == node.id)).all()
    seen = {event.kind: event.at_ms for event in reversed(events)}
    reclaimed = note.fact is not None and note.fact.reclaimed
    taken = note.evidence if reclaimed and "releasing" not in seen else None
    lives = unpaid_lives(intervals, events, max(event.at_ms for event in events))
    for life in lives:
        session.add_all(bill(node, life.start_ms, life.end_ms, prices, minimum_billed_ms(run), run.money_basis, taken))
    if lives:
        disks_ms = note.fact.disks_ms if note.fact is not None else None
        session.add_all(side_costs(run, node, lives[0].start_ms, lives[-1].end_ms, disks_ms))
    was_preempted = session.scalar(select(Preemption.id).where(Preemption.node_id == node.id)) is not None
    if note.fact is not None and reclaimed and not was_preempted:
        session.add(
            Preemption(
                node_id=node.id,
                at_ms=note.at_ms,
                noticed_ms=seen.get("notice"),
                signal=note.fact.signal,
                evidence=note.evidence,
            )
        )


def _evidence(note: Note) -> str:
    """Return the cloud's text, with the zones that refused."""
    tried = note.fact.tried if note.fact is not None else ()
    return "; ".join(filter(None, (note.evidence, f"tried {', '.join(tried)}" if tried else "")))


def node_price(node: Node, change: Paid) -> NodePrice:
    return NodePrice(
        node_id=node.id,
        at_ms=change.at_ms,
        zone=change.zone,
        instance_type=change.instance_type,
        micro_usd_per_hour=change.price.micro_usd_per_hour,
        price_source=change.price.source,
        price_observed_at=change.price.observed_at,
    )


def unpriced_costs(run: Run, now_ms: int) -> list[SideCost]:
    """Return the costs that are billed but have no price in the ledger."""
    return [
        SideCost(
            run_id=run.id,
            kind=kind,
            amount=what,
            start_ms=run.created_ms,
            end_ms=now_ms,
            micro_usd=None,
            source="not priced: no cloud says the amount before its bill",
        )
        for kind, what in NOT_PRICED
    ]
