"""Choose the fleet of a job that leaves its GPUs open: the cheapest, the cheapest in time, and the quickest.

candidates (launcher/placement/fleets.py) -> shortlist -> replays -> the three plans, and the front behind them

Every dollar and hour that is compared or shown is a mean of replays on generated markets, with the decisions of a live
run: stand-ins, losses and lateness count. The shortlist is first replayed a few times, and then its best more often.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt
from pathlib import Path
from statistics import fmean
from typing import Literal

from sqlalchemy.orm import Session, sessionmaker

from launcher.decide.launch_history import MoveRules
from launcher.exit_codes import BudgetError
from launcher.job.agreement import why_never_on_spot
from launcher.job.checked import CheckedJob
from launcher.job.resolved import Resolved
from launcher.job.schema import ASLEEP, Job
from launcher.market.offers import Catalog, dates_text
from launcher.money import HOUR_MS, MICRO, duration, hourly
from launcher.placement.cloud_plan import CloudPlan, PlanReplays
from launcher.placement.fleets import Candidate, Fleet, candidates, chooses_fleet, is_spot_open, shortlist, text_of
from launcher.placement.front import FrontFleet, ParetoFront
from launcher.placement.plan import PlacementError
from launcher.replay.of_plan import LEAST_STARTS, LONGEST_IDEAL_MS, replays_of
from launcher.replay.replay import Replayed
from launcher.services.planning import CurrentMarket, current_market, plan_in, with_other_trainer

Goal = Literal["cost", "time"]

FIRST_STARTS, STARTS = 4, 10
"""Most replays of each fleet of the shortlist, and of the best of each kind: cheapest, in time, quickest."""

NODE_HOURS_OF_START = 20
"""Node-hours of the fleets' runs, with every node at work, up to which they get all of these replays. Of runs twice as
large, half as many differ as little from their mean, and take as much time."""

LEAST_FIRST_STARTS = 2

CONFIRMED_STARTS, NEAR = 30, 1.1
"""Replays of the cheapest fleet in time, and of those that cost at most this many times as much: the dollars of single
starts differ by a factor of 2. They also tell whether it is in time: a fleet that is late one time in three has five
good starts of five one time in eight."""

FINALISTS = (2, 1, 3)
"""Fleets that are replayed more often: by dollars, by hours, and by dollars of those in time. Few starts alone rank
badly: the finalists are the best by the geometric mean of their forecast and their first replays."""

NOT_SEARCHED = (
    "not searched: trainers of several nodes, rollout nodes of two kinds or in a second region, other algorithms"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetRow:
    """A fleet with its plan, and what its replays came to."""

    number: int
    """For `--choose`, from 1."""
    candidate: Candidate
    plan: CloudPlan
    replays: PlanReplays
    in_time: bool
    """True if enough of its replays meet the deadline, or without a deadline."""
    why_not: str
    """Why this is not the cheapest plan in time. Empty: it is."""
    known: list[Replayed] = field(default_factory=list, compare=False, repr=False)
    """Results of its replays so far."""

    @property
    def key(self) -> tuple[object, ...]:
        return self.candidate.key

    @property
    def fleet(self) -> Fleet:
        return self.candidate.fleet

    @property
    def resolved(self) -> Resolved:
        """Return the job with the fleet's resources."""
        return self.candidate.resolved

    @property
    def nodes(self) -> str:
        """Return the fleet's nodes as text."""
        return text_of(self.fleet, self.candidate.choice.nodes)

    @property
    def place(self) -> str:
        """Return the cloud and the region."""
        return f"{self.plan.cloud} {self.plan.region}"

    @property
    def text(self) -> str:
        """Return the fleet's nodes and region as text."""
        return f"{self.nodes}, {self.place}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleets:
    """The three plans of a job, and the front: the fleets of which none is both cheaper and quicker."""

    cheapest: FleetRow
    in_time: FleetRow | None
    """None: no fleet meets the deadline, or the job has none."""
    quickest: FleetRow
    chosen: FleetRow
    front: tuple[FleetRow, ...]
    other_way: FleetRow | None
    """The chosen trainer without rollout nodes beside it, or with the best of them if the chosen fleet has none. None:
    not replayed."""
    usd_per_hour_saved: float | None
    """Dollars of each hour by which the quickest plan is earlier than the chosen one. None: it is the same."""
    why_trainer_on_demand: str
    """Why no fleet has its trainer on spot. Empty: some do."""
    fleets: int
    """Fleets compared by forecast."""
    replayed: int
    seconds: float
    """Processor seconds of the search."""


