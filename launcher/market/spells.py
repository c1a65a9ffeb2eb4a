"""Spells of spot capacity: how long a pool has capacity, and how long an outage lasts. Pure.

A pool takes turns: up for as long as its hazards by age let a node live (hazard.py), then out for a log-normal time.
Both are heavy-tailed: a pool that has been up, or out, for long stays so. A plan's closed form (placement/value.py) and
generated markets (replay/generator.py) take the same spells, so that replays check the closed form.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, prod, sqrt

from launcher.market.hazard import HazardCurve
from launcher.market.pools import SAME_REGION

OUTAGE_SIGMA = 1.55
"""Spread of the log-normal outages. Outages of H100 had a mean of 1.10 h and a median of 1/3 h:
sqrt(2 ln(1.10 / .33)). Recorded outages have a heavier tail still: after 4 h, 15 h were left on average, against 6 h
here. Fitted: tests/benchmarks/calibration.py."""

TIE = sqrt(SAME_REGION.mean)
"""Chance that a zone follows its region: zones that do are up and out together. Two zones of a region are then
correlated by `SAME_REGION`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spells:
    """Spells of one pool. Times in hours."""

    hazards: HazardCurve
    uptime: float
    """Share of time with capacity, above 0 and at most 1."""
    outage_sigma: float = OUTAGE_SIGMA

    @property
    def up_hours(self) -> float:
        """Return the mean length of a spell with capacity."""
        return self.hazards.mean_life()

    @property
    def out_hours(self) -> float:
        """Return the mean length of an outage: uptime = up / (up + out)."""
        return self.up_hours * (1 - self.uptime) / self.uptime

    @property
    def out_median_hours(self) -> float:
        """Return the median outage: mean x exp(-sigma^2 / 2)."""
        return self.out_hours * exp(-(self.outage_sigma**2) / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZoneSpells:
    """The spells of a pool, and its name."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    spells: Spells


def share_all_out(outs: Iterable[float], tie: float = TIE) -> float:
    """Return the share of time in which every pool of a region is out. `outs`: 1 - uptime of each pool.

    Each pool follows the region with the chance t = `tie`, and is then out exactly when the region is, which is out for
    m = the least of the shares: m prod(t + (1 - t) o) + (1 - m) prod((1 - t) o). One pool: o. Two at .5 with t^2 = .42:
    .5 x .823^2 + .5 x .176^2 = .355, and independent pools .25.
    """
    shares = list(outs)
    least = min(shares, default=1.0)
    together = prod(tie + (1 - tie) * out for out in shares)
    return least * together + (1 - least) * prod((1 - tie) * out for out in shares)


def chance_elsewhere(out: float, other_outs: Iterable[float]) -> float:
    """Return the chance that another pool of the region has capacity while one pool is out. `out`: its 1 - uptime."""
    return 1 - min(1.0, share_all_out([out, *other_outs]) / out) if out > 0 else 0.0
