"""What a plan is made from, as values: what the job asks for, what the market is, and the sites that follow from both.

A site is a region of one cloud with a trainer on demand: all nodes of a plan are in one, because rollout nodes talk to
the trainer all the time, and a copy of the weights across clouds can cost more than the GPU. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from engine.events import Market
from launcher.market.estimate import Estimate
from launcher.market.hazard import (
    ON_DEMAND,
    POOLED,
    SHARE_AT_WORK,
    STEADY,
    Exposure,
    HazardPrior,
    LaunchOdds,
    Pool,
    PoolHistory,
    Survival,
    cold_start,
    learn,
)
from launcher.market.offers import Offer
from launcher.market.quality import USABLE
from launcher.money import HOUR_MS, hourly
from launcher.placement.iteration_time import Recipe
from launcher.placement.value import NodeTerms, SlotValue, cools_until_ms, is_first_hour_free, outage_hours, value_of

HORIZON_MS = 24 * HOUR_MS
"""A node is judged over its first day: half of what the hazards of the research notes were watched for."""

LOST_WORK_MS = 30_000
"""Assumed: eight pictures of 3.5 s each (research notes engine 6) that no notice came in time to commit."""


class Spot(StrEnum):
    """Which rollout nodes may be bought. The trainer is always on demand."""

    AUTO = "auto"
    ONLY = "only"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAsk:
    """What every node of one role needs."""

    accelerator: str
    gpus: int
    infra: str = "*"
    """Where: `cloud`, `cloud/region` or `cloud/region/zone`, any part `*`."""
    instance_type: str | None = None

    def fits(self, offer: Offer) -> bool:
        """Whatever its number of GPUs."""
        cloud, region, zone = [*self.infra.split("/"), "*", "*"][:3]
        return (
            offer.accelerator.lower() == self.accelerator.lower()
            and self.instance_type in (None, offer.instance_type)
            and cloud in ("*", offer.cloud)
            and region in ("*", offer.region)
            and (zone in ("*", offer.zone, offer.zone_id) or not offer.zone)
        )

    def __str__(self) -> str:
        return f"{self.gpus} x {self.accelerator}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudAsk:
    """What a job needs of a cloud, and what it may cost."""

    recipe: Recipe
    trainer: NodeAsk
    """One node with at least so many GPUs, on demand; the fewer, the better."""
    rollout: NodeAsk
    """Nodes with just so many GPUs."""
    max_rollout_nodes: int
    clouds: tuple[str, ...] = ("aws", "gcp")
    spot: Spot = Spot.AUTO
    max_hourly_micro_usd: int | None = None
    max_total_micro_usd: int | None = None
    deadline_ms: int | None = None
    floor_nodes: int = 0
    """Rollout nodes that are expected to be there; what spot lacks is bought on demand."""
    min_rollout_nodes: int = 0
    """Rollout nodes that are bought at least, whether they pay or not."""
    horizon_ms: int = HORIZON_MS
    lost_work_ms: int = LOST_WORK_MS
    policy: str = "ours"
    trainer_gpus_named: int = 0
    """GPUs of the trainer in the job file. A plan looks for as many as the engine uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketView:
    """What is offered, and what is known of each pool; of the others the prior holds."""

    offers: tuple[Offer, ...]
    survival: Mapping[Pool, Survival] = field(default_factory=dict)
    odds: Mapping[Pool, LaunchOdds] = field(default_factory=dict)
    cold_start: Mapping[Pool, Estimate] = field(default_factory=dict)
    cooling: frozenset[Pool] = frozenset()
    """Pools that had no capacity a moment ago."""
    prior: HazardPrior = POOLED


