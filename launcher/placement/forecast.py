"""Forecast a choice of nodes: hours and dollars to the target, with an interval. Pure.

C = K [ T (P_T + sum over zones of n_z b_z) + e G m ]      (ours; docs/cost-model.md)

K: iterations. T: hours of an iteration. P_T: the trainer's price per hour, of all its nodes. e: traffic price per GB.
G: GB of new weights. m: copies of the weights per iteration. n_z slots in zone z are each at work for a share u_z of
the time and cost b_z an hour by the clock (`launcher/placement/value.py`). T(n) and K(n) with n GPUs at work are the
recipe's (`launcher/job/recipe.py`), and are averaged over the time with each n:

hours = 1 / E[1 / (T K)]                           iterations far from the target count less
C s, hours s                                       s: losses of a trainer on spot (`TrainerLosses.slower`)
c = T rate / (T(0) rate(0))                        cost of an iteration; spot pays iff K / K(0) < 1 / c

A replay makes progress by the same T and K (`plan_cloud`: `pace_ms`). In the reference recipe c > 1: spot beside the
trainer makes each iteration dearer, and is bought for the iterations that exploration saves. C is the objective of
every plan: two choices are compared by C alone.
"""

from dataclasses import dataclass, replace
from math import ceil

from engine.events import Market
from launcher.job.recipe import End, Recipe
from launcher.market.estimate import Estimate
from launcher.money import HOUR_MS
from launcher.placement.requirements import (
    CloudRequirements,
    PricedPool,
    Site,
    TrainerLosses,
    in_one_region,
    revalued,
)
from launcher.placement.value import copies_micro_usd, gpu_variance, is_first_hour_free


