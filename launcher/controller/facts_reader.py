"""Read the facts of a run: its status, nodes and spending, the engine's progress, and the spending of other runs."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter
from sqlalchemy import Select, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session, sessionmaker

from engine.clock import Clock
from engine.events import CheckpointSaved, EngineFinished, EngineStarted, IterationDone, Judged, StoreAway
from launcher.decide import budget_guard
from launcher.decide.clock_doubt import Doubt
from launcher.decide.current_prices import PriceNow, repriced
from launcher.decide.facts import OVER, STEADY_ITERATIONS, Facts, NodeRecord, Others, Stage
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.decide.point_cost import Scored
from launcher.decide.run_budget import held_for_stuck, hourly_micro_usd, reserved_micro_usd
from launcher.decide.work_left import WorkLeft
from launcher.job.schema import Job
from launcher.ledger.accounting import charges_of_run, judge_budget, judge_micro_usd, spent_micro_usd
from launcher.ledger.models import LOCAL, Node, NodeEvent, ProgressRow, Run, RunStatus
from launcher.ledger.node_history import metered_at, node_records
from launcher.ledger.settled import settled_micro_usd
from launcher.ledger.store import current_status
from launcher.placement.plan import Plan
from launcher.report.reached import evaluations_of
from launcher.report.target import smoothed
from launcher.services.prices_now import prices_now

PRICE_SECONDS = 60.0
"""Time between two reads of the ledger's prices (wall time). Spot prices change by the minute at most."""

UNWATCHED_MS = 60_000
"""Longest gap between two passes in ms. After a longer gap, events of the engine may not have been read yet, so a
standstill is counted from the new pass on."""


_CHANGES: tuple[tuple[InstrumentedAttribute[int], Select[Any]], ...] = (
    (Run.id, select(Run.id)),
    (RunStatus.id, select(RunStatus.run_id)),
    (NodeEvent.id, select(Node.run_id).join(NodeEvent)),
    (ProgressRow.id, select(ProgressRow.run_id).where(ProgressRow.kind == Judged.KIND)),
)
"""Ids whose growth may change the cost of a run, and how the run is found."""


class Standstill:
    """The start of a standstill.

    Since then the run has made no progress, although its trainer answers and does not wait for a person.
    """

    def __init__(self, now_ms: int) -> None:
        self.since_ms = self._passed_ms = now_ms

    def watch(self, now_ms: int, trainer: NodeFact | None, is_excused: bool) -> None:
        """Move the start to `now_ms` if the trainer does not answer, if `is_excused`, or after a gap without passes."""
        answers = trainer is not None and trainer.status is NodeStatus.UP
        if not answers or is_excused or now_ms - self._passed_ms > UNWATCHED_MS:
            self.since_ms = now_ms
        self._passed_ms = now_ms


