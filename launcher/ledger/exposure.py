"""Collect the history of each pool from the ledger: lives of spot nodes, ends of the lives, and results of launches.

A life begins with `up`. A life ends as a preemption only if a preemption is recorded. A node that the launcher
released, or that still runs, was watched without a preemption. A run without a controller (the controller died) is
watched up to its newest fact and no further. Nodes of the local infra are left out: a script preempts them, not a
market.
"""

from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from engine.events import Market
from launcher.decide.facts import INSTANCE_ENDS
from launcher.ledger.models import Node, NodeEvent, Preemption, ProgressRow, Run
from launcher.market.evidence import Life
from launcher.market.hazard import PoolHistory, bursts
from launcher.market.pools import Pool

LOCAL = "local"


def pool_histories(session: Session, now_ms: int) -> dict[Pool, PoolHistory]:
    """Return the history of every pool in which a node was requested, without the local infra.

    The life of a node that has not ended counts up to `now_ms` (UTC) at most.
    """
    bought = select(Node.id).join(Run).where(Run.infra != LOCAL)
    nodes = session.scalars(select(Node).where(Node.id.in_(bought)).order_by(Node.id)).all()
    happened: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for event in session.scalars(select(NodeEvent).where(NodeEvent.node_id.in_(bought)).order_by(NodeEvent.id)):
        happened[event.node_id].setdefault(event.kind, event.at_ms)
    taken = session.scalars(select(Preemption).where(Preemption.node_id.in_(bought)))
    reclaimed = {preemption.node_id: preemption.at_ms for preemption in taken}
    watched = {run: min(now_ms, at) for run, at in _newest_facts(session).items()}
    by_pool: defaultdict[Pool, list[Node]] = defaultdict(list)
    for node in nodes:
        by_pool[pool_of(node)].append(node)
    return {pool: _history(pool, members, happened, reclaimed, watched) for pool, members in by_pool.items()}


def pool_of(node: Node) -> Pool:
    """Return the pool of a node.

    An on-demand pool has no zone, because on-demand capacity is requested by region.
    """
    zone = node.zone if node.market == Market.SPOT else ""
    return Pool(cloud=node.cloud, region=node.region, zone=zone, instance_type=node.instance_type)


def _history(
    pool: Pool,
    nodes: list[Node],
    happened: Mapping[int, Mapping[str, int]],
    reclaimed: Mapping[int, int],
    watched_to_ms: Mapping[int, int],
) -> PoolHistory:
    lives, launches, stock_outs, cold_starts = [], [], [], []
    for node in nodes:
        events = happened.get(node.id, {})
        if "no_capacity" in events:
            stock_outs.append(events["no_capacity"])
        up_ms = events.get("up")
        if up_ms is None:
            continue
        launches.append(up_ms)
        if "ready" in events:
            cold_starts.append(max(0, events["ready"] - up_ms))
        if node.market != Market.SPOT:
            continue
        ends = [events[kind] for kind in INSTANCE_ENDS if kind in events]
        end_ms = reclaimed.get(node.id, min(ends, default=watched_to_ms.get(node.run_id, up_ms)))
        lives.append(Life(ms=max(0, end_ms - up_ms), reclaimed=node.id in reclaimed, ended_ms=max(up_ms, end_ms)))
    return PoolHistory(
        pool=pool,
        lives=tuple(lives),
        launches=bursts((at, at) for at in launches),
        last_launch_ms=max(launches, default=None),
        stock_outs_ms=tuple(sorted(stock_outs)),
        cold_starts_ms=tuple(cold_starts),
    )


def _newest_facts(session: Session) -> dict[int, int]:
    """Return the time of the newest fact of each run: an answer of the cloud, or an event of the engine."""
    reported = session.execute(select(ProgressRow.run_id, func.max(ProgressRow.at_ms)).group_by(ProgressRow.run_id))
    seen = session.execute(
        select(Node.run_id, func.max(NodeEvent.at_ms))
        .join(NodeEvent, NodeEvent.node_id == Node.id)
        .group_by(Node.run_id)
    )
    newest: dict[int, int] = {}
    for run_id, at_ms in [*reported, *seen]:
        newest[run_id] = max(at_ms, newest.get(run_id, at_ms))
    return newest
