"""The list of runs, newest first, a part at a time.

Only the runs of the first screen are looked up. The newest event of a run is found from the end of the run's index, so
the number of older events does not matter.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, true
from sqlalchemy.orm import Session

from engine.events import Evaluated, IterationDone, Judged
from launcher.decide.facts import ENDS, OVER
from launcher.harmless import harmless
from launcher.learning import learns_nothing
from launcher.ledger.models import BillingInterval, Node, NodeEvent, ProgressRow, Removal, Run, RunStatus
from launcher.ledger.node_history import metered_micro_usd
from launcher.report.target import shown_metric
from launcher.runs.event_lines import Seen

COUNT = 50
"""Runs that a page shows at first."""

MOST = 1000
"""Most runs that one answer holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run in the list. `score`: the newest evaluation; None before the first."""

    name: str
    status: str
    reason: str
    infra: str
    created_ms: int
    iteration: int
    iterations: int
    metric: str
    score: float | None
    reward: float | None
    """Mean reward of the newest batch; None before the first."""
    learning: str
    """As in `RunView`."""
    target: float | None
    micro_usd: int
    max_total_micro_usd: int | None
    money_basis: str
    is_over: bool
    is_removed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunList:
    """A part of the list. `matching`: runs that the filter lets through; `total`: all runs."""

    rows: tuple[RunRow, ...]
    matching: int
    total: int


def run_list(session: Session, contains: str = "", count: int = COUNT) -> RunList:
    """Return the newest runs whose name, status or infra contains the word. `count` is at least 1, and bounded."""
    word = contains.strip().lower()
    statuses = _statuses(session)
    names = session.execute(select(Run.id, Run.name, Run.infra).order_by(Run.id.desc())).all()
    wanted = [
        run_id
        for run_id, name, infra in names
        if word in f"{name} {statuses[run_id].status if run_id in statuses else 'unknown'} {infra}".lower()
    ]
    rows = _rows(session, wanted[: min(max(1, count), MOST)], statuses)
    return RunList(rows=tuple(rows), matching=len(wanted), total=len(names))


def run_row(session: Session, name: str) -> RunRow | None:
    """Return one run as in the list, or None for an unknown run."""
    run_id = session.scalar(select(Run.id).where(Run.name == name))
    return None if run_id is None else _rows(session, [run_id], _statuses(session))[0]


def newest_of_all(session: Session) -> Seen:
    """Return the newest ids over all runs: they differ as soon as anything is new in the list of runs."""
    return Seen(*(session.scalar(select(func.max(table.id))) or 0 for table in (RunStatus, NodeEvent, ProgressRow)))


def _statuses(session: Session) -> dict[int, RunStatus]:
    ids = select(func.max(RunStatus.id)).group_by(RunStatus.run_id)
    return {row.run_id: row for row in session.scalars(select(RunStatus).where(RunStatus.id.in_(ids)))}


def _rows(session: Session, ids: Sequence[int], statuses: dict[int, RunStatus]) -> list[RunRow]:
    bills = select(Node.run_id, func.sum(BillingInterval.micro_usd)).join(BillingInterval).group_by(Node.run_id)
    billed = {run_id: int(micro_usd) for run_id, micro_usd in session.execute(bills.where(Node.run_id.in_(ids)))}
    has_ended = select(NodeEvent.id).where(NodeEvent.node_id == Node.id, NodeEvent.kind.in_(ENDS)).exists()
    with_nodes = set(session.scalars(select(Node.run_id).where(Node.run_id.in_(ids), ~has_ended).distinct()))
    judged = _judged(session, ids)
    removed = set(session.scalars(select(Removal.run_id).where(Removal.run_id.in_(ids))))
    done, seen = (_newest_events(session, ids, kind) for kind in (IterationDone.KIND, Evaluated.KIND))
    rows = []
    for run in _runs(session, ids):
        status = statuses.get(run.id)
        word = status.status if status is not None else "unknown"
        metrics = seen[run.id]["metrics"] if run.id in seen else {}
        metric = shown_metric(run.target_metric, metrics)
        newest = done.get(run.id, {})
        is_open = word not in OVER or run.id in with_nodes
        rows.append(
            RunRow(
                name=run.name,
                status=word,
                reason=harmless(status.reason.partition("\n")[0]) if status is not None else "",
                infra=run.infra,
                created_ms=run.created_ms,
                iteration=int(done[run.id]["iteration"]) + 1 if run.id in done else 0,
                iterations=int(run.iterations),
                metric=metric,
                score=metrics.get(metric),
                reward=newest.get("reward_mean"),
                learning=learns_nothing(newest.get("health", {})) if newest and word not in OVER else "",
                target=run.target_value,
                micro_usd=judged[run.id] + (_metered(session, run) if is_open else billed.get(run.id, 0)),
                max_total_micro_usd=run.max_total_micro_usd,
                money_basis=run.money_basis,
                is_over=word in OVER,
                is_removed=run.id in removed,
            )
        )
    return rows


def _runs(session: Session, ids: Sequence[int]) -> Sequence[Any]:
    """Return the columns of the list, newest run first. Jobs and plans, which are long, are not read."""
    shown = (Run.id, Run.name, Run.infra, Run.created_ms, Run.target_metric)
    more = (Run.target_value, Run.max_total_micro_usd, Run.money_basis)
    iterations = func.json_extract(Run.job, "$.iterations").label("iterations")
    return session.execute(select(*shown, *more, iterations).where(Run.id.in_(ids)).order_by(Run.id.desc())).all()


def _metered(session: Session, row: Any) -> int:
    run = session.get_one(Run, row.id)
    return metered_micro_usd(session, run, run.clock.now_ms())


def _judged(session: Session, ids: Sequence[int]) -> Counter[int]:
    """Return the cost of paid judges by run, in micro-dollars. SQLite sums it: a run may have many thousand calls."""
    is_ours = (ProgressRow.kind == Judged.KIND) & ProgressRow.run_id.in_(ids)
    call = func.json_each(ProgressRow.event, "$.calls").table_valued("value")
    of_calls = select(ProgressRow.run_id, func.sum(func.json_extract(call.c.value, "$[2]")))
    held = select(ProgressRow.run_id, func.sum(func.json_extract(ProgressRow.event, "$.unaccounted")))
    found: Counter[int] = Counter()
    for query in (of_calls.join(call, true()), held):
        for run_id, micro_usd in session.execute(query.where(is_ours).group_by(ProgressRow.run_id)):
            found[run_id] += int(micro_usd or 0)
    return found


def _newest_events(session: Session, ids: Sequence[int], kind: str) -> dict[int, dict[str, Any]]:
    """Return the newest event of a kind of each run.

    SQLite walks the index of the run from its end to the first event of the kind. The empty string keeps SQLite from
    the index of the kinds, in which the events of all runs lie.
    """
    newest = (
        select(ProgressRow.id)
        .where(ProgressRow.run_id == Run.id, ProgressRow.kind.concat("") == kind)
        .order_by(ProgressRow.id.desc())
        .limit(1)
        .correlate(Run)
        .scalar_subquery()
    )
    progress_ids = [one for one in session.scalars(select(newest).where(Run.id.in_(ids))) if one is not None]
    found = session.execute(select(ProgressRow.run_id, ProgressRow.event).where(ProgressRow.id.in_(progress_ids)))
    return {row.run_id: row.event for row in found}
