"""Make a market by rule, where no recording of the plan's zones is at hand. Every figure from it is simulated.

Each zone takes turns: up for a Weibull time, out for a log-normal time. A regional shock ends the capacity of every
zone of a region at once. An outage may leave a part of the capacity.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from launcher.money import HOUR_MS
from launcher.placement.options import Option
from launcher.replay.trace import PoolTrace, Trace

STEP_MS = 600_000
"""Times are rounded up to this step, that of most recordings. Milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketRule:
    """Parameters of a made market. The defaults follow recorded traces of V100s (research notes cost 3)."""

    up_shape: float = 0.6
    """Shape of the Weibull up-times: below 1, a zone that has been up for long stays up."""
    up_hours: float = 4.0
    """Scale of the Weibull up-times: the mean is 6 h."""
    out_median_hours: float = 0.6
    out_sigma: float = 1.5
    """Median and spread of the log-normal outages: the mean is 1.8 h, and one of a hundred lasts 20 h."""
    shocks_per_day: float = 0.5
    """Regional shocks a day."""
    part: float = 0.3
    """Share of outages that leave half of the capacity."""

    def describe(self) -> str:
        return (
            f"zones up for Weibull({self.up_shape:g}, {self.up_hours:g} h), out for log-normal(median "
            f"{self.out_median_hours:g} h, sigma {self.out_sigma:g}), {self.shocks_per_day:g} regional shocks a day"
        )


def generate(options: Sequence[Option], hours: float, capacity: int, seed: int, rule: MarketRule) -> Trace:
    """Return a market of these spot options for so many hours. The same seed gives the same market."""
    random = Random(seed)
    end_ms = round(hours * HOUR_MS)
    regions = sorted({(option.placement.cloud, option.placement.region) for option in options})
    shocks = {region: _shocks(random, end_ms, rule) for region in regions}
    pools = tuple(
        _pool(option, random, end_ms, capacity, rule, shocks[option.placement.cloud, option.placement.region])
        for option in options
    )
    return Trace(name=f"generated, seed {seed}", pools=pools, end_ms=end_ms)


def _shocks(random: Random, end_ms: int, rule: MarketRule) -> list[int]:
    found, at_ms = [], 0.0
    while rule.shocks_per_day > 0:
        at_ms += random.expovariate(rule.shocks_per_day / 24) * HOUR_MS
        if at_ms >= end_ms:
            break
        found.append(round(at_ms))
    return found


def _pool(
    option: Option, random: Random, end_ms: int, capacity: int, rule: MarketRule, shocks: Sequence[int]
) -> PoolTrace:
    there = [(0, capacity)]
    at_ms = random.weibullvariate(rule.up_hours, rule.up_shape) * HOUR_MS
    begins = iter(shocks)
    shock = next(begins, None)
    while True:
        while shock is not None and shock < there[-1][0]:
            shock = next(begins, None)
        if shock is not None and shock < at_ms:
            at_ms, shock = shock, next(begins, None)
        begin_ms = max(there[-1][0] + STEP_MS, _up(at_ms))
        if begin_ms >= end_ms:
            break
        out_ms = random.lognormvariate(math.log(rule.out_median_hours), rule.out_sigma) * HOUR_MS
        left = capacity // 2 if random.random() < rule.part else 0
        back_ms = max(begin_ms + STEP_MS, _up(begin_ms + out_ms))
        there += [(begin_ms, left), (back_ms, capacity)]
        at_ms = back_ms + random.weibullvariate(rule.up_hours, rule.up_shape) * HOUR_MS
    kept = [(t, n) for t, n in there if t < end_ms]
    place = option.placement
    return PoolTrace(
        cloud=place.cloud,
        region=place.region,
        zone=place.zone,
        instance_type=place.instance_type,
        t_ms=tuple(t for t, _ in kept),
        capacity=tuple(n for _, n in kept),
        micro_usd_per_hour=(None,) * len(kept),
    )


def _up(at_ms: float) -> int:
    return math.ceil(at_ms / STEP_MS) * STEP_MS
