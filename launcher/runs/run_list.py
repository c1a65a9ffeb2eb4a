"""The list of runs, newest first, in a few queries for all of them.

The newest events of a run are found from the end of an index, so the number of older events does not matter.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from engine.events import EngineStarted, Evaluated, IterationDone
from launcher.controller.lease import is_held
from launcher.decide.facts import OVER
from launcher.harmless import harmless
from launcher.learning import learns_nothing
from launcher.ledger.bills import billed_micro_usd
from launcher.ledger.left_in_buckets import LeftInBucket, left_in_buckets, sum_words
from launcher.ledger.models import (
    BillingInterval,
    ControllerLease,
    Node,
    NodeEvent,
    ProgressRow,
    Removal,
    Run,
    RunStatus,
    TroubleRow,
)
from launcher.ledger.node_history import metered_micro_usd, node_records
from launcher.ledger.settled import AT_ONCE, judges_micro_usd, unbilled_runs
from launcher.ledger.store import progress_of
from launcher.market.offers import dates_text
from launcher.report.target import WINDOW, exact_mean, shown_metric
from launcher.runs.event_lines import Seen

COUNT = 50
"""Runs that a page shows at first."""

MOST = 1000
"""Most runs that one answer of the web view holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run in the list. `score`: the mean of the last three evaluations; None before the first."""

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
    trouble: str
    learning: str
    """Both as in `RunView`."""
    target: float | None
    micro_usd: int
    billed_micro_usd: int | None
    """What the clouds billed; None if no imported bill names the run."""
    max_total_micro_usd: int | None
    money_basis: str
    is_over: bool
    is_open: bool
    """True unless the run is over and each of its nodes has its end and its bill on record."""
    is_removed: bool
    lacks_controller: bool
    """True if a run that is not over, or may still have nodes, has no controller."""
    left_in_buckets: tuple[LeftInBucket, ...]
    prices: str
    """Both as in `RunView`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunList:
    """A part of the list. `matching`: runs that the filter lets through; `total`: all runs."""

    rows: tuple[RunRow, ...]
    matching: int
    total: int

    @property
    def left_in_buckets(self) -> str:
        """Return what these runs left in buckets and its price a month, in words; empty if nothing is known of it."""
        return sum_words([folder for row in self.rows for folder in row.left_in_buckets])


def run_list(session: Session, contains: str = "", count: int = COUNT) -> RunList:
    """Return the newest runs whose name, status or infra contains the word. `count` is at least 1, and bounded."""
    word = contains.strip().lower()
    statuses = _statuses(session)
    names = session.execute(select(Run.id, Run.name, Run.infra).order_by(Run.id.desc())).all()
    matching = [
        run_id
        for run_id, name, infra in names
        if word in f"{name} {statuses[run_id].status if run_id in statuses else 'unknown'} {infra}".lower()
    ]
    shown = matching[: min(max(1, count), MOST)]
    rows = _rows(session, shown, statuses, left_in_buckets(session, shown))
    return RunList(rows=tuple(rows), matching=len(matching), total=len(names))


def all_rows(session: Session) -> list[RunRow]:
    """Return every run, newest first."""
    ids, statuses = list(session.scalars(select(Run.id).order_by(Run.id.desc()))), _statuses(session)
    parts, left = (ids[start : start + AT_ONCE] for start in range(0, len(ids), AT_ONCE)), left_in_buckets(session)
    return [row for part in parts for row in _rows(session, part, statuses, left)]


def run_row(session: Session, name: str) -> RunRow | None:
    """Return one run as in the list, or None for an unknown run."""
    run_id = session.scalar(select(Run.id).where(Run.name == name))
    if run_id is None:
        return None
    return _rows(session, [run_id], _statuses(session), left_in_buckets(session, [run_id]))[0]


def newest_of_all(session: Session) -> Seen:
    """Return the newest ids over all runs: they differ as soon as anything is new in the list of runs."""
    tables = (RunStatus, NodeEvent, ProgressRow, TroubleRow)
    return Seen(*(session.scalar(select(func.max(table.id))) or 0 for table in tables))


def _statuses(session: Session) -> dict[int, Any]:
    """Return the newest status of each run, with its reason."""
    ids = select(func.max(RunStatus.id)).group_by(RunStatus.run_id)
    newest = select(RunStatus.run_id, RunStatus.status, RunStatus.reason).where(RunStatus.id.in_(ids))
    return {row.run_id: row for row in session.execute(newest)}