def choose_fleet(
    job: Job, market: CurrentMarket, workdir: Path | None = None, goal: Goal = "cost", choose: int | None = None
) -> Fleets:
    """Return the fleets of a job that leaves its GPUs open, and the one to buy.

    workdir  folder of the job file, where the model's folder may be
    goal     cost: the cheapest in time. time: the quickest within the budget
    choose   number of a row of the front, instead
    raises   PlacementError: no GPU on offer can run the job, or no row has the number
             BudgetError: nothing is within the budget, or in time; it names what would be
    """
    began = time.process_time()
    every, unfit = candidates(job, workdir, market.view.offers, market.view)
    if not every:
        raise _nothing_fits(job, workdir, market, [refusal.why for refusal in unfit])
    budget = job.nodes_max_total
    deadline_hours = None if job.budget.deadline is None else job.budget.deadline / HOUR_MS
    listed = shortlist(every, None if budget is None else budget / MICRO, deadline_hours)
    starts = _starts(listed, FIRST_STARTS, LEAST_FIRST_STARTS)
    first = [row for candidate in listed if (row := _planned_row(candidate, market, starts)) is not None]
    rankings = zip(_rankings(first, with_forecast=True), FINALISTS, strict=True)
    finalists = {row.key: row for ranked, number in rankings for row in ranked[:number]}
    if not finalists:
        raise BudgetError(_too_tight(job, every))
    starts = _starts((row.candidate for row in finalists.values()), STARTS, LEAST_STARTS)
    rows = [row for each in finalists.values() if (row := _replayed_more(each, starts))]
    if not rows:
        raise BudgetError(_too_tight(job, every))
    by_dollars, by_hours, timely = _rankings(rows)
    best = by_hours[0] if goal == "time" else timely[0] if timely else by_dollars[0]
    other = _other_way(best, every)
    if other is not None and other.key not in finalists:
        rows += [row for row in [_planned_row(other, market, starts)] if row is not None]
        by_dollars, by_hours, timely = _rankings(rows)
    rows = _confirmed(rows)
    if not rows:
        raise BudgetError(_too_tight(job, every))
    by_dollars, by_hours, timely = _rankings(rows)
    front = {row.key: row for row in _front(rows, timely[0] if timely else None, job)}
    cheapest, quickest = front[by_dollars[0].key], front[by_hours[0].key]
    in_time = front[timely[0].key] if timely and deadline_hours is not None else None
    if choose is not None and not 1 <= choose <= len(front):
        raise PlacementError(f"--choose is {choose}, and the plans are numbered 1 to {len(front)}; use one of these")
    if deadline_hours is not None and in_time is None and choose is None:
        asked, takes = (duration(round(hours * HOUR_MS)) for hours in (deadline_hours, quickest.replays.hours))
        raise BudgetError(
            f"no fleet within the budget is in time for the deadline of {asked}: the quickest takes {takes} and "
            f"${quickest.replays.usd:,.2f} ({quickest.text}); use a longer --deadline or more --max-total, or accept a "
            "late run with --set budget.deadline_confidence=0"
        )
    chosen = quickest if goal == "time" else in_time or cheapest
    chosen = chosen if choose is None else list(front.values())[choose - 1]
    saved = chosen.replays.hours - quickest.replays.hours
    other_ways = (row for row in by_dollars if _is_other_way(chosen.fleet, row.fleet))
    return Fleets(
        cheapest=cheapest,
        in_time=in_time,
        quickest=quickest,
        chosen=chosen,
        other_way=next(other_ways, None),
        front=tuple(front.values()),
        usd_per_hour_saved=(quickest.replays.usd - chosen.replays.usd) / saved if saved > 0 else None,
        why_trainer_on_demand=_why_on_demand(job),
        fleets=len(every),
        replayed=len(listed),
        seconds=time.process_time() - began,
    )


