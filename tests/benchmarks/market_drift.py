"""How far does the past of a zone tell its next days? Part of the calibration benchmark, on the fitted recording alone.

Each zone is looked at each `LOOK_HOURS` until a time; the interval of its uptime by these looks is compared with the
share of time with capacity in the `AHEAD_HOURS` after that time, the length of a run.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from launcher.market.hazard import LaunchOdds
from launcher.money import HOUR_MS
from launcher.replay.trace import PoolTrace, Trace

LOOK_HOURS = 12
"""Hours between two looks whether a zone has capacity."""

AHEAD_HOURS = 48

KNOWN_SHARE = 0.02
"""A share of 48 h is known to this: a node is found, or lost, within an hour."""


def share_between(pool: PoolTrace, from_hours: int, until_hours: int, held: int) -> float:
    """Return the share of time with capacity for a node, mean of `held` nodes."""
    steps = range(from_hours * 6, until_hours * 6)
    return fmean(min(held, pool.capacity_at(step * HOUR_MS // 6)) for step in steps) / held


def looks_until(pool: PoolTrace, hours: int, held: int) -> LaunchOdds:
    """Return the uptime that a run has learnt which asked for `held` nodes at each `LOOK_HOURS`."""
    counts = [min(held, pool.capacity_at(at * HOUR_MS)) for at in range(0, hours, LOOK_HOURS)]
    there = round(sum(counts) / held)
    return LaunchOdds(successes=there, failures=len(counts) - there)


def intervals_that_hold(trace: Trace, held: int, most_learnt: Sequence[float]) -> dict[str, float]:
    """Return the share of 90 % intervals that hold, by the launches that evidence may count for."""
    cases = [
        (looks_until(pool, at, held), share_between(pool, at, at + AHEAD_HOURS, held))
        for pool in trace.pools
        for at in range(24, trace.end_ms // HOUR_MS - AHEAD_HOURS, LOOK_HOURS)
    ]
    return {
        f"{most:g}": fmean(_holds(replace(odds, most_learnt=most), realised) for odds, realised in cases)
        for most in most_learnt
    }


def _holds(odds: LaunchOdds, realised: float) -> bool:
    said = odds.estimate()
    return said.low - KNOWN_SHARE <= realised <= said.high + KNOWN_SHARE
