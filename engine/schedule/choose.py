"""Choose the knobs of a schedule: play each allowed choice forward, and take the quickest.

A knob that gains less than `WORTH` stays as it is: what does not pay is never on. Rates that are unusable leave all
knobs at `SAFE` values, with the reason.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal

from engine.schedule.simulate import World, play, start
from engine.schedule.values import Gpus, Help, Knobs, Rates, Timeline, Work

WORTH = 0.02
"""Least gain for which a choice replaces a simpler one: rates are known to a few percent at best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """Values that knobs may have, the simplest first."""

    units: tuple[int, ...]
    rows: tuple[int, ...]
    helps: tuple[Help, ...] = ("off",)
    early: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """A choice of knobs. `timeline`: None if the rates are unusable; `why`: the reason."""

    knobs: Knobs
    timeline: Timeline | None
    why: str = ""


def units_of(work: Work) -> tuple[int, ...]:
    """Return sizes of units: the whole optimiser step, then halves, down to a group."""
    units, unit = [], work.groups_of_step
    while unit >= 1:
        units.append(unit)
        unit = -(-unit // 2) if unit > 1 else 0
    return tuple(units)


def predict(rates: Rates, work: Work, gpus: Gpus, knobs: Knobs, *, batches: int = 4, warm: int = 2) -> Timeline:
    """Return the forecast of a run's iterations. Raises ValueError for unusable rates."""
    if problems := rates.problems():
        raise ValueError("; ".join(problems))
    return play(World(rates, start(work, gpus), knobs), batches=batches, warm=warm)


def with_early(chosen: Best, rates: Rates, work: Work, gpus: Gpus, shares: tuple[float, ...]) -> Best:
    """Return `chosen`, or the same knobs with another share of early groups if that gains `WORTH`."""
    knobs = chosen.knobs
    allowed = Allowed(units=(knobs.unit,), rows=(knobs.rows,), helps=(knobs.help,), early=shares)
    return best(rates, work, gpus, allowed, chosen)


def choose(
    asked: Help | Literal["auto"],
    rates: Rates,
    work: Work,
    gpus: Gpus,
    *,
    units: tuple[int, ...],
    rows: int,
    early: float,
    searched: bool = True,
    beside: Best | None = None,
) -> Best:
    """Return the quickest knobs that a job allows: what a plan prints, and what a trainer does by its own rates.

    asked     `runtime.help`
    rows      most rows of a training pass
    early     share of early groups
    searched  False: play `feedback` where the job would search, because a search takes long to play
    beside    a choice to start from, as of `best`
    """
    helps: tuple[Help, ...] = ("off", "search" if searched else "feedback") if asked == "auto" else (asked,)
    return best(rates, work, gpus, Allowed(units=units, rows=(rows,), helps=helps, early=(early,)), beside)


def best(rates: Rates, work: Work, gpus: Gpus, allowed: Allowed, beside: Best | None = None) -> Best:
    """Return the quickest of the allowed knobs. A choice must gain `WORTH` over the choices before.

    `beside`: a choice to start from, instead of the first of the allowed values.
    """
    first = Knobs(unit=allowed.units[0], rows=allowed.rows[0], help=allowed.helps[0], early=allowed.early[0])
    if problems := rates.problems():
        return Best(knobs=first, timeline=None, why="; ".join(problems))
    chosen, timeline = first, predict(rates, work, gpus, first)
    if beside is not None and beside.timeline is not None:
        chosen, timeline = beside.knobs, beside.timeline
    for early, help_, rows, unit in product(allowed.early, allowed.helps, allowed.rows, allowed.units):
        knobs = Knobs(unit=unit, rows=rows, help=help_, early=early)
        if knobs not in (first, chosen):
            predicted = predict(rates, work, gpus, knobs)
            if predicted.seconds < timeline.seconds * (1 - WORTH):
                chosen, timeline = knobs, predicted
    return Best(knobs=chosen, timeline=timeline)