def market_view(
    offers: Iterable[Offer],
    histories: Iterable[PoolHistory] = (),
    *,
    now_ms: int,
    prior: HazardPrior = POOLED,
    priors: Mapping[Pool, HazardPrior] | None = None,
    believed_odds: Mapping[Pool, LaunchOdds] | None = None,
) -> MarketView:
    """Offers beside what the ledger saw of their pools. `priors`, `believed_odds`: what a cloud says of some pools."""
    seen = {history.pool: history for history in histories}
    priors, believed_odds = priors or {}, believed_odds or {}
    return MarketView(
        offers=tuple(offers),
        survival={
            pool: seen.get(pool, PoolHistory(pool=pool)).survival(priors.get(pool, prior)) for pool in {*seen, *priors}
        },
        odds={
            pool: seen.get(pool, PoolHistory(pool=pool)).odds(believed_odds.get(pool, None if pool.zone else ON_DEMAND))
            for pool in {*seen, *believed_odds}
        },
        cold_start={pool: cold_start(history.cold_starts_ms) for pool, history in seen.items()},
        cooling=frozenset(
            pool
            for pool, history in seen.items()
            if (cools_until_ms(history.stock_outs_ms, history.last_launch_ms) or now_ms) > now_ms
        ),
        prior=prior,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedPool:
    """One kind of rollout node, with what it is expected to give."""

    offer: Offer
    on_demand_micro_usd_per_hour: int
    survival: Survival | None
    """None: nobody takes it back."""
    odds: Estimate
    cold_start: Estimate
    terms: NodeTerms
    value: SlotValue
    gpu_spread: float
    """Standard deviation of the node's GPUs that are at work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Something that was on offer and is not bought, and why."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A region that has a trainer, and its rollout nodes: at most one kind to a zone, the cheapest per useful hour."""

    trainer: Offer
    zones: tuple[PricedPool, ...]
    """Spot, cheapest hour first."""
    on_demand: PricedPool | None
    left_out: tuple[LeftOut, ...]

    @property
    def name(self) -> str:
        return f"{self.trainer.cloud} {self.trainer.region}"


def sites_of(ask: CloudAsk, market: MarketView) -> tuple[tuple[Site, ...], tuple[LeftOut, ...]]:
    """Every site that the ask allows, by name; and the regions that are none, with the reason."""
    by_region: dict[tuple[str, str], list[Offer]] = {}
    for offer in _each_once(market.offers):
        if offer.cloud in ask.clouds:
            by_region.setdefault((offer.cloud, offer.region), []).append(offer)
    sites, left_out = [], []
    for (cloud, region), offers in sorted(by_region.items()):
        offered = [
            offer
            for offer in offers
            if offer.market is Market.ON_DEMAND
            and ask.trainer.fits(offer)
            and offer.gpus >= ask.trainer.gpus
            and offer.quality in USABLE
        ]
        # As many GPUs as were asked for, or as few more as are to be had: nobody has timed a trainer with others.
        fewest = min((offer.gpus for offer in offered), default=0)
        trainers = [offer for offer in offered if offer.gpus == fewest and pool_of_offer(offer) not in market.cooling]
        if not trainers:
            wanted = f"no trainer with {ask.trainer} on demand"
            why = f"{wanted} was to be had a moment ago" if offered else f"{wanted} is offered there"
            left_out.append(LeftOut(what=f"{cloud} {region}", why=why))
            continue
        zones, on_demand, refused = _rollout_nodes(ask, market, offers)
        sites += [Site(trainer=trainer, zones=zones, on_demand=on_demand, left_out=refused) for trainer in trainers]
    return tuple(sites), tuple(left_out)


def pool_of_offer(offer: Offer) -> Pool:
    return Pool(cloud=offer.cloud, region=offer.region, zone=offer.zone, instance_type=offer.instance_type)


def priced(ask: CloudAsk, market: MarketView, offer: Offer, on_demand_micro_usd_per_hour: int) -> PricedPool:
    """An offer with what is known of its pool."""
    pool, is_spot = pool_of_offer(offer), offer.market is Market.SPOT
    survival = (market.survival.get(pool) or learn(market.prior, Exposure())) if is_spot else None
    odds = market.odds.get(pool, LaunchOdds() if is_spot else ON_DEMAND).estimate()
    cold = market.cold_start.get(pool) or cold_start()
    terms = NodeTerms(
        micro_usd_per_hour=offer.micro_usd_per_hour,
        hazards=survival.mean if survival else STEADY,
        launch_odds=odds.mean,
        cold_start_hours=cold.mean / HOUR_MS,
        horizon_hours=ask.horizon_ms / HOUR_MS,
        lost_work_hours=ask.lost_work_ms / HOUR_MS,
        first_hour_free=is_first_hour_free(offer.cloud, offer.market),
        outage_hours=outage_hours(SHARE_AT_WORK.mean) if is_spot else 0.0,
    )
    value = value_of(terms)
    return PricedPool(
        offer=offer,
        on_demand_micro_usd_per_hour=on_demand_micro_usd_per_hour,
        survival=survival,
        odds=odds,
        cold_start=cold,
        terms=terms,
        value=value,
        gpu_spread=offer.gpus * value.spread if is_spot else 0.0,
    )


def _rollout_nodes(
    ask: CloudAsk, market: MarketView, offers: Sequence[Offer]
) -> tuple[tuple[PricedPool, ...], PricedPool | None, tuple[LeftOut, ...]]:
    """Spot zones, the on-demand node, and what is left out."""
    fitting = [offer for offer in offers if ask.rollout.fits(offer) and offer.gpus == ask.rollout.gpus]
    steady = [offer for offer in fitting if offer.market is Market.ON_DEMAND and offer.quality in USABLE]
    on_demand = {offer.instance_type: offer.micro_usd_per_hour for offer in steady}
    otherwise = _worst_case(ask.rollout, offers)
    zones: dict[str, PricedPool] = {}
    spot, left_out = [], []
    for offer in fitting:
        if offer.market is Market.SPOT:
            worst_case = on_demand.get(offer.instance_type, otherwise)
            if why := _refusal(market, offer, worst_case):
                left_out.append(LeftOut(what=_place(offer), why=why))
            elif worst_case is not None:
                spot.append(priced(ask, market, offer, worst_case))
    for pool in sorted(spot, key=_index):
        kept = zones.setdefault(pool.offer.zone, pool)
        if kept is not pool:
            why = f"{kept.offer.instance_type} is cheaper there per useful hour"
            left_out.append(LeftOut(what=_place(pool.offer), why=why))
    always = [priced(ask, market, offer, offer.micro_usd_per_hour) for offer in steady]
    cheapest_first = sorted(zones.values(), key=lambda pool: (pool.value.micro_usd_per_hour, pool.offer.zone))
    return tuple(cheapest_first), min(always, key=_index, default=None), tuple(left_out)


def _worst_case(rollout: NodeAsk, offers: Iterable[Offer]) -> int | None:
    """What a node costs at most that is not sold on demand itself: its share of the dearest one with such GPUs.

    An unknown price counts as on demand. $88 for 8 GPUs: $11 for 1.
    """
    shares = [
        -(-offer.micro_usd_per_hour * rollout.gpus // offer.gpus)
        for offer in offers
        if offer.market is Market.ON_DEMAND
        and offer.accelerator.lower() == rollout.accelerator.lower()
        and offer.quality in USABLE
    ]
    return max(shares, default=None)


def _refusal(market: MarketView, offer: Offer, worst_case: int | None) -> str | None:
    """Why a spot offer is not bought; None if it may be."""
    if offer.quality not in USABLE:
        return f"its price {hourly(offer.micro_usd_per_hour)} is not believed: {offer.quality.value}"
    if worst_case is None:
        return "there is no believable on-demand price beside it, so its worst case cannot be said"
    if offer.micro_usd_per_hour >= worst_case:
        return "it is no cheaper than on demand"
    if pool_of_offer(offer) in market.cooling:
        return "it had no capacity a moment ago"
    return None


def _index(pool: PricedPool) -> tuple[float, str]:
    return (pool.value.micro_usd_per_useful_hour, pool.offer.instance_type)


def _each_once(offers: Iterable[Offer]) -> list[Offer]:
    """In an order of their own; of two prices for the same thing the dearer one counts."""
    kept: dict[tuple[str, ...], Offer] = {}
    for offer in offers:
        key = (offer.cloud, offer.region, offer.zone, offer.instance_type, offer.market.value)
        if key not in kept or _dearer(offer) > _dearer(kept[key]):
            kept[key] = offer
    return [kept[key] for key in sorted(kept)]


def _dearer(offer: Offer) -> tuple[int, str, str, str]:
    return (offer.micro_usd_per_hour, offer.observed_at, offer.source, offer.source_id)


def _place(offer: Offer) -> str:
    return f"{offer.instance_type} in {offer.zone or offer.region}"
