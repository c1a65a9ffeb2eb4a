"""Expected and measured seconds of a run's iterations, and the trainer's waiting by cause, as values and as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
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


def schedule_of(iterations: Sequence[Event]) -> ScheduleResult | None:
    """Return the schedule's result, or None if no iteration had a forecast. `iterations`: IterationDone events."""
    found = [event["schedule"] for event in iterations if "expected_seconds" in event.get("schedule", {})]
    if not found:
        return None

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
    )


def schedule_words(result: ScheduleResult | None) -> str:
    """Return a sentence on the schedule; empty for a run without a forecast."""
    if result is None:
        return ""
    return (
        f"Schedule: an iteration took {result.measured_seconds:.1f} s, expected {result.expected_seconds:.1f} s "
        f"(medians of {result.iterations}); the trainer waited {result.measured_waiting:.1f} s for rollouts, expected "
        f"{result.expected_waiting:.1f} s, sampled {result.helped:.1f} s and switched {result.switched:.1f} s."
    )
