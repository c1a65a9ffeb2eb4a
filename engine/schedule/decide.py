"""Decide what the trainer does next: train a unit, help with rollouts, or wait.

    a complete unit     -> Train(groups)
    no images wait that the trainer's weights may sample
                        -> Wait
    help `off`          -> Wait, or Help if no rollout GPU exists
    help `greedy`, `feedback`
                        -> Help
    help `search`       -> roll the schedule forward for several amounts of help; keep the best plan until a unit trains

Invariant: an answer of Wait means that a rollout GPU is at work or will be, so nobody waits for ever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from engine.schedule.state import State
from engine.schedule.values import Knobs, Rates

MARGIN = 0.03
"""Gain of a batch below which a plan of help is not begun: rates that are 20 % wrong promise gains that do not come.
The margin counts once for a plan, not for each of its leases (research notes pipeline 2d)."""


@dataclass(frozen=True, slots=True)
class Train:
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Help:
    """Sample one lease on each trainer GPU. `left`: further leases of the plan; None: no plan."""

    left: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for rollouts. `left`: the plan to keep; None: no plan."""

    left: int | None = None


Action = Train | Help | Wait

Finish = Callable[[Rates, State, Knobs, int], float]
"""(rates, state, knobs, leases of help) -> the moment at which the batch is trained."""


def next_action(rates: Rates, state: State, knobs: Knobs, finish: Finish) -> Action:
    """Return what the trainer does next. Rates that are unusable lead to `feedback`, which needs none."""
    if groups := state.ready(knobs.unit):
        return Train(groups)
    if not state.may_help():
        return Wait()
    if not state.gpus.rollout:
        return Help()
    if knobs.help == "off":
        return Wait()
    if knobs.help != "search" or rates.problems():
        return Help()
    if state.help_left is None:
        state_left = _leases_of_help(rates, state, knobs, finish)
        return Help(state_left - 1) if state_left else Wait(0)
    return Help(state.help_left - 1) if state.help_left else Wait(0)


def _leases_of_help(rates: Rates, state: State, knobs: Knobs, finish: Finish) -> int:
    """Return the number of leases with the earliest end of the batch, 0 if help gains less than the margin."""
    most = ceil(len(state.waiting) / (state.gpus.trainer * state.work.lease))
    without = finish(rates, state, knobs, 0)
    amounts = sorted({1, 2, 4, 8, most // 2, most} & set(range(1, most + 1)))
    ends = [(finish(rates, state, knobs, leases), leases) for leases in amounts]
    soonest, leases = min(ends)
    return leases if without - soonest > MARGIN * (without - state.now) else 0
