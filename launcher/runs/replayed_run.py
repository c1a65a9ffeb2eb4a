"""Write a replay to a ledger as if it were a run, so that `spotrl report` and `spotrl compare` read it.

Every node with its events, bills, prices and preemptions; no iterations, because nothing was trained. The money basis
is `simulated`. Use a ledger of its own: in the user's ledger, the lives of a replay would count as evidence on hazards,
and its dollars against the limits over all runs.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, replace

from sqlalchemy.orm import Session, sessionmaker

from engine.events import Market, NodeSeen
from launcher.decide.facts import ENDS, PROMOTED, NodeRecord, Stage, promotion_text
from launcher.job.checked import CheckedJob
from launcher.ledger.billing import bill, minimum_billed_ms, side_costs
from launcher.ledger.models import STAND_IN, Node, NodeEvent, NodePrice, Preemption, ProgressRow, Run
from launcher.ledger.node_history import node_of
from launcher.ledger.store import append_status, writing
from launcher.placement.plan import Plan
from launcher.replay.replay import Replayed
from launcher.replay.trace import Trace
from launcher.runs.runs import run_row
from launcher.settings import runs_folder

BASIS = "simulated"

REPLAY = "replay"
"""Name of the run within a replay, with which the names of its nodes begin (launcher/replay/replay.py)."""


def write_replayed(
    sessions: sessionmaker[Session],
    checked: CheckedJob,
    plan: Plan,
    name: str,
    result: Replayed,
    trace: Trace,
    start_ms: int,
) -> None:
    """Write the nodes of a replay that began at `start_ms` of the trace. Raises NameTaken for a name that is used."""
    with writing(sessions) as session:
        created_ms = time.time_ns() // 1_000_000
        run = run_row(session, checked, replace(plan, money_basis=BASIS), name, created_ms, runs_folder() / name)
        run.clock_factor = 1.0
        append_status(session, run, Stage.PLANNED, "", created_ms)
        append_status(session, run, Stage.RUNNING, f"replayed on {trace.name}", created_ms)
        for record in result.nodes:
            _write_node(session, run, record, result, trace, start_ms)
        stage = Stage.FINISHED if result.reached else Stage.STOPPED
        reason = "the work of the plan is done" if result.reached else "the work of the plan is not done"
        append_status(session, run, stage, reason, created_ms + result.ms)


def _write_node(session: Session, run: Run, record: NodeRecord, result: Replayed, trace: Trace, start_ms: int) -> None:
    assert record.wanted is not None, "a replay buys offers only"
    since_ms = run.created_ms
    is_promoted = PROMOTED in record.happened
    bought_as = record.name.removeprefix(f"{REPLAY}-")  # a promotion changes the slot, and not the name
    slot, _, generation = bought_as.rpartition("-g")
    node = node_of(
        run,
        record.wanted,
        name=f"{run.name}-{bought_as}",
        slot=slot,
        generation=int(generation),
        role="rollout" if is_promoted else record.role,
        requested_ms=since_ms + record.requested_ms,
        reserved_micro_usd=record.reserved_micro_usd,
    )
    session.add(node)
    session.flush()
    if why := result.stand_ins.get(record.name):
        session.add(NodeEvent(node_id=node.id, at_ms=since_ms + record.requested_ms, kind=STAND_IN, evidence=why))
    happened = dict(record.happened) if record.ended_ms is not None else {**record.happened, "released": result.ms}
    for kind, at_ms in sorted(happened.items(), key=lambda event: event[1]):
        evidence = f"preempted on {trace.name}" if record.reclaimed and kind in ENDS else ""
        if kind == PROMOTED:
            evidence = promotion_text(record.slot, record.generation, "replayed")
        session.add(NodeEvent(node_id=node.id, at_ms=since_ms + at_ms, kind=kind, evidence=evidence))
    if "up" not in happened:
        return
    up_ms, end_ms = happened["up"], max(at_ms for kind, at_ms in happened.items() if kind in ENDS)
    prices = list(_prices(node, record, trace, start_ms, since_ms, up_ms, end_ms))
    session.add_all(prices)
    session.flush()
    start, end = since_ms + up_ms, since_ms + end_ms
    session.add_all(bill(node, start, end, prices, minimum_billed_ms(run), BASIS, None))
    session.add_all(side_costs(run, node, start, end))
    if "ready" in happened:
        event = NodeSeen(node=node.name, worker=f"{node.name}-0")
        session.add(_progress(run, node, since_ms + happened["ready"], event))
    if record.reclaimed:
        noticed_ms = since_ms + happened["notice"] if "notice" in happened else None
        session.add(Preemption(node_id=node.id, at_ms=end, noticed_ms=noticed_ms, signal=None, evidence="replayed"))


def _progress(run: Run, node: Node, at_ms: int, event: NodeSeen) -> ProgressRow:
    return ProgressRow(
        run_id=run.id, source=node.name, lineage=0, seq=1, at_ms=at_ms, kind=event.KIND, event=asdict(event)
    )


def _prices(
    node: Node, record: NodeRecord, trace: Trace, start_ms: int, since_ms: int, up_ms: int, end_ms: int
) -> Iterator[NodePrice]:
    """Yield the recorded prices of a spot node, from the one at its start on. None: the trace has no prices."""
    pool = trace.pool_of(node.cloud, node.region, node.zone) if record.market is Market.SPOT else None
    if pool is None:
        return
    first = max(0, bisect_right(pool.t_ms, start_ms + up_ms) - 1)
    last: int | None = None
    for at_ms, price in zip(pool.t_ms[first:], pool.micro_usd_per_hour[first:], strict=True):
        run_ms = max(up_ms, at_ms - start_ms)
        if run_ms >= end_ms:
            return
        if price is not None and price != last:
            last = price
            yield NodePrice(
                node_id=node.id,
                at_ms=since_ms + run_ms,
                zone=node.zone,
                instance_type=node.instance_type,
                micro_usd_per_hour=price,
                price_source=trace.name,
                price_observed_at="",
            )
