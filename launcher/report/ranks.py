"""Time and money that the ranks of a trainer spend on collectives: on exchanging gradients and weights, and on waiting.

Rank 0 measures its own collectives. They contain its waiting for the slowest rank, so they are the price of several
ranks beside the training itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.events import Phase
from launcher.money import dollars

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """Collectives of the trainer's ranks, over the iterations that had any. Medians, in wall seconds."""

    iterations: int
    seconds: float
    """Seconds of collectives in an iteration."""
    training_seconds: float
    """Seconds of training in the same iterations, without collectives."""
    micro_usd: int
    """Price of all collectives of the run."""


def collectives_of(iterations: Sequence[Event], micro_usd: int, clock_factor: float) -> Collectives | None:
    """Return the collectives of a run, or None for a trainer with one rank.

    iterations    IterationDone events; their phases are milliseconds of the run's clock
    micro_usd     price of all collectives of the run
    clock_factor  milliseconds of the engine's clock in a millisecond of wall time
    """
    phases = [event["phase_ms"] for event in iterations if event.get("phase_ms", {}).get(Phase.COLLECTIVE)]
    if not phases:
        return None

    def wall_seconds(phase: Phase) -> float:
        return float(median(one.get(phase, 0) for one in phases)) / 1000 / clock_factor

    return Collectives(
        iterations=len(phases),
        seconds=wall_seconds(Phase.COLLECTIVE),
        training_seconds=wall_seconds(Phase.TRAINING),
        micro_usd=micro_usd,
    )


def collectives_words(collectives: Collectives | None) -> str:
    """Return a sentence on the collectives; empty for a trainer with one rank."""
    if collectives is None:
        return ""
    return (
        f"Ranks of the trainer: an iteration had {collectives.seconds:.2f} s of collectives (gradients and weights "
        f"between ranks, and waiting for the slowest) beside {collectives.training_seconds:.2f} s of training (medians "
        f"of {collectives.iterations}); collectives cost {dollars(collectives.micro_usd)}."
    )