def _rows(
    session: Session,
    ids: Sequence[int],
    statuses: Mapping[int, Any],
    left: Mapping[int, tuple[LeftInBucket, ...]],
) -> list[RunRow]:
    bills = select(Node.run_id, func.sum(BillingInterval.micro_usd)).join(BillingInterval).group_by(Node.run_id)
    billed = {run_id: int(micro_usd) for run_id, micro_usd in session.execute(bills.where(Node.run_id.in_(ids)))}
    unbilled = unbilled_runs(session, ids)
    on_bills = billed_micro_usd(session, ids)
    judged = judges_micro_usd(session, ids)
    removed = set(session.scalars(select(Removal.run_id).where(Removal.run_id.in_(ids))))
    newest_troubles = select(func.max(TroubleRow.id)).where(TroubleRow.run_id.in_(ids)).group_by(TroubleRow.run_id)
    troubles = {
        row.run_id: row.text for row in session.scalars(select(TroubleRow).where(TroubleRow.id.in_(newest_troubles)))
    }
    done = {run_id: events[-1] for run_id, events in _newest_events(session, ids, IterationDone.KIND, 1).items()}
    evaluations = _evaluations(session, ids)
    observed = select(Node.run_id, Node.price_observed_at, func.max(Node.requested_ms)).where(Node.run_id.in_(ids))
    bought: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for run_id, observed_at, newest_ms in session.execute(observed.group_by(Node.run_id, Node.price_observed_at)):
        bought[run_id][observed_at] = newest_ms
    held = session.scalars(select(ControllerLease).where(ControllerLease.run_id.in_(ids)))
    controlled = {lease.run_id for lease in held if is_held(lease)}
    rows = []
    for run in _runs(session, ids):
        status = statuses.get(run.id)
        word = status.status if status is not None else "unknown"
        evaluated = evaluations.get(run.id, [])
        metric = shown_metric(run.target_metric, (name for metrics in evaluated for name in metrics))
        scores = tuple(metrics[metric] for metrics in evaluated if metric in metrics)
        newest = done.get(run.id, {})
        is_open = word not in OVER or run.id in unbilled
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
                score=exact_mean(scores) if scores else None,
                reward=newest.get("reward_mean"),
                trouble=harmless(troubles.get(run.id, "")) if is_open else "",
                learning=learns_nothing(newest.get("health", {})) if newest and word not in OVER else "",
                target=run.target_value,
                micro_usd=judged[run.id] + (_metered(session, run) if is_open else billed.get(run.id, 0)),
                billed_micro_usd=on_bills.get(run.id),
                max_total_micro_usd=run.max_total_micro_usd,
                money_basis=run.money_basis,
                is_over=word in OVER,
                is_open=is_open,
                is_removed=run.id in removed,
                lacks_controller=is_open
                and run.id not in controlled
                and (word not in OVER or _has_nodes(session, run)),
                left_in_buckets=left.get(run.id, ()) if word in OVER else (),
                prices=dates_text(bought[run.id], max(bought[run.id].values())) if run.id in bought else "",
            )
        )
    return rows


def _runs(session: Session, ids: Sequence[int]) -> Sequence[Any]:
    """Return the columns of the list, newest run first. Jobs and plans, which are long, are not read."""
    shown = (Run.id, Run.name, Run.infra, Run.created_ms, Run.target_metric)
    more = (Run.target_value, Run.max_total_micro_usd, Run.money_basis)
    iterations = func.json_extract(Run.job, "$.iterations").label("iterations")
    return session.execute(select(*shown, *more, iterations).where(Run.id.in_(ids)).order_by(Run.id.desc())).all()


def _has_nodes(session: Session, row: Any) -> bool:
    return any(record.is_live for record in node_records(session, session.get_one(Run, row.id)))


def _metered(session: Session, row: Any) -> int:
    run = session.get_one(Run, row.id)
    return metered_micro_usd(session, run, run.clock.now_ms())


def _evaluations(session: Session, ids: Sequence[int]) -> dict[int, list[Mapping[str, float]]]:
    """Return the metrics of the last evaluations of each run, oldest first: as many as a score is the mean of."""
    went_back = (
        select(ProgressRow.run_id)
        .where(ProgressRow.kind == EngineStarted.KIND, ProgressRow.run_id.in_(ids))
        .group_by(ProgressRow.run_id)
        .having(func.max(ProgressRow.lineage) > func.min(ProgressRow.lineage))
    )
    newest = _newest_events(session, ids, Evaluated.KIND, WINDOW)
    by_run = {run_id: [event["metrics"] for event in events] for run_id, events in newest.items()}
    # Some events of a run that lost its trainer are void.
    for run in session.scalars(select(Run).where(Run.id.in_(went_back))):
        by_run[run.id] = [row.event["metrics"] for row in progress_of(session, run, Evaluated.KIND)][-WINDOW:]
    return {run_id: metrics for run_id, metrics in by_run.items() if metrics}


def _newest_events(session: Session, ids: Sequence[int], kind: str, count: int) -> dict[int, list[dict[str, Any]]]:
    """Return the newest `count` events of a kind of each run, oldest first."""
    newest = (
        select(ProgressRow.id)
        .where(ProgressRow.run_id == Run.id, ProgressRow.kind == kind)
        .order_by(ProgressRow.id.desc())
        .limit(count)
        .correlate(Run)
    )
    by_run: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    shown = (ProgressRow.id, ProgressRow.run_id, ProgressRow.event)
    rows = session.execute(select(*shown).join(Run, ProgressRow.id.in_(newest)).where(Run.id.in_(ids)))
    for _, run_id, event in sorted(rows, key=itemgetter(0)):
        by_run[run_id].append(event)
    return by_run
