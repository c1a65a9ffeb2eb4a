"""Estimate the hazard of spot nodes by age and pool, and the odds that a launch succeeds. Pure.

observations (lives, launches) + prior (with its weight) -> estimate, interval, evidence

Young nodes die most: the hazard falls from 1.3 an hour to .06 after 16 h (research notes cost 3). The model therefore
has one hazard per age bucket and never a mean time between failures. Each hazard is Gamma-Poisson: the prior counts as
`PRIOR_RECLAIMS` preemptions, and the preemptions and node-hours seen at the same age are added. Ages and lives are in
hours inside this module.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import exp, expm1, inf, log, sqrt
from typing import Self

from launcher.market.estimate import Basis, Estimate
from launcher.money import HOUR_MS

BUCKET_STARTS_MS = tuple(minutes * 60_000 for minutes in (0, 15, 30, 60, 120, 240, 480, 960))
"""Start of each age bucket in milliseconds. The last bucket has no end; the research notes watched nodes up to 48 h."""

BUCKET_HOURS = (*((end - start) / HOUR_MS for start, end in pairwise(BUCKET_STARTS_MS)), inf)

POOLED_HAZARDS = (1.27, 1.09, 0.76, 0.42, 0.21, 0.15, 0.11, 0.06)
"""Preemptions per node-hour by age, pooled over nine AWS V100 zones, 2022-23 (research notes cost 3)."""

PRIOR_PREEMPTIONS = 1.0
"""Weight of the prior of a bucket, in preemptions. Nodes of the nine zones lived .7 to 10.5 h on average. The spread
is about as wide as the spread of an exponential distribution, which is a Gamma of shape 1."""

TRACE_UPTIME = 0.64
"""Mean share of time with spot capacity in the nine zones; the prior odds of a successful launch."""

SHARE_AT_WORK = Estimate(
    mean=0.53,
    low=0.41,
    high=0.61,
    basis=Basis.REPLAYED,
    source="replay of our own cool-downs on six sets of recorded traces: mean, least and most of the sets",
)
"""Share of time that a spot slot had a node at work. An outage lasts for a while, so attempts after a preemption
fail far more often than `TRACE_UPTIME` says: 66 to 92 in 100. Stand-ins do not count as work here."""

PRIOR_LAUNCHES = 2.0
"""Weight of the prior odds, in launches. Zones ranged from .17 to .90 (research notes cost 3)."""

ON_DEMAND_ODDS = 0.9
"""Odds of an on-demand launch. Assumed: no trace of on-demand launches is known."""

COLD_START_MS = 8 * 60_000
"""Milliseconds from `up` to the first worker, as in the simulations of the research notes (cost 4.3). The parts add
up to 2 to 7 minutes without the weights (engine 6)."""

COLD_START_SPREAD_MS = 3 * 60_000
"""Standard deviation of the prior cold start, in milliseconds: 2 to 13 minutes are within two deviations."""

PRIOR_COLD_STARTS = 2.0

BURST_MS = 60_000
"""Requests within a minute meet the same state of a zone. Milliseconds."""

Z90 = 1.6449
"""Standard normal quantile at 95 %."""

NOTES = "research notes cost 3: nine AWS V100 zones, 2022-23"


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Pool:
    """Nodes with a shared fate: one instance type in one zone. `zone` is empty for on-demand nodes."""

    cloud: str
    region: str
    zone: str
    instance_type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """Watched time of a node, from `up` on.

    `reclaimed` is False if the node still runs or the launcher ended the node.
    """

    ms: int
    reclaimed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """Node-milliseconds watched and preemptions seen, by age bucket."""

    ms: tuple[int, ...] = (0,) * len(BUCKET_STARTS_MS)
    reclaims: tuple[int, ...] = (0,) * len(BUCKET_STARTS_MS)

    @classmethod
    def of(cls, lives: Iterable[Life]) -> Self:
        watched, reclaims = [0] * len(BUCKET_STARTS_MS), [0] * len(BUCKET_STARTS_MS)
        for life in lives:
            ends = (*BUCKET_STARTS_MS[1:], max(life.ms, BUCKET_STARTS_MS[-1]))
            for bucket, (start, end) in enumerate(zip(BUCKET_STARTS_MS, ends, strict=True)):
                watched[bucket] += max(0, min(life.ms, end) - start)
            if life.reclaimed:
                reclaims[max(bucket for bucket, start in enumerate(BUCKET_STARTS_MS) if start <= life.ms)] += 1
        return cls(ms=tuple(watched), reclaims=tuple(reclaims))

    def __add__(self, other: "Exposure") -> "Exposure":
        return Exposure(
            ms=tuple(map(sum, zip(self.ms, other.ms, strict=True))),
            reclaims=tuple(map(sum, zip(self.reclaims, other.reclaims, strict=True))),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HazardCurve:
    """Hazard per age bucket, in preemptions per node-hour. The hazard is constant within a bucket."""

    per_hour: tuple[float, ...]

    def survives(self, hours: float) -> float:
        """Return S(a) = exp(-integral of h from 0 to a): the share of nodes alive at age a. h is the hazard."""
        return exp(-self.expected_preemptions(hours))

    def expected_preemptions(self, hours: float) -> float:
        """Return the integral of the hazard h from age 0 to `hours`."""
        return _expected_preemptions(self.per_hour, hours)

    def taken_within(self, hours: float) -> float:
        """Return P(L < hours)."""
        return 1.0 - self.survives(hours)

    def mean_life(self, until_hours: float = inf) -> float:
        """Return E[min(L, H)] in hours, the integral of S from 0 to H. L: life of a node; H: `until_hours`."""
        return _mean_life(self.per_hour, until_hours)

    def scaled(self, factor: float) -> "HazardCurve":
        return HazardCurve(per_hour=tuple(factor * hazard for hazard in self.per_hour))


@lru_cache(maxsize=4096)
def _expected_preemptions(per_hour: tuple[float, ...], hours: float) -> float:
    return sum(hazard * part for hazard, part in zip(per_hour, _parts(hours), strict=True) if part)


@lru_cache(maxsize=4096)  # many pools have the prior's hazards, and a plan needs the same ages for all pools
def _mean_life(per_hour: tuple[float, ...], until_hours: float) -> float:
    alive, hours = 1.0, 0.0
    for hazard, part in zip(per_hour, _parts(until_hours), strict=True):
        if part == 0:
            break
        reclaims = hazard * part if hazard else 0.0
        hours += alive * (-expm1(-reclaims) / hazard if reclaims > 1e-12 else part)
        alive *= exp(-reclaims)
    return hours


def _parts(hours: float) -> list[float]:
    """Return the hours spent in each bucket up to an age."""
    parts, left = [], hours
    for length in BUCKET_HOURS:
        parts.append(min(left, length))
        left = max(0.0, left - length)
    return parts


STEADY = HazardCurve(per_hour=(0.0,) * len(BUCKET_STARTS_MS))
"""Hazard of a node that the cloud never preempts: on demand."""


# --- priors --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class HazardPrior:
    """A prior hazard for each age bucket. The weight of every bucket is `reclaims` preemptions."""

    curve: HazardCurve
    reclaims: float
    basis: Basis
    source: str


POOLED = HazardPrior(
    curve=HazardCurve(per_hour=POOLED_HAZARDS), reclaims=PRIOR_PREEMPTIONS, basis=Basis.PRIOR, source=NOTES
)


def prior_after(prior: HazardPrior, replayed: Exposure, source: str) -> HazardPrior:
    """Return the prior updated by a recorded trace (`lives_of_trace`).

    The trace was another pool, so the weight of the prior stays the same.
    """
    curve = learn(prior, replayed).mean
    return HazardPrior(curve=curve, reclaims=prior.reclaims, basis=Basis.REPLAYED, source=source)


def prior_of_uptime(prior: HazardPrior, uptime_hours: float, source: str) -> HazardPrior:
    """Return `prior` scaled to a cloud's uptime estimate (GCP's AdviceClient.capacity).

    The estimate is the time that *most* VMs are expected to run, read here as the median. The factor m with S(uptime) =
    1/2 is m = ln 2 / (integral of h to the uptime). Example: an uptime of 1 h, within which the prior expects .97
    preemptions, gives m = .71.
    """
    return _scaled(prior, log(2) / prior.curve.expected_preemptions(uptime_hours), source)


def prior_of_preemption_rate(prior: HazardPrior, rate: float, mean_run_hours: float, source: str) -> HazardPrior:
    """Return `prior` scaled to GCP's preemption rate: the preempted share of the spot VMs that stopped.

    A share is no hazard; the conversion needs the mean run time r of the VMs. The factor m with P(L < r) = rate is m =
    -ln(1 - rate) / (integral of h to r). Example: rate = 1/2 and r = 1 h give m = .71, as above. A rate of 0 counts as
    .001.
    """
    taken = min(0.999, max(0.001, rate))
    return _scaled(prior, -log(1 - taken) / prior.curve.expected_preemptions(mean_run_hours), source)


def _scaled(prior: HazardPrior, factor: float, source: str) -> HazardPrior:
    """Return `prior` scaled by `factor`, with no more node-hours of weight than `prior` has.

    Observed preemptions then correct a rate near 0 as quickly as the prior itself.
    """
    reclaims = prior.reclaims * min(1.0, factor)
    return HazardPrior(curve=prior.curve.scaled(factor), reclaims=reclaims, basis=Basis.REPORTED, source=source)


# --- estimates -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Survival:
    """The hazard of each age bucket as a Gamma distribution, with its evidence."""

    shapes: tuple[float, ...]
    """Preemptions, including the weight of the prior."""
    hours: tuple[float, ...]
    """Node-hours, including the weight of the prior."""
    evidence: Exposure
    basis: Basis
    source: str

    @cached_property
    def mean(self) -> HazardCurve:
        return self._curve(lambda shape: shape)

    @cached_property
    def low(self) -> HazardCurve:
        """Return the curve with every hazard at its 5 % end."""
        return self._curve(lambda shape: gamma_quantile(shape, -Z90))

    @cached_property
    def high(self) -> HazardCurve:
        """Return the curve with every hazard at its 95 % end."""
        return self._curve(_high_end)

    def _curve(self, quantile: Callable[[float], float]) -> HazardCurve:
        rates = (quantile(shape) / hours for shape, hours in zip(self.shapes, self.hours, strict=True))
        return HazardCurve(per_hour=tuple(rates))

    def taken_within(self, hours: float) -> Estimate:
        """Return P(L < hours), the probability that a node is preempted before this age. `hours` is above 0.

        The expected number of preemptions is a sum of Gammas. The interval comes from a single Gamma of the same mean
        and variance.
        """
        mean = self.mean.expected_preemptions(hours)
        parts = zip(self.shapes, self.hours, _parts(hours), strict=True)
        variance = sum(shape * (part / watched) ** 2 for shape, watched, part in parts)
        shape = mean**2 / variance
        low, high = (end * mean / shape for end in (gamma_quantile(shape, -Z90), _high_end(shape)))
        ends = (1 - exp(-mean), 1 - exp(-low), 1 - exp(-high))
        return self._estimate(ends, sum(self.evidence.reclaims), sum(self.evidence.ms))

    def hazard(self, age_hours: float) -> Estimate:
        """Return the preemptions per node-hour at an age."""
        bucket = max(index for index, start in enumerate(BUCKET_STARTS_MS) if start <= age_hours * HOUR_MS)
        ends = (self.mean.per_hour[bucket], self.low.per_hour[bucket], self.high.per_hour[bucket])
        return self._estimate(ends, self.evidence.reclaims[bucket], self.evidence.ms[bucket])

    def _estimate(self, ends: tuple[float, float, float], events: int, exposure_ms: int) -> Estimate:
        mean, low, high = ends
        return Estimate(
            mean=mean,
            low=low,
            high=high,
            basis=self.basis,
            source=self.source,
            events=events,
            exposure_ms=exposure_ms,
        )


def learn(
    prior: HazardPrior, seen: Exposure, basis: Basis = Basis.MEASURED, source: str = "our own ledger"
) -> Survival:
    """Update a prior by Gamma-Poisson, bucket by bucket: (k0 + k) preemptions in (k0 / h0 + t) node-hours.

    With one prior preemption at 1.27/h and five seen in one hour: 6 / (1 / 1.27 + 1) = 3.36/h.
    """
    is_observed = any(seen.ms) or any(seen.reclaims)
    return Survival(
        shapes=tuple(prior.reclaims + count for count in seen.reclaims),
        hours=tuple(
            prior.reclaims / hazard + ms / HOUR_MS for hazard, ms in zip(prior.curve.per_hour, seen.ms, strict=True)
        ),
        evidence=seen,
        basis=basis if is_observed else prior.basis,
        source=f"{source}; before that {prior.source}" if is_observed else prior.source,
    )


def gamma_quantile(shape: float, z: float) -> float:
    """Return the quantile of a Gamma with rate 1, at the standard normal quantile z, by Wilson and Hilferty (1931).

    Shape 1 at 95 %: 2.97 (exactly 3.00); shape 6: 10.51 (10.51). Below shape 1 the lower end is too low.
    """
    return float(shape * max(0.0, 1 - 1 / (9 * shape) + z / (3 * sqrt(shape))) ** 3)


def bursts(answers: Iterable[tuple[int, int]], within_ms: int = BURST_MS) -> int:
    """Return the number of bursts in `answers`, pairs of request time and answer time in milliseconds.

    A request made less than `within_ms` after the first answer of a burst belongs to the burst. Four requests at 0 that
    are refused at 9 s, one request at 30 s and one at 11 min: 2 bursts.
    """
    count, until_ms = 0, -1
    for requested_ms, answered_ms in sorted(answers, key=lambda answer: (answer[1], answer[0])):
        if not count or requested_ms >= until_ms:
            count, until_ms = count + 1, answered_ms + within_ms
    return count


def _high_end(shape: float) -> float:
    """Return the 95 % end, or the mean for a shape near 0, where the Wilson-Hilferty value lies below the mean."""
    return max(shape, gamma_quantile(shape, Z90))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOdds:
    """Odds that a requested node comes: a Beta distribution from a prior and the launches seen."""

    successes: int = 0
    failures: int = 0
    prior: float = TRACE_UPTIME
    prior_launches: float = PRIOR_LAUNCHES
    prior_basis: Basis = Basis.PRIOR
    prior_source: str = f"{NOTES}: mean share of time with capacity"

    @property
    def mean(self) -> float:
        return (self.prior * self.prior_launches + self.successes) / self._launches

    @property
    def _launches(self) -> float:
        return self.prior_launches + self.successes + self.failures

    def estimate(self) -> Estimate:
        """Return the mean, with 1.64 standard deviations of the Beta as the interval, within 1 % and 100 %."""
        spread = Z90 * sqrt(self.mean * (1 - self.mean) / (self._launches + 1))
        is_observed = self.successes + self.failures > 0
        return Estimate(
            mean=self.mean,
            low=max(0.01, self.mean - spread),
            high=min(1.0, self.mean + spread),
            basis=Basis.MEASURED if is_observed else self.prior_basis,
            source=f"our own ledger; before that {self.prior_source}" if is_observed else self.prior_source,
            events=self.successes + self.failures,
        )


ON_DEMAND = LaunchOdds(prior=ON_DEMAND_ODDS, prior_basis=Basis.ASSUMED, prior_source="assumed for on demand")


def cold_start(seen_ms: Iterable[int] = ()) -> Estimate:
    """Return the milliseconds from `up` to the first worker.

    The mean covers the observed cold starts and `PRIOR_COLD_STARTS` prior cold starts.
    """
    seen = list(seen_ms)
    launches = PRIOR_COLD_STARTS + len(seen)
    mean = (PRIOR_COLD_STARTS * COLD_START_MS + sum(seen)) / launches
    spread = Z90 * COLD_START_SPREAD_MS * sqrt(PRIOR_COLD_STARTS / launches)
    assumed = "research notes cost 4.3 and engine 6"
    return Estimate(
        mean=mean,
        low=max(0.0, mean - spread),
        high=mean + spread,
        basis=Basis.MEASURED if seen else Basis.ASSUMED,
        source=f"our own ledger; before that {assumed}" if seen else assumed,
        events=len(seen),
    )


# --- correlation ---------------------------------------------------------------------------------------

SAME_ZONE = Estimate(
    mean=0.59,
    low=0.42,
    high=1.0,
    basis=Basis.ASSUMED,
    source="no lower than the most alike zones of one region (research notes cost 3); the ends are assumed",
)
SAME_REGION = Estimate(
    mean=0.42,
    low=0.25,
    high=0.59,
    basis=Basis.PRIOR,
    source=f"{NOTES}: range over pairs of zones, and its middle",
)
OTHER_REGION = Estimate(
    mean=0.14,
    low=0.0,
    high=0.25,
    basis=Basis.PRIOR,
    source=f"{NOTES}: mean; the ends are no correlation, and the least inside one region",
)


def correlation(one: Pool, other: Pool) -> Estimate:
    """Return the correlation between two nodes being available, by zone and region."""
    if (one.cloud, one.region) != (other.cloud, other.region):
        return OTHER_REGION
    return SAME_ZONE if one.zone == other.zone else SAME_REGION


# --- observations --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolHistory:
    """Observations of one pool. Times are milliseconds UTC."""

    pool: Pool
    lives: tuple[Life, ...] = ()
    launches: int = 0
    """Successful launches. Nodes that came within a minute count as one launch, as refusals do."""
    last_launch_ms: int | None = None
    stock_outs_ms: tuple[int, ...] = ()
    """Times at which the cloud had no capacity, oldest first."""
    cold_starts_ms: tuple[int, ...] = ()

    def survival(self, prior: HazardPrior = POOLED) -> Survival:
        return learn(prior, Exposure.of(self.lives))

    def odds(self, believed: LaunchOdds | None = None) -> LaunchOdds:
        """Return the launch odds.

        `believed` is a cloud's obtainability as the prior; None takes the prior from the traces.
        """
        believed = believed or LaunchOdds()
        return LaunchOdds(
            successes=self.launches,
            failures=bursts((at, at) for at in self.stock_outs_ms),
            prior=believed.prior,
            prior_launches=believed.prior_launches,
            prior_basis=believed.prior_basis,
            prior_source=believed.prior_source,
        )


def odds_of_obtainability(obtainability: float, source: str) -> LaunchOdds:
    """Return GCP's obtainability, 0 to 1 (AdviceClient.capacity), as the prior before the first launch."""
    return LaunchOdds(prior=min(0.99, max(0.01, obtainability)), prior_basis=Basis.REPORTED, prior_source=source)


def lives_of_trace(lines: Iterable[str]) -> tuple[Life, ...]:
    """Return the lives in a recorded trace of `milliseconds,add|remove,node`.

    Nodes alive at the end of the trace were not preempted.
    """
    added: dict[str, int] = {}
    lives, last = [], 0
    for line in filter(None, map(str.strip, lines)):
        at, what, node = line.split(",")
        last = max(last, int(at))
        if what == "add":
            added[node] = int(at)
        elif node in added:
            lives.append(Life(ms=int(at) - added.pop(node), reclaimed=True))
    return (*lives, *(Life(ms=last - since, reclaimed=False) for since in added.values()))
