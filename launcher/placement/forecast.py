"""Forecast a choice of nodes: hours and dollars to the target, with an interval. Pure.

C = K [ T (P_T + sum over zones of n_z b_z) + e G m ]      (research notes cost 4.2)

K: iterations. T: hours of an iteration. P_T: the trainer's price per hour. e: traffic price per GB. G: GB of new
weights. m: copies of the weights per iteration. n_z slots in zone z are each at work for a share u_z of the time and
cost b_z an hour by the clock (`launcher/placement/value.py`). T and K follow from the GPUs at work
(`launcher/placement/iteration_time.py`). C is the objective of every plan: two choices are compared by C alone.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from engine.events import Market
from launcher.market.estimate import Estimate
from launcher.market.hazard import usual_share_at_work
from launcher.money import HOUR_MS
from launcher.placement.iteration_time import (
    Recipe,
    candidates_per_prompt,
    gain_of,
    iteration_seconds,
    iterations_share,
)
from launcher.placement.requirements import CloudRequirements, PricedPool, Site
from launcher.placement.value import copies_micro_usd, gpu_variance, outage_hours, useful_share, value_of


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
        return self.site.trainer.micro_usd_per_hour + rollout

    @property
    def maximum_micro_usd_per_hour(self) -> int:
        """Return the rate with every node running, at on-demand prices. Spot never costs more."""
        rollout = sum(count * pool.on_demand_micro_usd_per_hour for pool, count in self.pools)
        return self.site.trainer.micro_usd_per_hour + rollout


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


def sums(choice: Choice) -> tuple[float, float, float, int]:
    """Return a choice's GPUs at work, their variance, the hourly rate of the rollout nodes, and the weight copies.

    The rate is in micro-dollars. Each zone with nodes gets a copy of new weights.
    """
    zones, counts = choice.site.zones, choice.spot
    gpus = rate = 0.0
    copies = 0
    for pool, count in zip(zones, counts, strict=True):
        gpus += count * pool.offer.gpus * pool.value.useful_share
        rate += count * pool.value.micro_usd_per_hour
        copies += count > 0
    steady = choice.site.on_demand
    if choice.on_demand and steady is not None:
        gpus += choice.on_demand * steady.offer.gpus * steady.value.useful_share
        rate += choice.on_demand * steady.value.micro_usd_per_hour
        copies += 1
    return gpus, gpu_variance(counts, [pool.gpu_spread for pool in zones]), rate, copies


def cost(
    recipe: Recipe,
    trainer_micro_usd_per_hour: int,
    gpus: float,
    variance: float,
    nodes_micro_usd_per_hour: float,
    copies: int,
    iterations: float | None = None,
    exponent: float | None = None,
) -> tuple[int, int]:
    """Return C in micro-dollars and K T in milliseconds, both rounded up.

    `iterations` and `exponent` default to the values of the recipe. The rate rises with the nodes' price and C with the
    rate. C and the hours fall with `gpus` and rise with `variance`. The search relies on both.
    """
    exponent = recipe.gain_exponent.mean if exponent is None else exponent
    share = iterations_share(recipe, candidates_per_prompt(recipe, gpus), exponent)
    number = (recipe.iterations.mean if iterations is None else iterations) * share
    hours = number * iteration_seconds(recipe.cost, gpus, variance) / 3600
    paid = hours * (trainer_micro_usd_per_hour + nodes_micro_usd_per_hour)
    return ceil(paid + number * copies_micro_usd(recipe.copy_bytes, copies)), ceil(hours * HOUR_MS)


def outlook(needs: CloudRequirements, choice: Choice) -> Outlook:
    """Return the forecast of a choice."""
    recipe = needs.recipe.on(choice.site.trainer.gpus)
    gpus, variance, rate, copies = sums(choice)
    micro_usd, ms = cost(recipe, choice.site.trainer.micro_usd_per_hour, gpus, variance, rate, copies)
    return _outlook(recipe, gpus, variance, micro_usd, ms)


def on_demand_outlook(needs: CloudRequirements, choice: Choice) -> Outlook:
    """Return the forecast of the same nodes on demand.

    The forecast favours on-demand nodes: no preemptions, and every node runs at once.
    """
    recipe = needs.recipe.on(choice.site.trainer.gpus)
    gpus = sum(count * pool.offer.gpus for pool, count in choice.pools)
    rate = sum(count * pool.on_demand_micro_usd_per_hour for pool, count in choice.pools)
    micro_usd, ms = cost(recipe, choice.site.trainer.micro_usd_per_hour, gpus, 0.0, rate, sums(choice)[3])
    return _outlook(recipe, gpus, 0.0, micro_usd, ms)


def _outlook(recipe: Recipe, gpus: float, variance: float, micro_usd: int, ms: int) -> Outlook:
    candidates = candidates_per_prompt(recipe, gpus)
    share = iterations_share(recipe, candidates, recipe.gain_exponent.mean)
    return Outlook(
        useful_gpus=gpus,
        seconds_per_iteration=iteration_seconds(recipe.cost, gpus, variance),
        iterations=recipe.iterations.mean * share,
        iterations_share=share,
        candidates_per_prompt=candidates,
        variance_gain=gain_of(recipe.cost.images_per_prompt, candidates, recipe.rho),
        micro_usd_per_hour=round(micro_usd * HOUR_MS / ms),
        micro_usd=micro_usd,
        ms=ms,
    )


End = Literal["good", "bad"]


def at_the_end(needs: CloudRequirements, choice: Choice, end: End) -> tuple[int, int]:
    """Return micro-dollars and milliseconds with every uncertain figure at its good end, or at its bad end, at once.

    Uncertain are the iterations, the saving by exploration, hazards, launches and cold starts. The range is wider than
    a 90 % interval of all of them together.
    """
    site, recipe = choice.site, needs.recipe.on(choice.site.trainer.gpus)
    steady = site.on_demand
    moved = replace(
        choice,
        site=replace(
            site,
            zones=tuple(_moved(pool, end) for pool in site.zones),
            on_demand=None if steady is None else _moved(steady, end),
        ),
    )
    is_good = end == "good"
    iterations = recipe.iterations.low if is_good else recipe.iterations.high
    exponent = recipe.gain_exponent.high if is_good else recipe.gain_exponent.low
    return cost(recipe, site.trainer.micro_usd_per_hour, *sums(moved), iterations=iterations, exponent=exponent)


def _moved(pool: PricedPool, end: End) -> PricedPool:
    is_good, survival = end == "good", pool.survival
    is_spot, share = pool.offer.market is Market.SPOT, usual_share_at_work(pool.offer.gpus)
    hazards = pool.terms.hazards if survival is None else survival.low if is_good else survival.high
    terms = replace(
        pool.terms,
        hazards=hazards,
        launch_odds=pool.odds.high if is_good else pool.odds.low,
        cold_start_hours=(pool.cold_start.low if is_good else pool.cold_start.high) / HOUR_MS,
        outage_hours=outage_hours(share.high if is_good else share.low, pool.usual) if is_spot else 0.0,
    )
    value = value_of(terms)
    return replace(pool, terms=terms, value=value, gpu_spread=pool.offer.gpus * value.spread if is_spot else 0.0)


def share_at_work(pool: PricedPool) -> Estimate:
    """Return the share of the time that a slot of this pool has a node at work.

    The ends of the interval come from short and long outages.
    """
    if pool.offer.market is not Market.SPOT:
        return replace(pool.odds, mean=pool.value.useful_share, low=pool.value.useful_share, high=1.0)
    usual = usual_share_at_work(pool.offer.gpus)
    low, high = (
        useful_share(replace(pool.terms, outage_hours=outage_hours(share, pool.usual)))
        for share in (usual.low, usual.high)
    )
    return replace(usual, mean=pool.value.useful_share, low=low, high=high)


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
