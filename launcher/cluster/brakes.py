"""Budget brakes: may one more node be bought, and must the run stop now?

before each purchase: metered + reserved + worst case of the new node <= max_total, and $/h <= max_hourly
every pass: drain when metered + reserved reaches max_total
on every node: a money deadline, for the time when nobody is left to ask

The promise: whatever happens, in whatever order, a run spends at most `max_total` plus one allowance (what its
nodes cost while a stop is carried out), and `overdraft` prints that allowance. Pure; integers; rounds against us.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.money import HOUR_MS, dollars, hourly


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a run may spend. None: no limit, which a real cloud does not get."""

    max_total: int | None
    max_hourly: int | None


NO_LIMITS = Limits(max_total=None, max_hourly=None)

RELEASE_ALLOWANCE_MS = 300_000
"""What stopping may take on a real cloud, the engine's last words included: clouds take minutes to end a machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a node is not bought. `for_good`: no waiting helps, because what was spent stays spent."""

    text: str
    for_good: bool


def worst_case(micro_usd_per_hour: int, duration_ms: int) -> int:
    """What a node can cost in a time, rounded up: a brake errs on the safe side."""
    return -(-micro_usd_per_hour * max(0, duration_ms) // HOUR_MS)


def reserved(micro_usd_per_hour: int, allowance_ms: int, pending: Iterable[int] = ()) -> int:
    """Money that is as good as spent: stopping what runs takes `allowance_ms`, and launches under way may bill.

    `pending` holds the worst case of each node that was asked for and has no billing fact yet.
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
    """None when a node at `hourly_new` may be bought beside what runs; else the reason, for a person to read.

    `section`: where the limits are written: `budget` of a job, or `all_runs` of the user's configuration.
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
    """Whether stopping now is the last moment that keeps the run within `max_total`."""
    return max_total is not None and metered + reserved >= max_total


def overdraft(micro_usd_per_hour: int, allowance_ms: int) -> int:
    """The allowance: how far a run at this rate may go past `max_total` when it is stopped as late as possible."""
    return worst_case(micro_usd_per_hour, allowance_ms)


def money_deadline_ms(*, now_ms: int, metered: int, max_total: int | None, planned_hourly: int) -> int | None:
    """When the money would be used up, were everything that is planned to run from now on. None: never.

    A node that ends itself then needs nobody to ask it to. `planned_hourly` is the most that can run, not what does,
    because nodes bought later are not heard of by those that run: each pass with its controller alive rearms it.
    """
    if max_total is None or planned_hourly == 0:
        return None
    return now_ms + max(0, max_total - metered) * HOUR_MS // planned_hourly