class FactsReader:
    """Reads facts from the ledger.

    Keeps only values that would otherwise need the whole history of a run in every pass.
    """

    def __init__(self, run: Run, job: Job, plan: Plan, clock: Clock) -> None:
        self._run, self._job, self._plan, self._sites, self._clock = run, job, plan, plan.sites, clock
        self.standstill = Standstill(clock.now_ms())
        self.prices, self._prices_at = PriceNow(), -PRICE_SECONDS
        self._last_others = Others()
        """The other runs as last read."""
        self._settled: dict[int, int] = {}
        """By run: the micro-dollars of other runs that cost no more."""
        self._open: set[int] = set()
        """Other runs that may still cost money."""
        self._read_to: tuple[int, ...] | None = None
        """The newest ids that `_settled` and `_open` know, of the tables in `_CHANGES`."""
        self._plans: dict[int, int] = {}
        """By run: the hourly cost of the run's plan, in micro-dollars."""
        self._lineage = 0
        """The newest lineage that a trainer has started."""
        self._advance: tuple[int, int, tuple[int, ...]] = (0, -1, ())
        """The id of the last row read, the furthest iteration, and the times of first reaching the last iterations."""
        self._saved_ms: int | None = None
        """The time of the newest checkpoint."""
        self._store_away_ms: int | None = None
        """Since when the newest trainer waits for the bucket."""

    def refresh_prices(self, sessions: sessionmaker[Session]) -> None:
        """Read the clouds' latest prices from the ledger, once a minute."""
        if time.monotonic() - self._prices_at >= PRICE_SECONDS:
            with sessions() as session:
                self.prices, self._prices_at = prices_now(session, self._job, self._clock.now_ms()), time.monotonic()

    def facts(
        self,
        session: Session,
        *,
        is_limited_by_all: bool,
        trouble: str | None,
        doubt: Doubt | None,
        store_answers: bool = False,
        is_plain: bool = False,
    ) -> Facts:
        """Read the facts of the run.

        `is_limited_by_all`: a limit across all runs is set, so the other runs are read too. `store_answers`: whether
        the bucket answers the controller. `is_plain`: leave out all that the run's own limits and its end do not need,
        because the whole facts could not be read.
        """
        now_ms = self._clock.now_ms()
        statuses = session.scalars(
            select(RunStatus).where(RunStatus.run_id == self._run.id).order_by(RunStatus.id.desc())
        ).all()
        stage, reason = Stage(statuses[0].status), statuses[0].reason
        stage_ms = statuses[0].at_ms
        for status in statuses:
            if status.status != statuses[0].status:
                break
            stage_ms = status.at_ms
        planned_ms = next((row.at_ms for row in statuses if row.status == Stage.PLANNED), self._run.created_ms)
        nodes = node_records(session, self._run)
        finished = newest_end(session, self._run, planned_ms, nodes)
        return Facts(
            now_ms=now_ms,
            stage=stage,
            reason=reason,
            stage_ms=stage_ms,
            planned_ms=planned_ms,
            nodes=[node.as_failed() for node in nodes],
            kept=[node for node in nodes if node.is_kept],
            metered_when_ordered=_metered_when_ordered(session, self._run, nodes, now_ms),
            metered=spent_micro_usd(session, self._run, now_ms),
            finished=EngineFinished(**finished.event) if finished is not None else None,
            finished_ms=finished.at_ms if finished is not None else 0,
            advances_ms=(now_ms,) if is_plain else self._advances_ms(session),
            saved_ms=None if is_plain else self._saved_ms,
            still_since_ms=None if is_plain else self.standstill.since_ms,
            trouble=trouble,
            store_away_ms=None if is_plain else self._store_away_ms,
            store_answers=store_answers,
            others=self._last_others if is_plain or not is_limited_by_all else self._others(session, now_ms),
            doubt=doubt,
            sites=self._sites if is_plain else tuple(repriced(site, self.prices) for site in self._sites),
            work=None if is_plain else self._work(),
            scores=() if is_plain else self._scores(session, now_ms),
        )

    def _scores(self, session: Session, now_ms: int) -> Sequence[Scored]:
        """Return all evaluations of a job with a limit on the cost of a point; empty for any other job."""
        target = self._job.target
        if self._job.stop.usd_per_point is None or target is None:
            return ()
        charges = charges_of_run(session, self._run, now_ms).values()
        of_nodes = (charge for of_node in charges for charge in of_node)
        return smoothed(evaluations_of(session, self._run, target.metric, of_nodes))

    def _work(self) -> WorkLeft | None:
        """Return the work left. A run past the expected iterations counts on all iterations that its job allows."""
        if not self._plan.pace_ms:
            return None
        done = self._advance[1] + 1
        expected = self._plan.iterations if done < self._plan.iterations else float(self._job.iterations)
        every = self._plan.checkpoint_every
        return WorkLeft(iterations=expected, done=done, iteration_ms=self._plan.pace_ms, saved_every=every)

    def _advances_ms(self, session: Session) -> tuple[int, ...]:
        """Return the times at which the run first reached its last `STEADY_ITERATIONS` iterations.

        Repeated iterations are no progress, nor are those of a trainer whose successor has started. Rows are only
        added, never changed, so each pass reads only the new rows: a run may have many thousands.
        """
        last_id, best, times = self._advance
        is_first_look = not last_id
        kinds = (IterationDone.KIND, EngineStarted.KIND, CheckpointSaved.KIND, StoreAway.KIND)
        rows = session.scalars(
            select(ProgressRow)
            .where(ProgressRow.run_id == self._run.id, ProgressRow.kind.in_(kinds), ProgressRow.id > last_id)
            .order_by(ProgressRow.id)
        )
        for row in rows:
            last_id = row.id
            if row.kind == EngineStarted.KIND:
                self._lineage = max(self._lineage, row.lineage)
                self._store_away_ms = None
            elif row.lineage < self._lineage:
                continue
            elif row.kind == StoreAway.KIND:
                self._store_away_ms = self._clock.now_ms() if row.event["is_away"] else None
            elif row.kind == CheckpointSaved.KIND:
                # Use the controller's clock, because the trainer's clock may be wrong. A controller that has just
                # started reads old rows.
                self._saved_ms = row.at_ms if is_first_look else self._clock.now_ms()
            elif row.event["iteration"] > best:
                best, times = row.event["iteration"], (*times, row.at_ms)[-STEADY_ITERATIONS:]
                self.standstill.since_ms = self._clock.now_ms()
        self._advance = (last_id, best, times)
        return times

    def _others(self, session: Session, now_ms: int) -> Others:
        """Return the spending of all other runs: nodes on real clouds, and judges also of runs on this machine."""
        self._refresh_open(session)
        reserved = per_hour = planned = metered = 0
        for run in session.scalars(select(Run).where(Run.id.in_(self._open))):
            status = current_status(session, run)
            is_bought, judged = run.infra != LOCAL, judge_budget(run)
            if not is_bought and not judged:
                self._open.discard(run.id)
                continue
            nodes = node_records(session, run)
            is_live = any(node.is_live for node in nodes)
            bought = nodes if is_bought else []
            judges = judge_micro_usd(session, run)
            spent = judges + (spent_micro_usd(session, run, now_ms) if is_bought else 0)
            if status is not None and status.status in OVER and not is_live:
                self._settled[run.id] = spent
                self._open.discard(run.id)
                continue
            planned_hourly = self._planned_hourly_of(run) if is_bought else 0
            planned += max(hourly_micro_usd(bought), planned_hourly)
            # A run that starts checks the limit itself, and must not end this one before it is refused.
            if is_live or (status is not None and status.status != Stage.PLANNED):
                reserved += max(0, judged - judges)
            metered += spent
            reserved += reserved_micro_usd(bought, budget_guard.RELEASE_ALLOWANCE_MS, now_ms) + held_for_stuck(
                bought,
                _metered_when_ordered(session, run, bought, now_ms),
                max_total=run.max_total_micro_usd,
                planned_hourly=planned_hourly,
                allowance_ms=budget_guard.RELEASE_ALLOWANCE_MS,
                now_ms=now_ms,
            )
            per_hour += hourly_micro_usd(bought)
        metered += sum(self._settled.values())
        self._last_others = Others(metered=metered, reserved=reserved, hourly=per_hour, planned_hourly=planned)
        return self._last_others

    def _refresh_open(self, session: Session) -> None:
        """Find the other runs that may still cost money. Later passes look only at what is new in the ledger."""
        read_to = tuple(session.scalar(select(func.max(rows_id))) or 0 for rows_id, _ in _CHANGES)
        if self._read_to is None:
            self._settled = settled_micro_usd(session)
            self._open = set(session.scalars(select(Run.id))) - self._settled.keys()
        else:
            for (rows_id, changed), before, newest in zip(_CHANGES, self._read_to, read_to, strict=True):
                if newest > before:
                    self._open.update(session.scalars(changed.where(rows_id > before)))
        self._open.discard(self._run.id)
        for run_id in {self._run.id, *self._open}:
            self._settled.pop(run_id, None)
        self._read_to = read_to

    def _planned_hourly_of(self, run: Run) -> int:
        """Return the hourly cost of another run's plan, with disks and addresses."""
        if run.id not in self._plans:
            slots = TypeAdapter(Plan).validate_python(run.plan).slots
            self._plans[run.id] = sum(
                slot.placement.micro_usd_per_hour + slot.placement.side_micro_usd_per_hour for slot in slots
            )
        return self._plans[run.id]


