"""Budget guard: decide whether a node may be bought, and whether the run must stop now.

before each purchase: metered + reserved + worst case of the new node <= max_total, and $/h <= max_hourly
every pass: drain when metered + reserved reaches max_total
on every node: a spend deadline, for the case that no controller is left

The promise: in any order of events a run spends at most `max_total` plus one allowance (the cost of its nodes during
a stop), and `overdraft` prints the allowance. Pure. Amounts are integers, rounded up.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.money import HOUR_MS, dollars, hourly


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Spending limits of a run, or of all runs together.

    None: no limit. A job on a real cloud always sets both of its own limits.
    """

    max_total: int | None
    max_hourly: int | None


NO_LIMITS = Limits(max_total=None, max_hourly=None)

RELEASE_ALLOWANCE_MS = 300_000
"""Longest time of a stop on a real cloud, including the engine's last messages. Clouds take minutes to terminate a
node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The reason against a purchase. `for_good`: waiting does not help, because spent money stays spent."""

    text: str
    for_good: bool


def worst_case(micro_usd_per_hour: int, duration_ms: int) -> int:
    """Return the most that a node can cost in a time, in micro-dollars. Rounded up, to err on the safe side."""
    return -(-micro_usd_per_hour * max(0, duration_ms) // HOUR_MS)


def reserved(micro_usd_per_hour: int, allowance_ms: int, pending: Iterable[int] = ()) -> int:
    """Return the committed money: stopping the live nodes takes `allowance_ms`, and pending launches may be billed.

    `pending` holds the worst case of each requested node without a billing fact.
    """
    return worst_case(micro_usd_per_hour, allowance_ms) + sum(pending)


def may_buy(
    *,
    metered: int,
    reserved: int,
    worst_case_new: int,
    max_total: int | None,
    hourly_now: int,
    hourly_new: int,
    max_hourly: int | None,
    section: str = "budget",
) -> Refusal | None:
    """Return None if a node at `hourly_new` may be bought beside the live nodes, else the reason as text for the user.

    `section`: origin of the limits: `budget` of a job, or `all_runs` of the user's configuration.
    """
    if max_total is not None and metered + reserved + worst_case_new > max_total:
        text = (
            f"{section}.max_total {dollars(max_total)} does not bear another node: {dollars(metered)} is spent, "
            f"{dollars(reserved)} is held for what runs, and the node may cost {dollars(worst_case_new)}"
        )
        return Refusal(text=text, for_good=metered + worst_case_new > max_total)
    if max_hourly is not None and hourly_now + hourly_new > max_hourly:
        text = (
            f"{section}.max_hourly {hourly(max_hourly)} does not bear another node: {hourly(hourly_now)} runs and "
            f"the node costs {hourly(hourly_new)}"
        )
        return Refusal(text=text, for_good=hourly_new > max_hourly)
    return None


def must_drain(*, metered: int, reserved: int, max_total: int | None) -> bool:
    """Return whether the run must stop now to stay within `max_total`."""
    return max_total is not None and metered + reserved >= max_total


def overdraft(micro_usd_per_hour: int, allowance_ms: int) -> int:
    """Return the allowance: the most that a run at this rate can exceed `max_total` in the worst case."""
    return worst_case(micro_usd_per_hour, allowance_ms)


def money_deadline_ms(*, now_ms: int, metered: int, max_total: int | None, planned_hourly: int) -> int | None:
    """Return the time at which the money is used up if the whole plan runs from now on. None: never.

    At the spend deadline a node terminates itself without a controller. `planned_hourly` is the most that can run,
    not the current cost, because a purchase does not change the deadlines that running nodes already have. Each
    controller pass extends the deadline.
    """
    if max_total is None or planned_hourly == 0:
        return None
    return now_ms + max(0, max_total - metered) * HOUR_MS // planned_hourly
