"""Replay a plan over many starts: dollars, hours and misses of each policy, with intervals.

Starts are at equal distances of a recorded trace, or one generated market each. `seconds` bounds the time: fewer
starts ran then, and `Simulated.starts` says how many. Every number is replayed or simulated, and `market` says which.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from engine.events import Market
from launcher.decide.launch_history import MoveRules
from launcher.decide.reconcile import decide
from launcher.decide.work_left import WorkLeft
from launcher.market.spells import ZoneSpells
from launcher.money import HOUR_MS, duration
from launcher.placement.plan import PlacementError, Plan
from launcher.replay.baselines import BASELINES, TRAINER_POLICIES
from launcher.replay.generator import describe, generate
from launcher.replay.replay import LONGEST_MS, Policy, Replayed, replay
from launcher.replay.trace import Trace

POLICIES: Mapping[str, Policy] = {"ours": decide, **BASELINES, **TRAINER_POLICIES}

INTERVAL = 0.9
"""Share of the starts that an interval holds."""

ROOM = 2.0
"""A market is made for this many times the deadline, or the ideal time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Mean over starts, and the ends of the middle 90 % of them."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Range":
        ranked = sorted(values)
        cut = int(len(ranked) * (1 - INTERVAL) / 2)
        return cls(mean=fmean(ranked), low=ranked[cut], high=ranked[len(ranked) - 1 - cut])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMeans:
    """Means over the starts of a trainer on spot."""

    losses: float
    promotions: float
    """Losses after which a node that was up took the role."""
    lost_iterations: float
    """Iterations made again."""
    lost_dollars: float
    """Dollars of them, at the average price of an iteration."""
    without_trainer_hours: float
    """Time in which nodes were paid and none trained."""
    without_trainer_dollars: float

    @classmethod
    def of(cls, results: Sequence[Replayed], iterations: float) -> "TrainerMeans":
        lost = [result.trainer.lost_iterations for result in results]
        each = [result.micro_usd / 1e6 / (iterations + again) for result, again in zip(results, lost, strict=True)]
        return cls(
            losses=fmean(r.trainer.losses for r in results),
            promotions=fmean(r.trainer.promotions for r in results),
            lost_iterations=fmean(lost),
            lost_dollars=fmean(again * usd for again, usd in zip(lost, each, strict=True)),
            without_trainer_hours=fmean(r.trainer.without_trainer_ms / HOUR_MS for r in results),
            without_trainer_dollars=fmean(r.trainer.without_trainer_micro_usd / 1e6 for r in results),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResult:
    """The starts of one policy."""

    policy: str
    starts: int
    dollars: Range
    hours: Range
    finished: int
    misses: int
    """Starts that were not done at the deadline; unfinished starts without one."""
    preemptions: float
    on_demand_dollars: float
    """Mean dollars of on-demand rollout nodes: stand-ins, or the whole plan."""
    ms: tuple[int | None, ...] = ()
    """Duration of each start; None: not done. Empty in results of older versions."""
    trainer: TrainerMeans | None = None
    """None: the trainer is on demand, and in results of older versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The result of a simulation."""

    market: str
    """What the market was: a recording, or the rule of a generated one."""
    starts: int
    asked_starts: int
    ideal_ms: int
    deadline_ms: int | None
    policies: tuple[PolicyResult, ...]
    example: tuple[tuple[int, int, int], ...]
    """The fleet of the first start of the first policy: (ms, spot nodes at work, on-demand nodes at work)."""
    example_ms: int


Markets = Callable[[int], tuple[Trace, int]]
"""The market of a start, and the start within it in milliseconds."""

Keep = Callable[[str, int, Replayed, Trace, int], None]
"""(policy, number of the start, result, market, start within it in milliseconds)."""


def work_of(plan: Plan) -> WorkLeft:
    """Return the work of a plan. Raises PlacementError for a plan without predicted times (the local infra)."""
    if not plan.pace_ms:
        raise PlacementError("the plan predicts no iteration times; simulate a job on clouds (--infra aws,gcp)")
    return WorkLeft(iterations=plan.iterations, done=0.0, iteration_ms=plan.pace_ms, saved_every=plan.checkpoint_every)


def generated_markets(plan: Plan, zones: Sequence[ZoneSpells], deadline_ms: int | None) -> tuple[Markets, str]:
    """Return markets by rule for the spot zones of the plan's region, one for each start."""
    work = work_of(plan)
    hours = ROOM * max(deadline_ms or 0, work.left_ms(0)) / HOUR_MS
    on_spot = work.nodes + sum(s.role == "trainer" and s.placement.market is Market.SPOT for s in plan.slots)
    return (lambda start: (generate(zones, hours, on_spot, start), 0)), f"generated: {describe(zones)}"


def recorded_markets(plan: Plan, trace: Trace, starts: int, deadline_ms: int | None) -> tuple[Markets, str]:
    """Return starts at equal distances of a recording. Raises PlacementError if it lacks the plan's zones or length."""
    spot = [option.placement for option in plan.sites[0].rollout if option.placement.market is Market.SPOT]
    if not any(trace.pool_of(place.cloud, place.region, place.zone) for place in spot):
        zones = ", ".join(sorted({place.zone for place in spot})) or "none"
        there = ", ".join(pool.zone for pool in trace.pools)
        raise PlacementError(f"the trace has {there}, the plan has {zones}; use a trace of these zones, or --generate")
    needs_ms = deadline_ms or round(work_of(plan).left_ms(0))
    room_ms = trace.end_ms - needs_ms
    if room_ms < 0:
        raise PlacementError(
            f"the trace is {duration(trace.end_ms)} long, and a run may take {duration(needs_ms)}; use a longer trace, "
            "a shorter --deadline, or --generate"
        )
    return (lambda start: (trace, room_ms * start // max(1, starts - 1))), f"recorded: {trace.name}"


def simulate(
    plan: Plan,
    rules: MoveRules,
    markets: tuple[Markets, str],
    *,
    starts: int,
    policies: Sequence[str] = ("ours",),
    deadline_ms: int | None = None,
    ends_ms: int | None = None,
    longest_ms: int = LONGEST_MS,
    seconds: float | None = None,
    keep: Keep | None = None,
    known: list[Replayed] | None = None,
) -> Simulated:
    """Return the results of each policy on the same starts.

    `deadline_ms`, `ends_ms`, `longest_ms`: as of `replay`. `seconds`: begin no further start after
    this processor time. `keep`: called with each replay. `known`: results of the first starts of the only policy, by an
    earlier call that was equal but for `starts`; the new ones are added to it.
    """
    work, (market_of, what) = work_of(plan), markets
    begun = time.process_time()  # a busy machine runs as many starts as an idle one
    found: dict[str, list[Replayed]] = {name: [] for name in policies}
    if known is not None:
        found[policies[0]] = known
    for start in range(len(found[policies[0]]), starts):
        if start and seconds is not None and time.process_time() - begun > seconds * start / (start + 1):
            break  # one more start would probably end after the time
        trace, start_ms = market_of(start)
        for name in policies:
            result = replay(
                plan,
                rules,
                work,
                trace,
                start_ms,
                start,
                deadline_ms=deadline_ms,
                ends_ms=ends_ms,
                longest_ms=longest_ms,
                policy=POLICIES[name],
            )
            found[name].append(result)
            if keep is not None:
                keep(name, start, result, trace, start_ms)
    first = found[policies[0]][0]
    is_on_spot = any(slot.role == "trainer" and slot.placement.market is Market.SPOT for slot in plan.slots)
    return Simulated(
        market=what,
        starts=len(found[policies[0]]),
        asked_starts=starts,
        ideal_ms=round(work.left_ms(work.nodes)),
        deadline_ms=deadline_ms,
        policies=tuple(_result(name, results, deadline_ms, work, is_on_spot) for name, results in found.items()),
        example=first.fleet,
        example_ms=first.ms,
    )


def _result(
    name: str, results: Sequence[Replayed], deadline_ms: int | None, work: WorkLeft, is_on_spot: bool
) -> PolicyResult:
    late = [not r.reached or (deadline_ms is not None and r.ms > deadline_ms) for r in results]
    return PolicyResult(
        policy=name,
        starts=len(results),
        dollars=Range.of([r.micro_usd / 1e6 for r in results]),
        hours=Range.of([r.ms / HOUR_MS for r in results]),
        finished=sum(r.reached for r in results),
        misses=sum(late),
        preemptions=fmean(r.preemptions for r in results),
        on_demand_dollars=fmean(r.by_market.get("on_demand", 0) / 1e6 for r in results),
        ms=tuple(r.ms if r.reached else None for r in results),
        trainer=TrainerMeans.of(results, work.iterations) if is_on_spot else None,
    )
