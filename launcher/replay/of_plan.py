"""Replay a plan before it is bought: what it costs on generated markets, and how often it meets the deadline."""

from math import ceil, inf, sqrt
from statistics import NormalDist

from launcher.decide.launch_history import MoveRules
from launcher.exit_codes import BudgetError
from launcher.money import HOUR_MS, duration
from launcher.placement.cloud_plan import CloudPlan, PlanReplays, TrainerOnSpot
from launcher.replay.replay import Replayed
from launcher.replay.simulate import INTERVAL, Simulated, TrainerMeans, generated_markets, simulate, work_of

MOST_STARTS, LEAST_STARTS, NODE_HOURS = 30, 3, 360
"""Starts of a plan: as many as `NODE_HOURS` of replayed node time hold, within the two bounds. They take about two
seconds of processor time; equal plans get equal replays."""

IN_DOUBT = 4
"""A plan that would be refused is replayed this many times as often: few replays refuse a good plan too easily."""

LONGEST_IDEAL_MS = 100 * HOUR_MS
"""A plan that takes longer with every node at work is not replayed: that would take too long for a dry run."""

ROOM = 2
"""The replays of a plan with a deadline go on for this many times the deadline, or the time with every node at work if
that is longer, to see how late a late start is."""

STEP_MS = 600_000
"""A deadline that would be enough is named in steps of ten minutes."""


def replays_of(
    plan: CloudPlan,
    rules: MoveRules,
    confidence: float,
    starts: int | None = None,
    known: list[Replayed] | None = None,
) -> PlanReplays | None:
    """Replay a plan, and return what came of it. None: the plan predicts no iteration times, or takes too long.

    `confidence`: share of the starts that should meet the deadline. `starts`: of the replays; None: as many as two
    seconds hold, and more if they would refuse the plan. `known`: results of the plan's first starts, at most `starts`;
    the new ones are added to it.
    """
    known = [] if known is None else known
    bought = plan.as_plan()
    if not bought.pace_ms:
        return None
    deadline_ms = plan.deadline_ms
    work = work_of(bought)
    ideal_ms = work.left_ms(work.nodes)
    if ideal_ms > LONGEST_IDEAL_MS:
        return None
    ends_ms = plan.longest_ms if deadline_ms is None else ROOM * max(deadline_ms, round(ideal_ms))

    def replayed(number: int) -> Simulated:
        return simulate(
            bought,
            rules,
            generated_markets(bought, plan.zones, deadline_ms),
            starts=number,
            deadline_ms=deadline_ms,
            ends_ms=ends_ms,
            longest_ms=ends_ms or ROOM * round(work.left_ms(0)),
            known=known,
        )

    fitting = round(NODE_HOURS * HOUR_MS / (ideal_ms * (1 + work.nodes)))
    found = replayed(starts or min(MOST_STARTS, max(LEAST_STARTS, fitting)))
    if starts is None and deadline_ms is not None and not _meets(found, confidence):
        found = replayed(min(MOST_STARTS, IN_DOUBT * found.starts))
    (ours,) = found.policies
    met = None if deadline_ms is None else found.starts - ours.misses
    low, high = (None, None) if met is None else wilson(met, found.starts)
    done_ms = sorted(inf if ms is None else ms for ms in ours.ms)[max(0, ceil(confidence * found.starts) - 1)]
    return PlanReplays(
        market=found.market,
        starts=found.starts,
        usd=ours.dollars.mean,
        usd_low=ours.dollars.low,
        usd_high=ours.dollars.high,
        hours=ours.hours.mean,
        met=met,
        probability_low=low,
        probability_high=high,
        trainer=None if ours.trainer is None else _on_spot(ours.trainer),
        enough_ms=None if done_ms == inf else ceil(done_ms / STEP_MS) * STEP_MS,
    )


def _on_spot(means: TrainerMeans) -> TrainerOnSpot:
    return TrainerOnSpot(
        losses=means.losses,
        promotions=means.promotions,
        lost_iterations=means.lost_iterations,
        lost_usd=means.lost_dollars,
        without_trainer_seconds=means.without_trainer_hours * 3600,
        without_trainer_usd=means.without_trainer_dollars,
    )


def _meets(found: Simulated, confidence: float) -> bool:
    return found.starts - found.policies[0].misses >= confidence * found.starts


def wilson(hits: int, tries: int) -> tuple[float, float]:
    """Return the 90 % interval of a probability after `hits` of `tries`.

    Wilson's score interval (1927): it stays within 0 and 1, and is not empty after tries that all hit.
    """
    z = NormalDist().inv_cdf((1 + INTERVAL) / 2)
    share = hits / tries
    middle = (share + z * z / (2 * tries)) / (1 + z * z / tries)
    half = z / (1 + z * z / tries) * sqrt(share * (1 - share) / tries + z * z / (4 * tries * tries))
    return max(0.0, middle - half), min(1.0, middle + half)


def check_deadline(plan: CloudPlan, confidence: float) -> None:
    """Refuse a plan whose replays meet the deadline too rarely. Raises BudgetError with a deadline that is enough."""
    replays = plan.replays
    if replays is None or replays.met is None or plan.deadline_ms is None:
        return
    if replays.met >= confidence * replays.starts:
        return
    remedy = "" if replays.enough_ms is None else f"use --deadline {duration(replays.enough_ms)}, "
    raise BudgetError(
        f"{replays.met} of {replays.starts} replays of the plan meet the deadline of {duration(plan.deadline_ms)} "
        f"(probability {replays.probability_low:.0%} to {replays.probability_high:.0%}), and "
        f"budget.deadline_confidence asks for {confidence:.0%}; {remedy}more nodes (resources.rollout.num_nodes), or "
        "--set budget.deadline_confidence=0"
    )
