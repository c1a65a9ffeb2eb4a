"""The cost of a point: +.01 of the smoothed score. The last point, a forecast for the next, and when a point costs too
much. Pure.

The last point runs from the moment at which the best smoothed score so far was .01 lower to the newest evaluation. The
best so far counts, so a score that goes up and down by chance gains nothing. Between two evaluations the dollars are
divided in proportion to the gain. The money after the newest evaluation belongs to no point yet.

The forecast is the slope of a least-squares line through score and dollars of the last evaluations. Its range is two
standard errors of the slope to each side: s / sqrt(Sxx) with s^2 = RSS / (n - 2) (Draper and Smith, Applied Regression
Analysis, chapter 1). The line goes through the scores as measured, not as smoothed: smoothed scores share evaluations,
and the formula needs independent errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import mean
from typing import Protocol

from launcher.job.agreement import IN_A_ROW, LEAST_EVALUATIONS

FORECAST_EVALUATIONS = 8
"""Evaluations in the line of the shown forecast."""

SPANNED_LIMITS = 2
"""The line that may end a run spans this many times the limit in dollars, if the run has spent so much.

Simulated with a noise of .01 in each score and an evaluation for .05 to 1 times the limit: none of 1,600 runs whose
points cost half the limit is ended in 80 evaluations; the last point alone as the rule ends up to 60 %. A run that
gains nothing any more is ended after 1.7 to 3.3 times the limit (median), and 7 times at one evaluation a limit."""

STANDARD_ERRORS = 2.0

POINT = 0.01


class Scored(Protocol):
    """An evaluation: its score, its smoothed score, and the micro-dollars of the run's nodes until then."""

    @property
    def score(self) -> float: ...

    @property
    def smoothed(self) -> float: ...

    @property
    def micro_usd(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PointCost:
    """The cost of +.01 of the smoothed score up to the newest evaluation, in micro-dollars of the run's nodes."""

    evaluations: int = 0
    """Evaluations so far."""
    last_micro_usd: int | None = None
    """Spent since the best smoothed score was .01 lower. None: `why_no_last`."""
    since_gain_micro_usd: int | None = None
    """The part of it since the best smoothed score was reached; 0 while the score rises. None before the first
    evaluation."""
    next_micro_usd: int | None = None
    """Forecast for the next +.01. None: `why_no_next`."""
    next_low_micro_usd: int | None = None
    """The forecast with a slope of two standard errors more. None: no forecast."""
    next_high_micro_usd: int | None = None
    """The forecast with a slope of two standard errors less. None: no forecast, or no upper end."""
    why_no_last: str = ""
    why_no_next: str = ""


NOT_EVALUATED = PointCost(why_no_last="not evaluated yet", why_no_next="not evaluated yet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slope:
    """The rise of the score per micro-dollar, and its standard error."""

    per_micro_usd: float
    error: float


def point_cost(points: Sequence[Scored]) -> PointCost:
    """Return the cost of the last point and the forecast for the next. `points`: all evaluations, oldest first."""
    count = len(points)
    if not points:
        return NOT_EVALUATED
    since_gain = points[-1].micro_usd - _best(points).micro_usd
    if count < LEAST_EVALUATIONS:
        few = f"{count} of the {LEAST_EVALUATIONS} evaluations that it takes"
        return PointCost(evaluations=count, since_gain_micro_usd=since_gain, why_no_last=few, why_no_next=few)
    began = _began(points)
    last = None if began is None else points[-1].micro_usd - began
    why_no_last = "" if began is not None else f"the score has not risen by {POINT:g} yet"
    line = points[-FORECAST_EVALUATIONS:]
    slope = slope_of(line)
    if slope is None or slope.per_micro_usd <= 0:
        why = "cost nothing" if slope is None else "show no rise"
        return PointCost(
            evaluations=count,
            last_micro_usd=last,
            since_gain_micro_usd=since_gain,
            why_no_last=why_no_last,
            why_no_next=f"the last {len(line)} evaluations {why}",
        )
    spread = STANDARD_ERRORS * slope.error
    slowest = slope.per_micro_usd - spread
    return PointCost(
        evaluations=count,
        last_micro_usd=last,
        since_gain_micro_usd=since_gain,
        next_micro_usd=round(POINT / slope.per_micro_usd),
        next_low_micro_usd=round(POINT / (slope.per_micro_usd + spread)),
        next_high_micro_usd=round(POINT / slowest) if slowest > 0 else None,
        why_no_last=why_no_last,
    )


def too_dear(points: Sequence[Scored], limit: int) -> int | None:
    """Return the micro-dollars that a point costs if it costs more than `limit` at the last `IN_A_ROW` evaluations.

    None: a point is worth its money, or there is too little evidence. A point costs more than the limit at an
    evaluation if more was spent since the best smoothed score was .01 lower (or since the first evaluation), and the
    forecast with a slope of two standard errors more is above the limit too.
    """
    counts = range(len(points) - IN_A_ROW + 1, len(points) + 1)
    if counts[0] < LEAST_EVALUATIONS or not all(_is_too_dear(points[:count], limit) for count in counts):
        return None
    return _spent_for_last(points)


def _is_too_dear(points: Sequence[Scored], limit: int) -> bool:
    if _spent_for_last(points) <= limit:
        return False
    from_micro_usd = points[-1].micro_usd - SPANNED_LIMITS * limit
    first = max((number for number, point in enumerate(points) if point.micro_usd <= from_micro_usd), default=0)
    slope = slope_of(points[min(first, len(points) - LEAST_EVALUATIONS) :])
    return slope is not None and (slope.per_micro_usd + STANDARD_ERRORS * slope.error) * limit < POINT


def _spent_for_last(points: Sequence[Scored]) -> int:
    began = _began(points)
    return points[-1].micro_usd - (points[0].micro_usd if began is None else began)


def _best(points: Sequence[Scored]) -> Scored:
    """Return the first evaluation with the highest smoothed score."""
    return max(points, key=lambda point: point.smoothed)


def _began(points: Sequence[Scored]) -> int | None:
    """Return the micro-dollars spent when the best smoothed score so far was .01 lower; None if it never was."""
    goal = round(_best(points).smoothed - POINT, 12)  # .21 - .01 is not .2 in floating point
    if points[0].smoothed > goal:
        return None
    best = points[0].smoothed
    for previous, point in pairwise(points):
        if point.smoothed > goal:
            share = (goal - best) / (point.smoothed - best)
            return round(previous.micro_usd + share * (point.micro_usd - previous.micro_usd))
        best = max(best, point.smoothed)
    raise AssertionError("the best score is above the goal")


def slope_of(points: Sequence[Scored]) -> Slope | None:
    """Return the least-squares slope of score over dollars, and its standard error. None if no money was spent.

    `points`: at least three evaluations.
    """
    spent, scores = [point.micro_usd for point in points], [point.score for point in points]
    middle, level = mean(spent), mean(scores)
    spread = sum((micro_usd - middle) ** 2 for micro_usd in spent)
    if spread == 0:
        return None
    pairs = list(zip(spent, scores, strict=True))
    slope = sum((micro_usd - middle) * (score - level) for micro_usd, score in pairs) / spread
    rest = sum((score - level - slope * (micro_usd - middle)) ** 2 for micro_usd, score in pairs)
    return Slope(per_micro_usd=slope, error=sqrt(rest / (len(points) - 2) / spread))
