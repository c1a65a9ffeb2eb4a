"""Curves of evaluations made by hand."""

from collections.abc import Sequence

from launcher.report.target import Evaluation, Point, smoothed


def a_curve(*scores: float, dollars: float = 1) -> list[Evaluation]:
    """Return a curve with one evaluation per iteration. `dollars`: spent between two evaluations."""
    return [
        Evaluation(iteration=number, at_ms=number, score=score, micro_usd=round(number * dollars * 1_000_000))
        for number, score in enumerate(scores)
    ]


def points(*scores: float, dollars: float = 1) -> Sequence[Point]:
    """Return the same with smoothed scores."""
    return smoothed(a_curve(*scores, dollars=dollars))
