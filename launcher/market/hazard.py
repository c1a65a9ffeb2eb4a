"""Estimate the hazard of spot nodes by age and pool, and the odds that a launch succeeds. Pure.

observations (lives, launches) + prior (with its weight) -> estimate, interval, evidence

Young nodes die most: the hazard falls from 1.3 an hour to .06 after 16 h. The figures are of nine AWS V100 zones over
45 days of 2022-23 (https://github.com/skypilot-org/spot-traces), counted by us. The model therefore has one hazard per
age bucket and never a mean time between failures.

    hazard of a pool at an age = factor of the pool x the prior's hazard at that age

The factor is learnt first, because pools differ in level more than in the shape over age. It is Gamma-Poisson: the
pools of the same region and instance type say where it may lie, and the pool's own evidence says the rest. Then each
age bucket learns, with `BUCKET_PREEMPTIONS` as the weight of the factor. Ages and lives are in hours in this module.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import exp, expm1, inf, log, sqrt

from launcher.market.estimate import Basis, Estimate
from launcher.market.evidence import BUCKET_HOURS, BUCKET_STARTS_MS, Evidence, Exposure, Life, weighed
from launcher.market.pools import RECORDED, Pool
from launcher.market.recorded_h100 import SHARES, SOURCE, hazard_factor, usual_share
from launcher.money import HOUR_MS

POOLED_HAZARDS = (1.27, 1.09, 0.76, 0.42, 0.21, 0.15, 0.11, 0.06)
"""Preemptions per node-hour by age, pooled over nine AWS V100 zones, 2022-23."""

H100_HAZARDS = (1.73, 1.20, 1.22, 0.60, 0.20, 0.13, 0.10, 0.11)
"""Preemptions per node-hour by age of one-GPU H100 nodes: 12 Google Cloud zones, 5 days of October 2025. The recording
is of probes: how many of 16 nodes could be created every ten minutes. A life is read from it as a run that holds six
nodes would see it: node k lives while k nodes could be created. Fitted: tests/benchmarks/calibration.py."""

PRIOR_PREEMPTIONS = 2.0
"""Weight of a prior's factor, in preemptions. Nine in ten pools are then within .18 and 2.4 times the prior. Zones of
V100 ranged from .33 to 2.5 times (survival of an hour: .73 to .09), those of H100 from .5 to 1.8."""

SAME_REGION_PREEMPTIONS = 3.0
"""Weight of the factor that the other pools of a region and instance type suggest, however much they have seen. Zones
of one region differ about as much as regions: .5 and 1.0 times the prior in us-east4, .65 and 1.2 in
asia-southeast1."""

MOST_LEARNT = 2.0
"""Preemptions by which evidence can narrow an interval, however much there is. A pool of next week is not the pool of
last week. With 1, 2 and 4 intervals hold equally well on the first part of the H100 recording; with 2 they also hold on
the second (tests/benchmarks/calibration.py)."""

BUCKET_PREEMPTIONS = 8.0
"""Weight of a pool's factor in each age bucket, in preemptions. Measured: the best, or within .01 nats a life of it,
on five of six sets of recorded V100 lives."""

PRIOR_LAUNCHES = 2.0
"""Weight of the prior odds, in launches. The recorded zones ranged from .17 to .90."""

MOST_LAUNCHES = 2.0
"""Launches for which evidence counts at most, in the mean of an uptime: half of it, beside the prior. Launches of one
zone are alike, and zones change within days: two of 13 H100 zones went from always to never in a week. On the first
part of the H100 recording the next two days are forecast as well with 2 as with more (root mean square error .31, .36
by the prior alone). No evidence narrows the interval: it then holds 83 % of the time there, and 75 % if all evidence
counts (tests/benchmarks/market_drift.py)."""

ON_DEMAND_ODDS = 0.9
"""Odds of an on-demand launch. Assumed: no trace of on-demand launches is known."""

COLD_START_MS = 8 * 60_000
"""Milliseconds from `up` to the first worker, as in our first simulations. The parts add up to 2 to 7 minutes
without the weights. Assumed until measured on a cloud."""

COLD_START_SPREAD_MS = 3 * 60_000
"""Standard deviation of the prior cold start, in milliseconds: 2 to 13 minutes are within two deviations."""

PRIOR_COLD_STARTS = 2.0

BURST_MS = 60_000
"""Requests within a minute meet the same state of a zone. Milliseconds."""

Z90 = 1.6449
"""Standard normal quantile at 95 %."""


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

    def mean_rest(self, until_hours: float = inf) -> float:
        """Return E[min(R, H)] in hours. R: the rest of a life that is met at a random moment; H: `until_hours`.

        Long lives are met more often, so R is longer than a whole life where the hazard falls with age:
        P(R > t) = (integral of S from t on) / E[L].
        """
        return _mean_rest(self.per_hour, until_hours)

    def rests(self, hours: float) -> float:
        """Return P(R > hours)."""
        return 1.0 - self.mean_life(hours) / self.mean_life()

    def age_at(self, preemptions: float) -> float:
        """Return the age in hours at which so many preemptions are expected: a life, if drawn from Exp(1)."""
        age = 0.0
        for hazard, length in zip(self.per_hour, BUCKET_HOURS, strict=True):
            if preemptions <= hazard * length and hazard:
                return age + preemptions / hazard
            age, preemptions = age + length, preemptions - (hazard * length if hazard else 0.0)
        return age

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


@lru_cache(maxsize=4096)
def _mean_rest(per_hour: tuple[float, ...], until_hours: float) -> float:
    """Return (integral of min(x, H) S(x) from 0 on) / E[L], bucket by bucket."""
    alive, age, area = 1.0, 0.0, 0.0
    for hazard, part in zip(per_hour, _parts(until_hours), strict=True):
        if part == 0:
            break
        gone = -expm1(-hazard * part) if hazard else 0.0
        if hazard * part > 1e-9:
            kept = 0.0 if part == inf else part * (1 - gone)
            area += alive * (age * gone / hazard + (gone / hazard - kept) / hazard)
        else:
            area += alive * part * (age + part / 2)
        alive, age = alive * (1 - gone), age + part
    whole = _mean_life(per_hour, inf)
    if whole == inf:
        return until_hours
    beyond = 0.0 if until_hours == inf else until_hours * (whole - _mean_life(per_hour, until_hours))
    return (area + beyond) / whole


def _parts(hours: float) -> list[float]:
    """Return the hours spent in each bucket up to an age."""
    parts, hours_left = [], hours
    for length in BUCKET_HOURS:
        parts.append(min(hours_left, length))
        hours_left = max(0.0, hours_left - length)
    return parts


STEADY = HazardCurve(per_hour=(0.0,) * len(BUCKET_STARTS_MS))
"""Hazard of a node that the cloud never preempts: on demand."""


# --- priors --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class HazardPrior:
    """A prior hazard for each age bucket. The factor of a pool has the weight of `reclaims` preemptions."""

    curve: HazardCurve
    reclaims: float
    basis: Basis
    source: str


POOLED = HazardPrior(
    curve=HazardCurve(per_hour=POOLED_HAZARDS), reclaims=PRIOR_PREEMPTIONS, basis=Basis.PRIOR, source=RECORDED
)

H100 = HazardPrior(
    curve=HazardCurve(per_hour=H100_HAZARDS),
    reclaims=PRIOR_PREEMPTIONS,
    basis=Basis.PRIOR,
    source=SOURCE,
)


def prior_of(accelerator: str, gpus: int) -> HazardPrior:
    """Return the prior of a kind of node. A kind without a recording of its own gets that of the nearest kind."""
    prior = H100 if accelerator.upper().startswith(("H100", "H200", "B200", "B300")) else POOLED
    factor = hazard_factor(gpus)
    if factor == 1:
        return prior
    source = f"{prior.source}; {gpus} GPUs: times {factor:g}, from {SOURCE}"
    return HazardPrior(curve=prior.curve.scaled(factor), reclaims=prior.reclaims, basis=Basis.PRIOR, source=source)


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
    -ln(1 - rate) / (integral of h to r). Example: rate = 1/2 and r = 1 h give m = .71, as above.
    """
    capped_rate = min(0.999, rate)
    return _scaled(prior, -log(1 - capped_rate) / prior.curve.expected_preemptions(mean_run_hours), source)


