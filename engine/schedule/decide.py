"""Decide what the trainer does next: train a unit, help with rollouts, or wait.

    a complete unit     -> Train(groups)
    no images wait that the trainer's weights may sample
                        -> Wait
    help `off`          -> Wait, or Help if no rollout GPU exists
    help `greedy`, `feedback`
                        -> Help
    help `search`       -> roll the schedule forward for several amounts of help; keep the best plan until a unit trains

A plan of help stops for a complete unit, or goes ahead: its leases come before any training, which pays where a switch
is dear.

Invariant: an answer of Wait means that a rollout GPU is at work or will be, so nobody waits for ever.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from engine.schedule.state import State
from engine.schedule.values import Knobs, Rates

MARGIN = 0.03
"""Gain of a batch below which a plan of help is not begun: rates that are 20 % wrong promise gains that do not come.
The margin counts once for a plan, not for each of its leases: simulated, margins of single decisions add up
and cost half of the gain."""


MOST_SEARCHED = 1024
"""Waiting images above which no plan is searched: a decision must take less time than a denoising step."""


@dataclass(frozen=True, slots=True)
class Train:
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Help:
    """Sample one lease on each trainer GPU that can sample.

    `left`: further leases of the plan; None: no plan. `ahead`: the leases of the plan come before any training.
    """

    left: int | None = None
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for rollouts. `left`: the plan to keep; None: no plan."""

    left: int | None = None


Action = Train | Help | Wait

Finish = Callable[[Rates, State, Knobs, int, bool], float]
"""(rates, state, knobs, leases of help, ahead of training) -> the moment at which the batch is trained."""


def next_action(rates: Rates, state: State, knobs: Knobs, finish: Finish) -> Action:
    """Return what the trainer does next. Rates or facts that are unusable lead to `feedback`, which needs none."""
    if state.help_ahead and state.help_left and state.may_help():
        return Help(state.help_left - 1, ahead=True)
    if groups := state.ready(knobs.unit):
        return Train(groups)
    if not state.may_help():
        return Wait()
    if not state.gpus.rollout:
        return Help()
    if knobs.help == "off":
        return Wait()
    if knobs.help != "search" or rates.problems() or state.problems() or len(state.waiting) > MOST_SEARCHED:
        return Help()
    if state.help_left is None:
        leases, ahead = _leases_of_help(rates, state, knobs, finish)
        return Help(leases - 1, ahead) if leases else Wait(0)
    return Help(state.help_left - 1) if state.help_left else Wait(0)


def _leases_of_help(rates: Rates, state: State, knobs: Knobs, finish: Finish) -> tuple[int, bool]:
    """Return the number of leases with the earliest end of the batch, and whether they go ahead of training.

    0 leases if help gains less than the margin.
    """
    most = ceil(len(state.waiting) / (state.gpus.helping * state.work.lease))
    without = finish(rates, state, knobs, 0, False)
    amounts = sorted({1, 2, 4, 8, most // 8, most // 4, 3 * most // 8, most // 2, most} & set(range(1, most + 1)))
    worth = MARGIN * (without - state.now)
    chosen, end = (0, False), without
    for ahead in (False, True) if rates.switch.value else (False,):  # without a switch, stopping costs nothing
        soonest, leases = min((finish(rates, state, knobs, leases, ahead), leases) for leases in amounts)
        if end - soonest > worth:
            chosen, end = (leases, ahead), soonest
    return chosen
