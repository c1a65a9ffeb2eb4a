"""Stand-ins of a run: nodes that replaced missing spot, on demand or on dear spot, and why they were bought."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from launcher.ledger.accounting import RunCosts
from launcher.ledger.models import STAND_IN, Node, NodeEvent, Run
from launcher.money import HOUR_MS
from launcher.report.values import StandInLine


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