def with_fleet_chosen(
    sessions: sessionmaker[Session],
    checked: CheckedJob,
    catalog: Catalog,
    now_ms: int,
    closed: Mapping[tuple[str, str], str] | None = None,
    goal: Goal = "cost",
    choose: int | None = None,
) -> tuple[CheckedJob, Fleets | None]:
    """Return the job with its fleet chosen, and the fleets. A job that names its GPUs is returned as it is, with None.

    The arguments are those of `current_market` and `choose_fleet`; raises as both.
    """
    if not chooses_fleet(checked.job):
        return checked, None
    market = current_market(sessions, checked.job, catalog, now_ms, closed)
    fleets = choose_fleet(checked.job, market, checked.workdir, goal, choose)
    return checked.with_job(fleets.chosen.resolved.job), fleets


def plan_of_fleet(fleets: Fleets, market: CurrentMarket, job: Job, other: CloudPlan | None) -> CloudPlan:
    """Return the whole plan of the chosen fleet, with the replays that it was chosen by.

    `other`: the plan with the trainer of the other capacity type, to compare with.
    """
    row = fleets.chosen
    plan = replace(plan_in(market, row.resolved, replays_decide=True), replays=row.replays)
    return plan if other is None else with_other_trainer(plan, job, other, STARTS)


def front_of(fleets: Fleets, job: Job, now_ms: int) -> ParetoFront:
    """Return the front as --json prints it and the run keeps it. `job`: the job, with its deadline and budget."""
    budget = job.nodes_max_total
    return ParetoFront(
        cheapest=fleets.cheapest.number,
        in_time=None if fleets.in_time is None else fleets.in_time.number,
        quickest=fleets.quickest.number,
        chosen=fleets.chosen.number,
        usd_per_hour_saved=fleets.usd_per_hour_saved,
        compared=fleets.fleets,
        replayed=fleets.replayed,
        not_searched=NOT_SEARCHED,
        deadline_hours=None if job.budget.deadline is None else job.budget.deadline / HOUR_MS,
        budget_usd=None if budget is None else budget / MICRO,
        prices=dates_text(
            (slot.placement.price_observed_at for row in fleets.front for slot in row.plan.slots), now_ms
        ),
        front=tuple(
            FrontFleet(
                number=row.number,
                nodes=row.text,
                place=row.place,
                trainer=row.fleet.trainer,
                trainer_on_spot=row.fleet.trainer_on_spot,
                rollout=row.fleet.rollout,
                rollout_nodes=row.candidate.choice.nodes,
                usd=row.replays.usd,
                usd_low=row.replays.usd_low,
                usd_high=row.replays.usd_high,
                hours=row.replays.hours,
                starts=row.replays.starts,
                met=row.replays.met,
                in_time=row.in_time,
                why_not=row.why_not,
            )
            for row in fleets.front
        ),
    )


def _starts(fleets: Iterable[Candidate], most: int, least: int) -> int:
    """Return the starts of each of these fleets: fewer for large runs.

    All get equally many, because a start that is hard for one fleet is hard for the others.
    """
    node_hours = fmean((1 + candidate.choice.nodes) * candidate.least_hours for candidate in fleets)
    return max(least, ceil(most * min(1.0, NODE_HOURS_OF_START / max(node_hours, 1e-9))))


