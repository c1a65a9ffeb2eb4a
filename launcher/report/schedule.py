"""Expected and measured seconds of iterations, the trainer's waiting by cause, and what came of early groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleResult:
    """The schedule's forecast beside the facts, over the iterations that had a forecast. Medians, in wall seconds."""

    iterations: int
    expected_seconds: float
    measured_seconds: float
    expected_waiting: float
    """Seconds in which the trainer waits for rollouts."""
    measured_waiting: float
    helped: float
    """Seconds in which the trainer sampled."""
    switched: float
    """Seconds from the end of help until the trainer was free."""
    expected_stale_share: float | None = None
    """Share of the groups that were to be sampled one version early. None: a job without early groups."""
    stale_share: float | None = None
    """Share of the groups that were, as a mean."""
    early_outside_share: float | None = None
    """Share of their training rows outside the clip range, as a mean. None: no such row."""


def schedule_of(iterations: Sequence[Event]) -> ScheduleResult | None:
    """Return the schedule's result, or None if no iteration had a forecast. `iterations`: IterationDone events."""
    forecast = [event for event in iterations if "expected_seconds" in event.get("schedule", {})]
    found = [event["schedule"] for event in forecast]
    if not found:
        return None
    health = [event.get("health", {}) for event in forecast]
    expected = [one["expected_stale_share"] for one in found if "expected_stale_share" in one]
    outside = [one["early_outside_share"] for one in health if "early_outside_share" in one]

    def middle(name: str) -> float:
        return median(float(one[name]) for one in found)

    return ScheduleResult(
        iterations=len(found),
        expected_seconds=middle("expected_seconds"),
        measured_seconds=middle("seconds"),
        expected_waiting=middle("expected_waiting"),
        measured_waiting=middle("waited_seconds"),
        helped=middle("helped_seconds"),
        switched=middle("switch_seconds"),
        expected_stale_share=fmean(expected) if expected else None,
        stale_share=fmean(one.get("stale_share", 0.0) for one in health) if expected else None,
        early_outside_share=fmean(outside) if outside else None,
    )


def schedule_words(result: ScheduleResult | None) -> str:
    """Return a sentence on the schedule; empty for a run without a forecast."""
    if result is None:
        return ""
    return (
        f"Schedule: an iteration took {result.measured_seconds:.1f} s, expected {result.expected_seconds:.1f} s "
        f"(medians of {result.iterations}); the trainer waited {result.measured_waiting:.1f} s for rollouts, expected "
        f"{result.expected_waiting:.1f} s, sampled {result.helped:.1f} s and switched {result.switched:.1f} s."
        + _early_words(result)
    )


def _early_words(result: ScheduleResult) -> str:
    if result.stale_share is None or result.expected_stale_share is None:
        return ""
    words = f" Early groups: {result.stale_share:.0%} of the groups, expected {result.expected_stale_share:.0%}"
    if result.early_outside_share is not None:
        words += f"; {result.early_outside_share:.0%} of their training rows were outside the clip range"
    return words + "."
