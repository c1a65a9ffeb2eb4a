"""Target: when a run's curve of evaluations reached a score, and what each bit of the way cost. Pure.

One lucky evaluation is not a result. A score is *smoothed* over its last evaluations, and a target is reached
when the smoothed score has been at or above it for `hold` evaluations in a row. Dollars and hours are counted
up to the last of those, the moment at which it was known: the proof is paid for too. An evaluation in which a guard
of the target does not hold counts as one below the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

WINDOW = 3
"""Evaluations that the smoothed score is the mean of; the first ones have fewer behind them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation, and what the run had spent when it was made."""

    iteration: int
    at_ms: int
    score: float
    micro_usd: int
    guards_hold: bool = True
    """Whether every guard of the target held; the target counts as reached only where all did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """An evaluation with the mean of itself and the ones before it."""

    iteration: int
    at_ms: int
    score: float
    smoothed: float
    micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """When a score was crossed: `first` by a single evaluation, `confirmed` by the smoothed score, held."""

    first: Point | None
    confirmed: Point | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """From one best smoothed score to the next: what was spent in between."""

    from_score: float
    to_score: float
    from_iteration: int
    to_iteration: int
    micro_usd: int
    micro_usd_per_hundredth: int
    """Micro-dollars per +0.01."""


def smoothed(curve: Sequence[Evaluation]) -> tuple[Point, ...]:
    """The curve with the mean of the last `WINDOW` scores at each evaluation.

    The mean is exact before it is rounded, so three scores of 0.7 are at 0.7 and not a hair below it.
    """
    return tuple(
        Point(
            iteration=here.iteration,
            at_ms=here.at_ms,
            score=here.score,
            smoothed=mean(past.score for past in curve[max(0, number + 1 - WINDOW) : number + 1]),
            micro_usd=here.micro_usd,
        )
        for number, here in enumerate(curve)
    )


def crossing(curve: Sequence[Evaluation], value: float, hold: int = 3) -> Crossing:
    """When the curve first touched `value`, and when it was confirmed to be there."""
    points = smoothed(curve)
    held = [evaluation.guards_hold for evaluation in curve]
    first = next((point for point, guarded in zip(points, held, strict=True) if guarded and point.score >= value), None)
    in_a_row = 0
    for point, guarded in zip(points, held, strict=True):
        in_a_row = in_a_row + 1 if guarded and point.smoothed >= value else 0
        if in_a_row >= hold:
            return Crossing(first=first, confirmed=point)
    return Crossing(first=first, confirmed=None)


def best(curve: Sequence[Evaluation]) -> Point | None:
    """The evaluation with the highest smoothed score; the earliest of equals."""
    return max(smoothed(curve), key=lambda point: (point.smoothed, -point.iteration), default=None)


def dollars_per_gain(curve: Sequence[Evaluation], step: float = 0.01) -> tuple[Gain, ...]:
    """What +0.01 cost along the curve: from each smoothed score to the next that is at least `step` higher.

    Money spent while the score went sideways is in the price of the next gain. What is left of the climb, up to
    the best smoothed score, is the last gain; so the gains tell all that was spent between the first evaluation
    and the best one.
    """
    points = smoothed(curve)
    highest = best(curve)
    if highest is None:
        return ()
    stops = [points[0]]
    for point in points[1:]:
        if point.smoothed - stops[-1].smoothed >= step:
            stops.append(point)
    if highest.smoothed > stops[-1].smoothed:
        stops.append(highest)
    return tuple(
        Gain(
            from_score=last.smoothed,
            to_score=here.smoothed,
            from_iteration=last.iteration,
            to_iteration=here.iteration,
            micro_usd=here.micro_usd - last.micro_usd,
            micro_usd_per_hundredth=round((here.micro_usd - last.micro_usd) * 0.01 / (here.smoothed - last.smoothed)),
        )
        for last, here in pairwise(stops)
    )