def _planned_row(candidate: Candidate, market: CurrentMarket, starts: int) -> FleetRow | None:
    """Return `_row` of a fleet's plan. None: no plan, or too few of its replays, reach the target within the limits."""
    try:
        plan = plan_in(market, candidate.resolved, replays_decide=True, with_schedule=False)
    except (PlacementError, BudgetError):
        return None
    return _row(candidate, plan, starts)


def _replayed_more(row: FleetRow, starts: int) -> FleetRow | None:
    """Return a row with so many replays, or with those that it has if these are more. None: as of `_row`."""
    return _row(row.candidate, row.plan, max(starts, row.replays.starts), row.known)


def _confirmed(rows: Sequence[FleetRow]) -> list[FleetRow]:
    """Return the rows with more replays of the cheapest in time and of those near it, until these have enough."""
    left = {row.key: row for row in rows}
    most = _starts((row.candidate for row in rows), CONFIRMED_STARTS, CONFIRMED_STARTS // 3)
    while True:
        *_, timely = _rankings(list(left.values()))
        near = [row for row in timely if row.replays.usd <= NEAR * timely[0].replays.usd and row.replays.starts < most]
        if not near:
            return list(left.values())
        for row in near:
            again = _replayed_more(row, most)
            if again is None:
                del left[row.key]
            else:
                left[row.key] = again


def _is_other_way(of: Fleet, fleet: Fleet) -> bool:
    """Return whether two fleets have the same trainer, and one of them alone has rollout nodes."""
    same_trainer = (of.trainer, of.trainer_on_spot) == (fleet.trainer, fleet.trainer_on_spot)
    return same_trainer and (of.rollout is None) is not (fleet.rollout is None)


def _other_way(row: FleetRow, every: Sequence[Candidate]) -> Candidate | None:
    """Return the row's trainer alone, or with the rollout nodes that are cheapest by forecast if it is alone."""
    others = (candidate for candidate in every if _is_other_way(row.fleet, candidate.fleet))
    return min(others, key=lambda candidate: (candidate.usd, candidate.hours), default=None)


def _row(candidate: Candidate, plan: CloudPlan, starts: int, known: list[Replayed] | None = None) -> FleetRow | None:
    """Return a row of so many replays, of which some may be known. None: too few of them reach the target."""
    known = [] if known is None else known
    job = candidate.resolved.job
    confidence = job.budget.deadline_confidence
    replays = replays_of(plan, MoveRules.of(job), confidence, starts, known)
    if replays is None or replays.enough_ms is None:
        return None
    in_time = replays.met is None or replays.met >= confidence * replays.starts
    return FleetRow(
        number=0,
        candidate=candidate,
        plan=replace(plan, replays=replays),
        replays=replays,
        in_time=in_time,
        why_not="",
        known=known,
    )


def _rankings(
    rows: Sequence[FleetRow], *, with_forecast: bool = False
) -> tuple[list[FleetRow], list[FleetRow], list[FleetRow]]:
    """Return the rows by dollars, by hours, and those in time by dollars.

    All are within the budget, because replays end at it. `with_forecast`: dollars are the geometric mean of replays and
    forecast.
    """

    def usd(row: FleetRow) -> float:
        return sqrt(row.replays.usd * row.candidate.usd) if with_forecast else row.replays.usd

    by_dollars = sorted(rows, key=lambda row: (usd(row), row.replays.hours))
    by_hours = sorted(rows, key=lambda row: (row.replays.hours, row.replays.usd))
    return by_dollars, by_hours, [row for row in by_dollars if row.in_time]


def _front(rows: Sequence[FleetRow], best: FleetRow | None, job: Job) -> list[FleetRow]:
    """Return the rows of which none is both cheaper and quicker, and `best`: cheapest first, with numbers and reasons.

    `best`: the cheapest in time. A cheaper and quicker row may be late more often.
    """
    kept: list[FleetRow] = []
    quickest_hours = inf
    for row in sorted(rows, key=lambda row: (row.replays.usd, row.replays.hours)):
        if row.replays.hours < quickest_hours or row is best:
            kept.append(row)
        quickest_hours = min(quickest_hours, row.replays.hours)
    return [
        replace(row, number=number, why_not="" if row is best else row.why_not or _why_not(row, best, job))
        for number, row in enumerate(kept, 1)
    ]


def _why_not(row: FleetRow, best: FleetRow | None, job: Job) -> str:
    if not row.in_time and job.budget.deadline is not None:
        met = f"{row.replays.met} of {row.replays.starts} replays"
        return f"past the deadline of {duration(job.budget.deadline)} ({met} meet it)"
    if best is None:
        return ""
    which = "the cheapest" if job.budget.deadline is None else "the cheapest in time"
    return f"${row.replays.usd - best.replays.usd:,.2f} more than {which}"


def _why_on_demand(job: Job) -> str:
    if not is_spot_open(job):
        return ""
    refusal = why_never_on_spot(job)
    if refusal is not None:
        return refusal[0]
    return "" if job.recovery.controller_stays_up else ASLEEP


def _nothing_fits(
    job: Job, workdir: Path | None, market: CurrentMarket, reasons: Sequence[str]
) -> PlacementError | BudgetError:
    """Return the error of a job without candidates: the hourly limit is too low, or no GPU on offer can run it."""
    unlimited = job.model_copy(update={"budget": job.budget.model_copy(update={"max_hourly": None})})
    dearer, _ = candidates(unlimited, workdir, market.view.offers, market.view)
    if job.budget.max_hourly is not None and dearer:
        least = min(dearer, key=lambda candidate: candidate.choice.listed_micro_usd_per_hour)
        micro_usd = least.choice.listed_micro_usd_per_hour
        return BudgetError(
            f"no fleet is within budget.max_hourly {hourly(job.budget.max_hourly)}; the cheapest hour is that of "
            f"{text_of(least.fleet, least.choice.nodes)}, {hourly(micro_usd)}; use --max-hourly "
            f"{ceil(micro_usd / MICRO)}"
        )
    example = f", for example: {reasons[-1]}" if reasons else ""
    return PlacementError(
        f"no GPU that {job.infra} offers and the job allows can run it{example}; `spotrl catalog show` lists all"
    )


def _too_tight(job: Job, every: Sequence[Candidate]) -> str:
    """Return the error text for a job none of whose fleets was replayed to its target."""
    cheapest = min(every, key=lambda candidate: candidate.usd)
    nodes, hours = text_of(cheapest.fleet, cheapest.choice.nodes), cheapest.hours
    best = f"the cheapest by forecast, {nodes}, takes ${cheapest.usd:,.2f} and {hours:.0f} h"
    if hours * HOUR_MS > LONGEST_IDEAL_MS:
        return (
            f"the fleets cannot be compared: runs of over {LONGEST_IDEAL_MS // HOUR_MS} h are not replayed, and "
            f"{best}; name the nodes, like --set resources.trainer.accelerators={cheapest.fleet.trainer} --set "
            f"resources.rollout.num_nodes={cheapest.choice.nodes}"
        )
    limits = {"--max-total": job.budget.max_total, "--deadline": job.budget.deadline}
    given = " or ".join(flag for flag, limit in limits.items() if limit is not None) or "--max-hourly"
    return f"no fleet reaches the target within the limits; {best}; raise {given}"


def fleet_lines(fleets: Fleets) -> Iterator[str]:
    """Yield the front with its reasons, and what was compared, for --explain."""
    yield f"  plans ({fleets.fleets} fleets compared by forecast, {fleets.replayed} replayed; {NOT_SEARCHED}):"
    for row in fleets.front:
        cost, time_ms = f"${row.replays.usd:,.2f}", round(row.replays.hours * HOUR_MS)
        low, high = f"${row.replays.usd_low:,.2f}", f"${row.replays.usd_high:,.2f}"
        spread, why = f"{low} to {high} in {row.replays.starts} replays", row.why_not or "the cheapest in time"
        yield f"    {row.number} {row.text}: {cost} ({spread}), {duration(time_ms)}: {why}"