def _metered_when_ordered(session: Session, run: Run, nodes: Sequence[NodeRecord], now_ms: int) -> dict[str, int]:
    """Return the money that the run had cost when each of its nodes that still runs was ordered to end."""
    ordered = {node.name: node.happened["releasing"] for node in nodes if node.is_ordered_to_end}
    return metered_at(session, run, ordered, now_ms) if ordered else {}


def newest_end(session: Session, run: Run, planned_ms: int, nodes: Iterable[NodeRecord]) -> ProgressRow | None:
    """Return the engine's report of its end since the run was planned, or None.

    A trainer that was given up may finish or fail beside its successor, and before it: that is not the end of the run.
    """
    of_run = ProgressRow.run_id == run.id
    lineage = select(func.max(ProgressRow.lineage)).where(of_run, ProgressRow.kind == EngineStarted.KIND)
    ends = session.scalars(
        select(ProgressRow)
        .where(
            of_run,
            ProgressRow.kind == EngineFinished.KIND,
            ProgressRow.at_ms >= planned_ms,
            ProgressRow.lineage >= func.coalesce(lineage.scalar_subquery(), 0),
        )
        .order_by(ProgressRow.id.desc())
    )
    ended_ms = {node.name: node.ended_ms for node in nodes if node.ended_ms is not None}
    return next((end for end in ends if end.at_ms < ended_ms.get(end.source, end.at_ms + 1)), None)