def _scaled(prior: HazardPrior, factor: float, source: str) -> HazardPrior:
    """Return `prior` scaled by a factor that a cloud's figure suggests, within the prior's own 90 % interval.

    A cloud's figure is weak evidence and never certainty. The scaled prior has no more node-hours of weight than
    `prior` has, so that preemptions correct a low figure as quickly as the prior itself.
    """
    least, most = (gamma_quantile(prior.reclaims, z) / prior.reclaims for z in (-Z90, Z90))
    within = min(most, max(least, factor))
    reclaims = prior.reclaims * min(1.0, within)
    return HazardPrior(curve=prior.curve.scaled(within), reclaims=reclaims, basis=Basis.REPORTED, source=source)


# --- estimates -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Survival:
    """The hazards of a pool, with the uncertainty of the pool's factor, and the evidence behind both."""

    mean: HazardCurve
    shape: float
    """Shape of the Gamma distribution of the pool's factor in time to come."""
    evidence: Exposure
    """What was seen, every life counted fully."""
    basis: Basis
    source: str

    @cached_property
    def low(self) -> HazardCurve:
        """Return the curve with the factor at its 5 % end."""
        return self.mean.scaled(gamma_quantile(self.shape, -Z90) / self.shape)

    @cached_property
    def high(self) -> HazardCurve:
        """Return the curve with the factor at its 95 % end."""
        return self.mean.scaled(_high_end(self.shape) / self.shape)

    def taken_within(self, hours: float) -> Estimate:
        """Return P(L < hours), the probability that a node is preempted before this age. `hours` is above 0."""
        ends = (curve.taken_within(hours) for curve in (self.mean, self.low, self.high))
        return self._estimate(*ends, events=sum(self.evidence.reclaims), exposure_ms=sum(self.evidence.ms))

    def hazard(self, age_hours: float) -> Estimate:
        """Return the preemptions per node-hour at an age."""
        bucket = max(index for index, start in enumerate(BUCKET_STARTS_MS) if start <= age_hours * HOUR_MS)
        ends = (curve.per_hour[bucket] for curve in (self.mean, self.low, self.high))
        return self._estimate(*ends, events=self.evidence.reclaims[bucket], exposure_ms=self.evidence.ms[bucket])

    def _estimate(self, mean: float, low: float, high: float, *, events: int, exposure_ms: int) -> Estimate:
        return Estimate(
            mean=mean,
            low=low,
            high=high,
            basis=self.basis,
            source=self.source,
            events=events,
            exposure_ms=exposure_ms,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """The level of a pool's hazards over a prior's: a Gamma distribution of this shape and mean."""

    shape: float
    mean: float = 1.0

    def after(self, preemptions: float, expected: float) -> "Factor":
        """Return the factor after so many preemptions, where the prior expects `expected`."""
        shape = self.shape + preemptions
        return Factor(shape=shape, mean=shape / (self.shape / self.mean + expected))


def learn(
    prior: HazardPrior,
    exposure: Exposure,
    own: Evidence | None = None,
    around: Iterable[Evidence] = (),
    basis: Basis = Basis.MEASURED,
    source: str = "our own ledger",
) -> Survival:
    """Update a prior by a pool's evidence.

    `own`: the evidence in `exposure`, weighed (evidence.py); None: every life counts fully. `around`: weighed evidence
    of the other pools of the region and instance type. With the prior 1.27/h of weight 2, and five preemptions in one
    hour at that age: the factor is (2 + 5) / (2 + 1.27) = 2.14, and the hazard (8 + 5) / (8 / (2.14 x 1.27) + 1) =
    3.30/h.
    """
    own = Evidence.of(exposure) if own is None else own
    factor = _before(prior, around).after(sum(own.preemptions), _expected(prior, own))
    hazards = (
        (BUCKET_PREEMPTIONS + count) / (BUCKET_PREEMPTIONS / (factor.mean * hazard) + hours)
        for hazard, count, hours in zip(prior.curve.per_hour, own.preemptions, own.hours, strict=True)
    )
    is_observed = any(exposure.ms) or any(exposure.reclaims)
    return Survival(
        mean=HazardCurve(per_hour=tuple(hazards)),
        shape=_shape_to_come(prior, factor),
        evidence=exposure,
        basis=basis if is_observed else prior.basis,
        source=f"{source}; before that {prior.source}" if is_observed else prior.source,
    )


def _shape_to_come(prior: HazardPrior, factor: Factor) -> float:
    """Return the shape of a pool's factor in time to come: a + e m / (e + m), with m = `MOST_LEARNT`.

    a: the prior's weight. e: what was learnt beside it. The more was learnt, the less another preemption adds.
    """
    learnt = max(0.0, factor.shape - prior.reclaims)
    return prior.reclaims + learnt * MOST_LEARNT / (learnt + MOST_LEARNT)


def _before(prior: HazardPrior, around: Iterable[Evidence]) -> Factor:
    """Return the factor of a pool before its own evidence, from the prior and the pools around it.

    The factor of the region has the shape r, and a pool's factor over its region's the shape z =
    `SAME_REGION_PREEMPTIONS`. Without evidence both make the prior's weight a: 1 / a = 1 / r + 1 / z + 1 / (r z). Where
    the prior expects e preemptions of a pool, the pool says as much of its region as z / (z + e) of them.
    """
    observed = [evidence for evidence in around if any(evidence.hours)]
    z = SAME_REGION_PREEMPTIONS
    if not observed or prior.reclaims >= z:
        return Factor(shape=prior.reclaims)
    region = Factor(shape=prior.reclaims * (1 + z) / (z - prior.reclaims))
    for evidence in observed:
        expected = _expected(prior, evidence)
        part = z / (z + expected)
        region = region.after(part * sum(evidence.preemptions), part * expected)
    return Factor(shape=1 / (1 / region.shape + 1 / z + 1 / (region.shape * z)), mean=region.mean)


def _expected(prior: HazardPrior, evidence: Evidence) -> float:
    """Return the preemptions that the prior expects in the hours of the evidence."""
    return sum(hazard * hours for hazard, hours in zip(prior.curve.per_hour, evidence.hours, strict=True))


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
    """Share of time in which a pool has capacity: a Beta distribution from a prior and the launches seen.

    The chance that a request at a time picked at random succeeds. After a preemption the chance is lower, because
    outages last (spells.py).
    """

    successes: int = 0
    failures: int = 0
    prior: float = SHARES[0]
    prior_launches: float = PRIOR_LAUNCHES
    prior_basis: Basis = Basis.PRIOR
    prior_source: str = f"{RECORDED}: mean share of time with capacity"
    most_learnt: float = MOST_LAUNCHES

    @property
    def mean(self) -> float:
        """Return (a p + e s / n) / (a + e) with e = n m / (n + m): s of n launches succeeded, m = `most_learnt`.

        a: weight of the prior p. After 8 of 8 refusals: .64 x 2 / (2 + 1.6) = .36.
        """
        launches = self.successes + self.failures
        if not launches:
            return self.prior
        learnt = launches / (1 + launches / self.most_learnt)
        return (self.prior * self.prior_launches + learnt * self.successes / launches) / (self.prior_launches + learnt)

    def estimate(self) -> Estimate:
        """Return the mean, with 1.64 standard deviations of the Beta as the interval, within 1 % and 100 %.

        The interval is of a time to come, so evidence moves it and does not narrow it. Without launches the mean of .64
        has the interval .18 to 1; after 11 of 11, .81 has .44 to 1.
        """
        spread = Z90 * sqrt(self.mean * (1 - self.mean) / (self.prior_launches + 1))
        is_observed = self.successes + self.failures > 0
        return Estimate(
            mean=self.mean,
            low=max(0.01, self.mean - spread),
            high=min(1.0, self.mean + spread),
            basis=Basis.MEASURED if is_observed else self.prior_basis,
            source=f"our own ledger; before that {self.prior_source}" if is_observed else self.prior_source,
            events=self.successes + self.failures,
        )


def usual_odds(accelerator: str, gpus: int, cloud: str = "", region: str = "") -> LaunchOdds:
    """Return the share of time with capacity of a spot pool of such nodes, before any evidence."""
    share, source = usual_share(accelerator, gpus, cloud, region)
    return LaunchOdds(prior=share, prior_source=source)


ON_DEMAND = LaunchOdds(prior=ON_DEMAND_ODDS, prior_basis=Basis.ASSUMED, prior_source="assumed for on demand")


def cold_start(seen_ms: Iterable[int] = ()) -> Estimate:
    """Return the milliseconds from `up` to the first worker.

    The mean covers the observed cold starts and `PRIOR_COLD_STARTS` prior cold starts.
    """
    observed_ms = list(seen_ms)
    launches = PRIOR_COLD_STARTS + len(observed_ms)
    mean = (PRIOR_COLD_STARTS * COLD_START_MS + sum(observed_ms)) / launches
    spread = Z90 * COLD_START_SPREAD_MS * sqrt(PRIOR_COLD_STARTS / launches)
    assumed = "assumed: no such node was ever watched"
    return Estimate(
        mean=mean,
        low=max(0.0, mean - spread),
        high=mean + spread,
        basis=Basis.MEASURED if observed_ms else Basis.ASSUMED,
        source=f"our own ledger; before that {assumed}" if observed_ms else assumed,
        events=len(observed_ms),
    )


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

    def survival(self, prior: HazardPrior, now_ms: int, around: Iterable["PoolHistory"] = ()) -> Survival:
        """Return the pool's hazards at `now_ms`. `around`: the histories of its region and instance type."""
        evidence = [weighed(history.lives, now_ms) for history in around if history.pool != self.pool]
        return learn(prior, Exposure.of(self.lives), weighed(self.lives, now_ms), evidence)

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


def around(pool: Pool, histories: Iterable[PoolHistory]) -> list[PoolHistory]:
    """Return the histories of a pool's region and instance type."""
    group = (pool.cloud, pool.region, pool.instance_type)
    return [
        history
        for history in histories
        if (history.pool.cloud, history.pool.region, history.pool.instance_type) == group
    ]


def odds_of_obtainability(obtainability: float, source: str) -> LaunchOdds:
    """Return GCP's obtainability, 0 to 1 (AdviceClient.capacity), as the prior before the first launch."""
    return LaunchOdds(prior=min(0.99, max(0.01, obtainability)), prior_basis=Basis.REPORTED, prior_source=source)
