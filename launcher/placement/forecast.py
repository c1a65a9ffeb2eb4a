"""Forecast a choice of nodes: hours and dollars to the target, with an interval. Pure.

C = K [ T (P_T + sum over zones of n_z b_z) + e G m ]      (ours; docs/cost-model.md)

K: iterations. T: hours of an iteration. P_T: the trainer's price per hour, of all its nodes. e: traffic price per GB.
G: GB of new weights. m: copies of the weights per iteration. n_z slots in zone z are each at work for a share u_z of
the time and cost b_z an hour by the clock (`launcher/placement/value.py`). T and K follow from the GPUs at work over
time (`launcher/placement/iteration_time.py`). C is the objective of every plan: two choices are compared by C alone.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from engine.events import Market
from launcher.market.estimate import Estimate
from launcher.money import HOUR_MS
from launcher.placement.iteration_time import (
    GpusAtWork,
    Progress,
    Recipe,
    candidates_per_prompt,
    gain_of,
    progress,
)
from launcher.placement.requirements import CloudRequirements, PricedPool, Site, in_one_region, revalued
from launcher.placement.value import copies_micro_usd, gpu_variance, is_first_hour_free


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


def cost(
    recipe: Recipe,
    trainer_micro_usd_per_hour: int,
    gpus: GpusAtWork,
    nodes_micro_usd_per_hour: float,
    copies: int,
    iterations: float | None = None,
    exponent: float | None = None,
) -> tuple[int, int]:
    """Return C in micro-dollars and K T in milliseconds, both rounded up.

    `iterations` and `exponent` default to the values of the recipe. The rate rises with the nodes' price and C with the
    rate.
    """
    exponent = recipe.gain_exponent.mean if exponent is None else exponent
    hourly = trainer_micro_usd_per_hour + nodes_micro_usd_per_hour
    return paid(recipe, progress(recipe, gpus, exponent), hourly, copies, iterations)


def paid(
    recipe: Recipe, made: Progress, micro_usd_per_hour: float, copies: int, iterations: float | None = None
) -> tuple[int, int]:
    """Return C in micro-dollars and K T in milliseconds for a progress and an hourly rate of all nodes."""
    number = recipe.iterations.mean if iterations is None else iterations
    hours = number * made.seconds / 3600
    traffic = number * made.iterations_share * copies_micro_usd(recipe.copy_bytes, copies)
    return ceil(hours * micro_usd_per_hour + traffic), ceil(hours * HOUR_MS)


def outlook(needs: CloudRequirements, choice: Choice) -> Outlook:
    """Return the forecast of a choice."""
    recipe = needs.recipe.on(choice.site.trainer.gpus)
    gpus, rate, copies = sums(choice)
    micro_usd, ms = cost(recipe, choice.site.trainer_micro_usd_per_hour, gpus, rate, copies)
    return _outlook(recipe, gpus, micro_usd, ms)


def on_demand_outlook(needs: CloudRequirements, choice: Choice) -> Outlook:
    """Return the forecast of the same nodes on demand.

    The forecast favours on-demand nodes: no preemptions, and every node runs at once.
    """
    recipe = needs.recipe.on(choice.site.trainer.gpus)
    gpus = GpusAtWork(mean=sum(count * pool.workers for pool, count in choice.pools))
    rate = sum(count * pool.on_demand_micro_usd_per_hour for pool, count in choice.pools)
    micro_usd, ms = cost(recipe, choice.site.trainer_on_demand_micro_usd_per_hour, gpus, rate, sums(choice)[2])
    return _outlook(recipe, gpus, micro_usd, ms)


def _outlook(recipe: Recipe, gpus: GpusAtWork, micro_usd: int, ms: int) -> Outlook:
    candidates = max(candidates_per_prompt(recipe, number) for _, number in gpus.weights)
    made = progress(recipe, gpus, recipe.gain_exponent.mean)
    return Outlook(
        useful_gpus=gpus.mean,
        seconds_per_iteration=made.iteration_seconds,
        iterations=recipe.iterations.mean * made.iterations_share,
        iterations_share=made.iterations_share,
        candidates_per_prompt=candidates,
        variance_gain=gain_of(recipe.cost.images_per_prompt, candidates, recipe.rho),
        micro_usd_per_hour=round(micro_usd * HOUR_MS / ms),
        micro_usd=micro_usd,
        ms=ms,
    )


End = Literal["good", "bad"]


def at_the_end(needs: CloudRequirements, choice: Choice, end: End) -> tuple[int, int]:
    """Return micro-dollars and milliseconds with every uncertain figure at its good end, or at its bad end, at once.

    Uncertain are the iterations, the saving by exploration, hazards, uptimes and cold starts. The good end also has the
    free first hour of AWS. The range is wider than a 90 % interval of all of them together.
    """
    recipe = needs.recipe.on(choice.site.trainer.gpus)
    site = moved_site(choice.site, end)
    is_good = end == "good"
    iterations = recipe.iterations.low if is_good else recipe.iterations.high
    exponent = recipe.gain_exponent.high if is_good else recipe.gain_exponent.low
    moved = replace(choice, site=site)
    return cost(recipe, site.trainer_micro_usd_per_hour, *sums(moved), iterations=iterations, exponent=exponent)


def moved_site(site: Site, end: End) -> Site:
    """Return a site with the uncertain figures of every pool at an end."""
    steady = site.on_demand
    return replace(
        site,
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
            deadline_ms=needs.max_runtime_ms if needs.deadline_ms is None else needs.deadline_ms,
        )

    def keep(self, listed_micro_usd_per_hour: float, micro_usd: int, ms: int) -> bool:
        return (
            (self.max_hourly_micro_usd is None or listed_micro_usd_per_hour <= self.max_hourly_micro_usd)
            and (self.max_total_micro_usd is None or micro_usd <= self.max_total_micro_usd)
            and (self.deadline_ms is None or ms <= self.deadline_ms)
        )
