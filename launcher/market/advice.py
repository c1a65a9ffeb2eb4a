"""Turn the clouds' estimates of spot capacity into priors, used before the first observation. Pure.

newest uptime, or else preemption rate, of a pool -> prior hazards;    newest obtainability -> prior launch odds

Observations in the ledger are added on top (launcher/market/hazard.py). A cloud's estimate therefore counts until
observations outweigh the estimate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from launcher.market.hazard import (
    POOLED,
    HazardPrior,
    LaunchOdds,
    odds_of_obtainability,
    prior_of_preemption_rate,
    prior_of_uptime,
)
from launcher.market.pools import Pool
from launcher.market.prices import AdviceKind, CapacityAdvice
from launcher.money import HOUR_MS

STALE_MS = 48 * HOUR_MS
"""Maximum age of advice, in milliseconds. Older advice says nothing about now. A preemption rate covers a whole day,
so even the newest rate is a day old."""

RUN_HOURS = 4.0
"""Assumed run time in hours of a spot VM that stops. A preemption rate alone gives no hazard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudPriors:
    """Priors from the clouds' advice, by pool. Pools without advice are missing."""

    priors: Mapping[Pool, HazardPrior]
    odds: Mapping[Pool, LaunchOdds]


def cloud_priors(
    advice: Iterable[CapacityAdvice], now_ms: int, prior: HazardPrior = POOLED, run_hours: float = RUN_HOURS
) -> CloudPriors:
    """Return priors from the newest advice of each pool; stale or impossible advice is skipped."""
    newest: dict[tuple[Pool, AdviceKind], CapacityAdvice] = {}
    for entry in advice:
        pool = Pool(cloud=entry.cloud, region=entry.region, zone=entry.zone, instance_type=entry.instance_type)
        old = newest.get((pool, entry.kind))
        is_news = old is None or _when(entry) > _when(old)
        if is_news and entry.is_credible and entry.until_ms > now_ms - STALE_MS:
            newest[pool, entry.kind] = entry
    priors: dict[Pool, HazardPrior] = {}
    odds: dict[Pool, LaunchOdds] = {}
    for (pool, kind), entry in newest.items():
        if kind is AdviceKind.UPTIME_HOURS:
            priors[pool] = prior_of_uptime(prior, entry.value, entry.source)
        elif kind is AdviceKind.OBTAINABILITY:
            odds[pool] = odds_of_obtainability(entry.value, entry.source)
        elif (pool, AdviceKind.UPTIME_HOURS) not in newest:
            source = f"{entry.source}; a VM that stops is taken to have run {run_hours:g} h (assumed)"
            priors[pool] = prior_of_preemption_rate(prior, entry.value, run_hours, source)
    return CloudPriors(priors=priors, odds=odds)


def _when(advice: CapacityAdvice) -> tuple[int, int, float]:
    return (advice.until_ms, advice.observed_ms, advice.value)
