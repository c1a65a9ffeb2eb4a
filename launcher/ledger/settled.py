"""What the runs cost that are over and whose nodes have all ended, in a few queries for all of them.

A ledger may hold thousands of such runs, and a limit on all runs counts them.
"""

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import Any

from sqlalchemy import Select, func, select, true
from sqlalchemy.orm import Session

from engine.events import Judged
from launcher.decide.facts import ENDS, OVER
from launcher.ledger.models import (
    LOCAL,
    BillingInterval,
    Node,
    NodeEvent,
    ProgressRow,
    Run,
    RunStatus,
    SideCost,
    SpentMark,
)
from launcher.market.side_prices import ADDRESS

AT_ONCE = 5_000
"""Runs in one query. SQLite takes 32,766 values."""


def settled_micro_usd(session: Session) -> dict[int, int]:
    """Return the cost of each run whose whole cost is on record, in micro-dollars, by the run's id.

    Such a run is over, each of its nodes has an end after its last start, and each paid time has its bill and its side
    costs. A run of which a ledger from a backup may have forgotten money is left out. The sum is what
    `spent_micro_usd` and `judge_micro_usd` say; on the local infra, where nodes are free, the judges alone.
    """
    newest = select(func.max(RunStatus.id)).group_by(RunStatus.run_id)
    is_over = select(RunStatus.run_id).where(RunStatus.id.in_(newest), RunStatus.status.in_(list(OVER)))
    over = select(Run.id, Run.infra).where(Run.id.in_(is_over), Run.id.not_in(select(SpentMark.run_id)))
    infras = dict(session.execute(over).all())
    uncertain = unbilled_runs(session) | _runs_without_side_costs(session)
    settled = {run_id: infra for run_id, infra in infras.items() if run_id not in uncertain}
    of_nodes = _sums(session, select(Node.run_id, func.sum(BillingInterval.micro_usd)).join(BillingInterval))
    beside = _sums(session, select(SideCost.run_id, func.sum(SideCost.micro_usd)))
    judges = judges_micro_usd(session, list(settled))
    return {
        run_id: judges[run_id] + (0 if infra == LOCAL else of_nodes[run_id] + beside[run_id])
        for run_id, infra in settled.items()
    }


def unbilled_runs(session: Session, run_ids: Collection[int] | None = None) -> set[int]:
    """Return the runs with a node that has no end yet, or whose paid time has no bill yet. `run_ids`: look at these."""
    of_node = NodeEvent.node_id == Node.id
    last_kind = select(NodeEvent.kind).where(of_node).order_by(NodeEvent.id.desc()).limit(1).scalar_subquery()
    last_up = select(func.max(NodeEvent.at_ms)).where(of_node, NodeEvent.kind == "up").scalar_subquery()
    bills = select(func.max(BillingInterval.end_ms)).where(BillingInterval.node_id == Node.id)
    is_unbilled = func.coalesce(last_up, -1) > func.coalesce(bills.scalar_subquery(), -1)
    query = select(Node.run_id).where(func.coalesce(last_kind, "").not_in(ENDS) | is_unbilled)
    return set(session.scalars(query if run_ids is None else query.where(Node.run_id.in_(run_ids))))


def _runs_without_side_costs(session: Session) -> set[int]:
    """Return the runs on a cloud with a billed time whose disk and address are not on record."""
    paid_from = select(BillingInterval.node_id, func.max(BillingInterval.start_ms))
    beside_to = _by_node(session, select(SideCost.node_id, func.max(SideCost.end_ms)).where(SideCost.kind == ADDRESS))
    of_clouds = dict(session.execute(select(Node.id, Node.run_id).join(Run).where(Run.infra != LOCAL)).all())
    billed = _by_node(session, paid_from).items()
    return {of_clouds[node] for node, from_ms in billed if node in of_clouds and from_ms > beside_to[node]}


def _by_node(session: Session, query: Select[*tuple[Any, ...]]) -> defaultdict[int, int]:
    return defaultdict(lambda: -1, session.execute(query.group_by(query.selected_columns[0])).all())


def _sums(session: Session, query: Select[*tuple[Any, ...]]) -> Counter[int]:
    rows = session.execute(query.group_by(query.selected_columns[0]))
    return Counter({run_id: int(micro_usd or 0) for run_id, micro_usd in rows})


def judges_micro_usd(session: Session, run_ids: Collection[int]) -> Counter[int]:
    """Return the cost of paid judges by run, in micro-dollars. SQLite sums it: a run may have many thousand calls."""
    ids, sums = list(run_ids), Counter[int]()
    call = func.json_each(ProgressRow.event, "$.calls").table_valued("value")
    of_calls = select(ProgressRow.run_id, func.sum(func.json_extract(call.c.value, "$[2]"))).join(call, true())
    held = select(ProgressRow.run_id, func.sum(func.json_extract(ProgressRow.event, "$.unaccounted")))
    for start in range(0, len(ids), AT_ONCE):
        is_ours = (ProgressRow.kind == Judged.KIND) & ProgressRow.run_id.in_(ids[start : start + AT_ONCE])
        sums += _sums(session, of_calls.where(is_ours)) + _sums(session, held.where(is_ours))
    return sums
