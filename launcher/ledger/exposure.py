"""What the ledger knows of each pool: how long its spot nodes lived, how they ended, and whether they came at all.

A life begins with `up`. It ends as a reclaim only where a preemption is recorded; a node that we released, or that
still runs, was watched and not taken. A run that nobody looks after any more (its controller died) is watched up to
its newest fact and no further. Nodes of the local infra are left out: a script takes them back, not a market.
"""

from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from engine.events import Market
from launcher.ledger.models import Node, NodeEvent, Preemption, ProgressRow, Run
from launcher.market.hazard import Life, Pool, PoolHistory, bursts

LOCAL = "local"

ENDED = ("gone", "released")


def pool_histories(session: Session, now_ms: int) -> dict[Pool, PoolHistory]:
    """The history of every pool that a real cloud was asked for, up to `now_ms` (UTC)."""
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
    """On demand a pool has no zone: capacity is asked for by region."""
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
        ends = [events[kind] for kind in ENDED if kind in events]
        end_ms = reclaimed.get(node.id, min(ends, default=watched_to_ms.get(node.run_id, up_ms)))
        lives.append(Life(ms=max(0, end_ms - up_ms), reclaimed=node.id in reclaimed))
    return PoolHistory(
        pool=pool,
        lives=tuple(lives),
        launches=bursts((at, at) for at in launches),
        last_launch_ms=max(launches, default=None),
        stock_outs_ms=tuple(sorted(stock_outs)),
        cold_starts_ms=tuple(cold_starts),
    )


def _newest_facts(session: Session) -> dict[int, int]:
    """When each run was last heard of: by the cloud's answers, or by what its engine told."""
    told = session.execute(select(ProgressRow.run_id, func.max(ProgressRow.at_ms)).group_by(ProgressRow.run_id))
    seen = session.execute(
        select(Node.run_id, func.max(NodeEvent.at_ms))
        .join(NodeEvent, NodeEvent.node_id == Node.id)
        .group_by(Node.run_id)
    )
    newest: dict[int, int] = {}
    for run_id, at_ms in [*told, *seen]:
        newest[run_id] = max(at_ms, newest.get(run_id, at_ms))
    return newest
