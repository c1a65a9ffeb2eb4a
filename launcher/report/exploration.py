"""Exploration in a run, from the engine's events: the number of candidates, and the gain in reward spread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.money import dollars

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exploration:
    """Exploration of a whole run. Ranking and gains come from the last `Ranked` event (the last explored batches)."""

    candidates: int
    batches: int
    """Number of batches with seeds chosen from candidates."""
    control: int
    """Number of candidates that were not chosen but rolled out again, as a random control slice."""
    micro_usd: int
    """Part of the run's cost spent on exploration."""
    spearman: float | None
    low: float
    high: float
    corrected: bool
    predicted_gain: float | None
    realised_gain: float | None
    explores_on: bool


def exploration_of(iterations: Sequence[Event], ranked: Sequence[Event], micro_usd: int) -> Exploration | None:
    """Return the exploration of a run, or None if the run explored nothing.

    `iterations`: IterationDone events; `ranked`: Ranked events, newest last.
    """
    explored = [event["explored"] for event in iterations if event["explored"]]
    if not explored:
        return None
    last = ranked[-1] if ranked else {}
    return Exploration(
        candidates=sum(explored),
        batches=len(explored),
        control=sum(event["control"] for event in ranked),
        micro_usd=micro_usd,
        spearman=last.get("spearman"),
        low=last.get("low", -1.0),
        high=last.get("high", 1.0),
        corrected=last.get("corrected", False),
        predicted_gain=last.get("predicted_gain"),
        realised_gain=last.get("realised_gain"),
        explores_on=last.get("explores_on", True),
    )


def exploration_words(exploration: Exploration | None) -> str:
    """Return one or two sentences about the run's exploration."""
    if exploration is None:
        return "Exploration: none; each prompt's first seeds were trained."
    text = f"Exploration: {exploration.candidates:,} candidates for {exploration.batches} batches"
    text += f", {dollars(exploration.micro_usd)} of the cost."
    if exploration.spearman is None:
        return f"{text} How well old weights rank seeds is not known yet."
    how = "corrected by a random control slice" if exploration.corrected else "uncorrected"
    interval = f"{exploration.low:.2f} to {exploration.high:.2f}"
    text += f" Old weights ranked seeds with a Spearman correlation of {exploration.spearman:.2f} ({interval}, {how})"
    if exploration.realised_gain is not None:
        gain = f"{exploration.realised_gain:.1f} times"
        text += f"; the rewards that were trained differed {gain} as much as a random choice's"
    if exploration.predicted_gain is not None:
        text += f" ({exploration.predicted_gain:.1f} was predicted)"
    return f"{text}." if exploration.explores_on else f"{text}. It was not worth it, and was switched off."
