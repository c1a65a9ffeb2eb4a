"""Time and money that the ranks of a trainer spend on collectives, and the time of every GPU of the trainer by phase.

Rank 0 measures its own collectives: exchanging gradients and weights, and waiting for the slowest rank. They are the
price of several ranks beside the training itself. Every rank reports its own time, so a GPU that waits is seen.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.events import Phase
from launcher.ledger.accounting import NodeCost
from launcher.money import HOUR_MS, dollars

Event = Mapping[str, Any]

TRAINER_ROLES = ("trainer", "ranks")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerTime:
    """Time of all GPUs of the trainer's nodes from their first sign of life, by phase. Shares sum to 1."""

    hours: float
    """Node-hours, on the run's clock."""
    share: Mapping[str, float]
    """Share of the GPU time by phase. A GPU without a rank is idle."""
    idle_share: Mapping[str, float]
    """The part of `share` in which a GPU neither sampled nor trained, by cause: `idle`, with nothing to sample or to
    train; `collective`, with gradients and weights, and waiting for the slowest rank."""


def trainer_time_of(nodes: Sequence[NodeCost]) -> TrainerTime | None:
    """Return the time of the trainer's GPUs, or None if none of its nodes was seen."""
    phase_ms: Counter[str] = Counter()
    for node in nodes:
        if node.role in TRAINER_ROLES:
            phase_ms.update(node.phase_ms)
    phase_ms.pop(Phase.COLD_START.value, None)
    whole = sum(phase_ms.values())
    if not whole:
        return None
    share = {phase: ms / whole for phase, ms in sorted(phase_ms.items(), key=lambda item: -item[1])}
    causes = (Phase.IDLE.value, Phase.COLLECTIVE.value)
    return TrainerTime(
        hours=whole / HOUR_MS, share=share, idle_share={cause: share[cause] for cause in causes if cause in share}
    )
