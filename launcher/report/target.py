"""Find the evaluation at which a run reached its target, and the cost of each part of the climb. Pure.

One lucky evaluation is not a result. A score is *smoothed* over the last evaluations, and a target is reached when
the smoothed score is at or above the target for `hold` evaluations in a row. Dollars and hours are counted up to the
last evaluation of the row, because the evidence costs money too. An evaluation with a violated guard counts as below
the target.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import mean

from engine.config import DRIFT

REWARD = "reward"
"""The metric that evaluations have whatever the scorer."""

WINDOW = 3
"""Number of evaluations in the mean of a smoothed score. The first evaluations have fewer predecessors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation, and the run's spending (micro-dollars) up to the evaluation."""

    iteration: int
    at_ms: int
    score: float
    micro_usd: int
    guards_hold: bool = True
    """True if every guard of the target held. An evaluation counts towards the target only if all guards held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """An evaluation with its smoothed score: the mean of its own score and the previous scores."""

    iteration: int
    at_ms: int
    score: float
    smoothed: float
    micro_usd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """Crossings of a target. `first`: by a single evaluation. `confirmed`: by the smoothed score, held long enough."""

    first: Point | None
    confirmed: Point | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """A rise of the smoothed score, and the micro-dollars spent during the rise."""

    from_score: float
    to_score: float
    from_iteration: int
    to_iteration: int
    micro_usd: int
    micro_usd_per_hundredth: int
    """Micro-dollars per +0.01."""


def shown_metric(target: str | None, names: Iterable[str]) -> str:
    """Return the metric that stands for a run's progress: the target's, or the reward of a run without a target.

    `names`: metrics of the run's evaluations. One of them is shown if they have no reward.
    """
    if target:
        return target
    found = sorted(set(names) - {DRIFT})
    return REWARD if REWARD in found or not found else found[0]


def smoothed(curve: Sequence[Evaluation]) -> tuple[Point, ...]:
    """Return the curve with the mean of the last `WINDOW` scores at each evaluation.

    The mean is computed exactly and then rounded, so three scores of 0.7 have the mean 0.7, not slightly less.
    """
    return tuple(
        Point(
            iteration=here.iteration,
            at_ms=here.at_ms,
            score=here.score,
            smoothed=exact_mean(tuple(past.score for past in curve[max(0, number + 1 - WINDOW) : number + 1])),
            micro_usd=here.micro_usd,
        )
        for number, here in enumerate(curve)
    )


@lru_cache(maxsize=8192)
def exact_mean(scores: tuple[float, ...]) -> float:
    """Return the mean, computed as a fraction. That is slow, and a report smooths the same curve several times."""
    return mean(scores)


def crossing(curve: Sequence[Evaluation], value: float, hold: int = 3) -> Crossing:
    """Return the first evaluation at or above `value`, and the evaluation confirming the target."""
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
    """Return the evaluation with the highest smoothed score, the earliest of equals; None for an empty curve."""
    return max(smoothed(curve), key=lambda point: (point.smoothed, -point.iteration), default=None)


def dollars_per_gain(curve: Sequence[Evaluation], step: float = 0.01) -> tuple[Gain, ...]:
    """Return the cost of +0.01 along the curve. A gain ends at the next smoothed score at least `step` higher.

    Money spent without a rise is part of the next gain's cost. The last gain is the rest of the climb, up to the best
    smoothed score. The gains sum to all money spent between the first and the best evaluation.
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