@dataclass(frozen=True, kw_only=True, slots=True)
class GpusAtWork:
    """Rollout GPUs at work: their mean and variance, and the fewest and the most there can be.

    Whatever depends on the number is averaged over two extremes. Either the number is always the mean S, or all nodes
    come and go together: `most` M for a share of the time, else `fewest` F. The weight of the second is V / ((S - F)
    (M - S)), which is exact for V = 0, for one node, and for nodes that share every outage.
    """

    mean: float
    variance: float = 0.0
    fewest: float = 0.0
    most: float = 0.0

    @property
    def weights(self) -> tuple[tuple[float, float], ...]:
        """Return (share of time, GPUs) of each number that counts."""
        spread = (self.mean - self.fewest) * (self.most - self.mean)
        if spread <= 0 or self.variance <= 0:
            return ((1.0, self.mean),)
        together = min(1.0, self.variance / spread)
        high = (self.mean - self.fewest) / (self.most - self.fewest)
        return (
            (1 - together, self.mean),
            (together * high, self.most),
            (together * (1 - high), self.fewest),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Average progress of a run over the time with each number of GPUs."""

    iteration_seconds: float
    """Seconds of an iteration, over the iterations."""
    iterations_share: float
    """Iterations to the target over those without exploration."""

    @property
    def seconds(self) -> float:
        """Return the seconds of the run over its iterations without exploration: T K / K(0)."""
        return self.iteration_seconds * self.iterations_share


def progress(recipe: Recipe, gpus: GpusAtWork, exponent: float) -> Progress:
    """Return the progress: 1 / T = E[1 / T(n)], and K / K(0) so that 1 / (T K) = E[1 / (T(n) K(n))].

    One node, there for half of the time: 100 s with it and 200 s without, so 133 s on average, and not 120 s, the
    seconds with half a node.
    """
    iterations = done = 0.0
    for part, number in gpus.weights:
        seconds = recipe.seconds(number)
        iterations += part / seconds
        done += part / (seconds * recipe.iterations_share(recipe.candidates_per_prompt(number), exponent))
    return Progress(iteration_seconds=1 / iterations, iterations_share=iterations / done)


def quickest(recipe: Recipe, gpus: GpusAtWork, exponent: float) -> Progress:
    """Return a bound: no variance, and no lower mean, makes more progress between the same `fewest` and `most`."""
    spread = (gpus.mean - gpus.fewest) * (gpus.most - gpus.mean)
    ends = (replace(gpus, variance=max(0.0, spread)), replace(gpus, variance=0.0), GpusAtWork(mean=gpus.fewest))
    return min((progress(recipe, end, exponent) for end in ends), key=lambda found: found.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Nodes to keep running at a site."""

    site: Site
    spot: tuple[int, ...]
    """Nodes in each of `site.zones`."""
    on_demand: int = 0

    @property
    def nodes(self) -> int:
        """Return the number of rollout nodes."""
        return sum(self.spot) + self.on_demand

    @property
    def pools(self) -> tuple[tuple[PricedPool, int], ...]:
        """Return the pools with nodes, and the number of nodes in each."""
        spot = tuple((pool, count) for pool, count in zip(self.site.zones, self.spot, strict=True) if count)
        if not self.on_demand or self.site.on_demand is None:
            return spot
        return (*spot, (self.site.on_demand, self.on_demand))

    @property
    def listed_micro_usd_per_hour(self) -> int:
        """Return the rate with every node running, at the offered prices."""
        rollout = sum(count * pool.offer.micro_usd_per_hour for pool, count in self.pools)
        return self.site.trainer_micro_usd_per_hour + rollout

    @property
    def maximum_micro_usd_per_hour(self) -> int:
        """Return the rate with every node running, at on-demand prices. Spot never costs more."""
        rollout = sum(count * pool.on_demand_micro_usd_per_hour for pool, count in self.pools)
        return self.site.trainer_on_demand_micro_usd_per_hour + rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Forecast of a choice."""

    useful_gpus: float
    """Rollout GPUs at work on average."""
    seconds_per_iteration: float
    iterations: float
    iterations_share: float
    """Iterations over the iterations without exploration."""
    candidates_per_prompt: int
    variance_gain: float
    micro_usd_per_hour: int
    """Average bill of an hour, including traffic."""
    micro_usd: int
    ms: int


def sums(choice: Choice) -> tuple[GpusAtWork, float, int]:
    """Return a choice's GPUs at work, the hourly rate of the rollout nodes in micro-dollars, and the weight copies.

    Each zone with nodes gets a copy of new weights.
    """
    zones, counts = choice.site.zones, choice.spot
    gpus = rate = most = 0.0
    copies = 0
    for pool, count in zip(zones, counts, strict=True):
        gpus += count * pool.workers * pool.value.useful_share
        most += count * pool.workers
        rate += count * pool.value.micro_usd_per_hour
        copies += count > 0
    steady, always = choice.site.on_demand, 0.0
    if choice.on_demand and steady is not None:
        always = choice.on_demand * steady.workers * steady.value.useful_share
        rate += choice.on_demand * steady.value.micro_usd_per_hour
        copies += 1
    variance = gpu_variance(counts, [pool.gpu_spread for pool in zones])
    at_work = GpusAtWork(mean=always + gpus, variance=variance, fewest=always, most=always + most)
    return at_work, rate, copies


def cost(choice: Choice) -> tuple[int, int]:
    """Return C in micro-dollars and K T in milliseconds, both rounded up.

    The rate rises with the nodes' price and C with the rate.
    """
    site, recipe = choice.site, choice.site.recipe
    gpus, nodes_micro_usd_per_hour, copies = sums(choice)
    progress_made = progress(recipe, gpus, recipe.gain_exponent.mean)
    found = paid(recipe, progress_made, site.trainer_micro_usd_per_hour + nodes_micro_usd_per_hour, copies)
    return found if site.trainer_losses is None else _with_losses(site, site.trainer_losses, progress_made, *found)


def _with_losses(site: Site, losses: TrainerLosses, made: Progress, micro_usd: int, ms: int) -> tuple[int, int]:
    """Return C and K T with what the losses of a trainer on spot cost: work that is made again, nodes on demand, waits.

    While a run waits for spot it pays for no node: those without a trainer are given back.
    """
    slower = losses.slower(made.iteration_seconds)
    work_hours = ms / HOUR_MS * slower
    dearer = site.trainer_on_demand_micro_usd_per_hour - site.trainer_micro_usd_per_hour
    on_demand = work_hours * losses.on_demand(work_hours) * max(0, dearer)
    return ceil(micro_usd * slower + on_demand), ceil(losses.hours(work_hours) * HOUR_MS)


def paid(recipe: Recipe, made: Progress, micro_usd_per_hour: float, copies: int) -> tuple[int, int]:
    """Return C in micro-dollars and K T in milliseconds for a progress and an hourly rate of all nodes."""
    number = recipe.iterations.mean
    hours = number * made.seconds / 3600
    traffic = number * made.iterations_share * copies_micro_usd(recipe.copy_bytes, copies)
    return ceil(hours * micro_usd_per_hour + traffic), ceil(hours * HOUR_MS)


def outlook(choice: Choice) -> Outlook:
    """Return the forecast of a choice."""
    return _outlook(choice.site.recipe, sums(choice)[0], *cost(choice))


def on_demand_outlook(choice: Choice) -> Outlook:
    """Return the forecast of the same nodes on demand.

    The forecast favours on-demand nodes: no preemptions, and every node runs at once.
    """
    recipe = choice.site.recipe
    gpus = GpusAtWork(mean=sum(count * pool.workers for pool, count in choice.pools))
    progress_made = progress(recipe, gpus, recipe.gain_exponent.mean)
    return _outlook(recipe, gpus, *paid(recipe, progress_made, choice.maximum_micro_usd_per_hour, sums(choice)[2]))


def _outlook(recipe: Recipe, gpus: GpusAtWork, micro_usd: int, ms: int) -> Outlook:
    candidates = max(recipe.candidates_per_prompt(number) for _, number in gpus.weights)
    progress_made = progress(recipe, gpus, recipe.gain_exponent.mean)
    return Outlook(
        useful_gpus=gpus.mean,
        seconds_per_iteration=progress_made.iteration_seconds,
        iterations=recipe.iterations.mean * progress_made.iterations_share,
        iterations_share=progress_made.iterations_share,
        candidates_per_prompt=candidates,
        variance_gain=recipe.gain(candidates),
        micro_usd_per_hour=round(micro_usd * HOUR_MS / ms),
        micro_usd=micro_usd,
        ms=ms,
    )


def moved_site(site: Site, end: End) -> Site:
    """Return a site with every uncertain figure at its good end, or at its bad end, at once.

    Uncertain are the iterations, the saving by exploration, hazards, uptimes and cold starts. The good end also has the
    free first hour of AWS. The range is wider than a 90 % interval of all of them together.
    """
    steady = site.on_demand
    return replace(
        site,
        recipe=site.recipe.at_end(end),
        zones=tuple(in_one_region([_moved(pool, end) for pool in site.zones])),
        on_demand=None if steady is None else _moved(steady, end),
    )


def _moved(pool: PricedPool, end: End) -> PricedPool:
    is_good, survival = end == "good", pool.survival
    hazards = pool.terms.hazards if survival is None else survival.low if is_good else survival.high
    terms = replace(
        pool.terms,
        hazards=hazards,
        launch_odds=pool.odds.high if is_good else pool.odds.low,
        cold_start_hours=(pool.cold_start.low if is_good else pool.cold_start.high) / HOUR_MS,
        first_hour_free=is_good and is_first_hour_free(pool.offer.cloud, pool.offer.market),
    )
    return revalued(pool, terms)


def share_at_work(site: Site, pool: PricedPool) -> Estimate:
    """Return the share of the time that a slot of this pool has a node at work.

    The ends of the interval are those of the plan: hazards, uptimes and cold starts at their ends, all at once.
    """
    if pool.offer.market is not Market.SPOT:
        return replace(pool.odds, mean=pool.value.useful_share, low=pool.value.useful_share, high=1.0)
    number = site.zones.index(pool)
    low, high = (moved_site(site, end).zones[number].value.useful_share for end in ("bad", "good"))
    return replace(pool.odds, mean=pool.value.useful_share, low=low, high=high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """Limits of a plan: the listed rate, the expected dollars and the expected time. None: no limit."""

    max_hourly_micro_usd: int | None = None
    max_total_micro_usd: int | None = None
    deadline_ms: int | None = None

    @classmethod
    def of(cls, needs: CloudRequirements) -> "Caps":
        return cls(
            max_hourly_micro_usd=needs.max_hourly_micro_usd,
            max_total_micro_usd=needs.max_total_micro_usd,
            deadline_ms=None
            if needs.replays_decide
            else needs.max_runtime_ms
            if needs.deadline_ms is None
            else needs.deadline_ms,
        )

    def keep(self, listed_micro_usd_per_hour: float, micro_usd: int, ms: int) -> bool:
        return (
            (self.max_hourly_micro_usd is None or listed_micro_usd_per_hour <= self.max_hourly_micro_usd)
            and (self.max_total_micro_usd is None or micro_usd <= self.max_total_micro_usd)
            and (self.deadline_ms is None or ms <= self.deadline_ms)
        )
