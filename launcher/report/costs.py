"""Costs of a run by role, node and extra, and the sources of its prices."""

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy.orm import Session

from engine.events import Phase
from launcher.ledger.accounting import NodeCost, RunCosts, judge_calls, side_costs_of_run
from launcher.ledger.billing import NOT_PRICED
from launcher.ledger.models import LOCAL, Node, Run, SideCost
from launcher.market.offers import dates_text
from launcher.money import HOUR_MS, dollars
from launcher.report.values import Costs, ExtraLine, NodeLine, PriceEffect, PriceSource

BASIS = {
    "assumed": "assumed: priced as named offers, nothing was bought",
    "metered": "metered: observed price x running time; not yet compared with a bill",
    "billed": "billed: the clouds' bill has every node; what follows is metered, and the bill says the differences",
    "simulated": "simulated: a replay on paper, nothing was bought and nothing was trained",
}


def price_dates(nodes: Sequence[Node]) -> str:
    """Return the dates of the prices of the nodes as text; empty without nodes.

    A price is old by its age when the newest node was bought: a report is read for years.
    """
    if not nodes:
        return ""
    return dates_text((node.price_observed_at for node in nodes), max(node.requested_ms for node in nodes))


def money_note(basis: str, nodes: Sequence[Node]) -> str:
    """Return the source of the dollars as text, with the dates of their prices."""
    return "; ".join(filter(None, (BASIS.get(basis, basis), price_dates(nodes))))


def costs_of(costs: RunCosts) -> Costs:
    splits = (costs.by_role, costs.by_market, costs.by_place, costs.by_node, costs.by_phase)
    return Costs(
        total=costs.total,
        by_role=costs.by_role,
        by_market=costs.by_market,
        by_place=costs.by_place,
        by_node=costs.by_node,
        by_phase={phase.value: costs.by_phase[phase.value] for phase in Phase if phase.value in costs.by_phase}
        | costs.by_phase,
        sums_equal=all(sum(split.values()) == costs.total for split in splits),
    )


def extra_lines(session: Session, run: Run, costs: RunCosts, now_ms: int) -> tuple[ExtraLine, ...]:
    """Return the bill lines besides working nodes: paid judges, and the extras of a real cloud."""
    judged = _judges(session, run)
    if run.infra == LOCAL:
        return judged
    idlers = [node for node in costs.nodes if node.charges and node.seen_ms is None]
    refused = sum(not node.charges for node in costs.nodes)
    setup = costs.by_phase.get(Phase.COLD_START, 0)
    inside = (
        ("failed_launches", _failed(len(idlers), refused), sum(node.micro_usd for node in idlers)),
        ("setup", "from billing to the first call of a worker", setup),
        ("idle", "of nodes at work", costs.by_phase.get(Phase.IDLE, 0)),
    )
    lines = [
        ExtraLine(kind=kind, amount=amount, micro_usd=paid, in_total=True, source=BASIS.get(run.money_basis, ""))
        for kind, amount, paid in inside
    ]
    by_kind: dict[str, list[SideCost]] = {}
    for cost in side_costs_of_run(session, run, now_ms):
        by_kind.setdefault(cost.kind, []).append(cost)
    for kind, rows in by_kind.items():
        known = [row.micro_usd for row in rows if row.micro_usd is not None]
        lines.append(
            ExtraLine(
                kind=kind,
                amount=rows[0].amount if len(rows) == 1 else f"{len(rows)} x {rows[0].amount}",
                micro_usd=sum(known) if len(known) == len(rows) else None,
                in_total=False,
                source=rows[0].source,
            )
        )
    unpriced = [(kind, what) for kind, what in NOT_PRICED if kind not in by_kind]
    why = "not priced: no cloud says the amount before its bill"
    lines += [ExtraLine(kind=kind, amount=what, micro_usd=None, in_total=False, source=why) for kind, what in unpriced]
    return (*judged, *lines)


def _judges(session: Session, run: Run) -> tuple[ExtraLine, ...]:
    """Return the line of the run's paid judges; none if no call was paid."""
    events = judge_calls(session, run)
    if not events:
        return ()
    calls = [call for event in events for call in event.calls]
    tokens = sum(asked + answered for asked, answered, _ in calls)
    unaccounted = sum(event.unaccounted for event in events)
    lost = f", and {dollars(unaccounted)} held by workers that died" if unaccounted else ""
    return (
        ExtraLine(
            kind="judges",
            amount=f"{len(calls)} calls, {tokens} tokens{lost}",
            micro_usd=sum(event.micro_usd for event in events),
            in_total=False,
            source="tokens as the judge counted them x the job's prices; a call without an answer costs the most",
        ),
    )


def _failed(came: int, refused: int) -> str:
    return f"{came} came up and never worked, {refused} never came up and were not billed"


def node_line_of(node: NodeCost) -> NodeLine:
    return NodeLine(
        node=node.node,
        slot=node.slot,
        generation=node.generation,
        role=node.role,
        market=node.market,
        zone=node.zone,
        instance_type=node.instance_type,
        micro_usd_per_hour=node.micro_usd_per_hour,
        charges=node.charges,
        seen_ms=node.seen_ms,
        running=not all(charge.closed for charge in node.charges),
        hours=node.ms / HOUR_MS,
        micro_usd=node.micro_usd,
        phase_micro_usd=node.phase_micro_usd,
        taken=node.taken,
    )


def price_effect_of(costs: RunCosts) -> PriceEffect:
    on_demand = sum(node.on_demand_micro_usd for node in costs.nodes)
    return PriceEffect(
        paid_micro_usd=costs.total, on_demand_micro_usd=on_demand, difference_micro_usd=on_demand - costs.total
    )


def price_sources_of(nodes: Sequence[Node]) -> tuple[PriceSource, ...]:
    by_source: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        by_source.setdefault((node.price_source, node.price_observed_at), []).append(node)
    return tuple(
        PriceSource(
            source=source,
            observed_at=observed_at,
            age_days=_age_days(observed_at, max(node.requested_ms for node in bought)),
            nodes=len(bought),
        )
        for (source, observed_at), bought in sorted(by_source.items())
    )


def _age_days(observed_at: str, at_ms: int) -> float | None:
    """Return the days from an ISO date or time to `at_ms`; None if `observed_at` is not a date."""
    try:
        seen = datetime.fromisoformat(observed_at)
    except ValueError:
        return None
    seen = seen if seen.tzinfo else seen.replace(tzinfo=UTC)
    return round((at_ms / 1000 - seen.timestamp()) / 86_400, 2)
