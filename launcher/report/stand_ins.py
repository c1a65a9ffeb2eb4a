"""What a run did for lack of spot: nodes on demand or on dear spot in its place, and moves to another region."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from launcher.ledger.accounting import RunCosts
from launcher.ledger.models import MOVE, STAND_IN, Node, NodeEvent, Run
from launcher.money import HOUR_MS
from launcher.report.values import MoveLine, StandInLine


def stand_in_lines(session: Session, run: Run, costs: RunCosts) -> tuple[StandInLine, ...]:
    """Return the stand-ins of a run that were requested, oldest first."""
    rows = session.execute(
        select(NodeEvent, Node)
        .join(Node, Node.id == NodeEvent.node_id)
        .where(Node.run_id == run.id, NodeEvent.kind == STAND_IN)
        .order_by(NodeEvent.at_ms, NodeEvent.id)
    ).all()
    paid = {cost.node: cost for cost in costs.nodes}
    return tuple(
        StandInLine(
            node=node.name,
            zone=paid[node.name].zone,
            market=node.market,
            hours=(event.at_ms - run.created_ms) / HOUR_MS,
            why=event.evidence,
            paid_hours=paid[node.name].ms / HOUR_MS,
            micro_usd=paid[node.name].micro_usd,
        )
        for event, node in rows
    )


def move_lines(session: Session, run: Run) -> tuple[MoveLine, ...]:
    """Return the moves of a run whose trainer was ready in the other region, oldest first."""
    rows = session.execute(
        select(NodeEvent, Node)
        .join(Node, Node.id == NodeEvent.node_id)
        .where(Node.run_id == run.id, NodeEvent.kind.in_((MOVE, "ready")))
        .order_by(NodeEvent.at_ms, NodeEvent.id)
    ).all()
    asked = {node.name: event for event, node in rows if event.kind == MOVE}
    ready_ms = {node.name: event.at_ms for event, node in reversed(rows) if event.kind == "ready"}
    return tuple(
        MoveLine(
            node=name,
            hours=(event.at_ms - run.created_ms) / HOUR_MS,
            minutes=(ready_ms[name] - event.at_ms) / 60_000,
            why=event.evidence,
        )
        for name, event in asked.items()
        if name in ready_ms
    )
