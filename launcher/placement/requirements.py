"""Inputs of a plan as values: the job's needs, the market, and the sites that follow from both.

A site is a region of one cloud that offers a trainer on demand, and on spot if the job wants it there. All nodes of a
plan are at one site, because rollout nodes talk to the trainer all the time, and a copy of the weights across clouds
can cost more than the GPU. Pure.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

from engine.events import Market
from engine.trainer_ranks import ranks_of_each_node
from launcher.job.recipe import Recipe
from launcher.job.resolved import Resolved
from launcher.market.estimate import Estimate
from launcher.market.evidence import Exposure
from launcher.market.hazard import (
    ON_DEMAND,
    POOLED,
    STEADY,
    HazardPrior,
    LaunchOdds,
    PoolHistory,
    Survival,
    around,
    cold_start,
    learn,
    prior_of,
    usual_odds,
)
from launcher.market.offers import Offer
from launcher.market.pools import Pool
from launcher.market.quality import USABLE
from launcher.market.spells import Spells, ZoneSpells, chance_elsewhere
from launcher.money import HOUR_MS, hourly
from launcher.placement.disk import BootDisk
from launcher.placement.price_of_waiting import CHANGE_HOURS
from launcher.placement.value import DEAR, NodeTerms, SlotValue, cools_until_ms, life_hours, value_of

HORIZON_MS = 24 * HOUR_MS
"""Horizon of a node's value, in milliseconds. One day is half of the 48 h over which hazards were observed
(launcher/market/hazard.py)."""

LOST_WORK_MS = 30_000
"""Work lost by a preemption, in milliseconds. Assumed: eight images of 3.5 s each, lost because no notice left time
to commit."""


class Spot(StrEnum):
    """Capacity types allowed for rollout nodes. `CloudRequirements.trainer_on_spot` says how the trainer is bought."""

    AUTO = "auto"
    ONLY = "only"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRequirements:
    """Requirements of the nodes of one role."""

    accelerator: str
    gpus: int
    infra: str = "*"
    """Allowed places: `cloud`, `cloud/region` or `cloud/region/zone`, any part `*`."""
    instance_type: str | None = None
    pool_gpus: int = 0
    """GPUs of a node that only score, so they make no images."""

    @property
    def workers(self) -> int:
        """Return the GPUs of a node that sample."""
        return self.gpus - self.pool_gpus

    def fits(self, offer: Offer) -> bool:
        """Return whether the offer fits, with any number of GPUs."""
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


CHECKPOINT_BYTES_PER_SECOND = 460e6
"""Of one process that writes a checkpoint, measured on two cores (tests/benchmarks/results/large_weights.md)."""

STATE_COPIES = 4
"""Tensors of a checkpoint as large as the trained weights in fp32: weights, both moments, and an average of weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudRequirements:
    """Needs of a job on the clouds, and its limits."""

    recipe: Recipe
    trainer: NodeRequirements
    """A node of the trainer, with at least this many GPUs; the fewer, the better. The trainer has
    `recipe.trainer_nodes` equal nodes."""
    rollout: NodeRequirements
    """Nodes with exactly this many GPUs."""
    max_rollout_nodes: int
    clouds: tuple[str, ...] = ("aws", "gcp")
    spot: Spot = Spot.AUTO
    max_hourly_micro_usd: int | None = None
    max_total_micro_usd: int | None = None
    judge_micro_usd: int = 0
    """Budget of paid judges, which is not part of `max_total_micro_usd`."""
    deadline_ms: int | None = None
    max_runtime_ms: int | None = None
    """Time after which the run ends, done or not. None: at the deadline."""
    floor_nodes: int = 0
    """Smallest average number of rollout nodes at work. If spot alone gives fewer, on-demand nodes are added."""
    min_rollout_nodes: int = 0
    """Smallest number of rollout nodes to buy, even if the plan expects no saving."""
    horizon_ms: int = HORIZON_MS
    lost_work_ms: int = LOST_WORK_MS
    checkpoint_every: int = 1
    """Iterations between two checkpoints."""
    paced_checkpoint_bytes: int = 0
    """Bytes of a checkpoint whose interval follows from its seconds and the trainer's life. 0: `checkpoint_every`."""
    replays_decide: bool = False
    """True: whether a plan meets its deadline is left to its replays, which buy nodes on demand when late."""
    policy: str = "ours"
    trainer_gpus_named: int = 0
    """GPUs of a trainer node in the job file. A plan looks for as many GPUs as the engine uses."""
    trainer_on_spot: bool = False
    """True: the trainer is bought on spot. A region that sells it on demand too can bear an outage (waiting.py)."""
    stands_in: bool = True
    """False: nothing is bought on demand in place of missing spot (`spot: only`)."""
    disk: BootDisk | None = None
    """Boot disk of every node. None: the least."""
    least_trainer_gpus: int | None = None
    """GPUs of the smallest node on which the job can train. None: `trainer.gpus`. A node with fewer than `trainer.gpus`
    counts where every larger node would have idle GPUs."""


def cloud_requirements(resolved: Resolved, disk: BootDisk | None = None) -> CloudRequirements:
    """Return the needs of a job and the disk of its nodes, as the planner's input.

    A job without timings needs all rollout nodes that the job file allows, because the number of nodes that pay is
    unknown.
    """
    job = resolved.job
    trainer, rollout = job.resources.trainer, job.resources.rollout
    min_nodes = rollout.min_nodes
    if min_nodes is None:
        min_nodes = rollout.num_nodes if resolved.seconds is None else 0
    return CloudRequirements(
        recipe=resolved.recipe,
        trainer=NodeRequirements(
            accelerator=trainer.accelerator,
            gpus=ranks_of_each_node(resolved.ranks, trainer.num_nodes),
            infra=trainer.infra or "*",
            instance_type=trainer.instance_type,
        ),
        trainer_gpus_named=trainer.gpus,
        # Sharded weights need the memory of all GPUs that were checked.
        least_trainer_gpus=1 if job.runtime.trainer_ranks == "auto" and job.model.weights == "lora" else None,
        rollout=NodeRequirements(
            accelerator=rollout.accelerator,
            gpus=rollout.gpus,
            infra=rollout.infra or "*",
            instance_type=rollout.instance_type,
            pool_gpus=job.reward.pool_gpus,
        ),
        max_rollout_nodes=rollout.num_nodes,
        min_rollout_nodes=min_nodes,
        clouds=job.clouds,
        checkpoint_every=1 if job.checkpoint.every == "auto" else job.checkpoint.every,
        paced_checkpoint_bytes=STATE_COPIES * resolved.trained_bytes
        if job.checkpoint.every == "auto" and job.model.weights == "full"
        else 0,
        trainer_on_spot=job.trains_on_spot,
        stands_in=job.spot == "auto",
        spot=Spot(job.spot) if job.rolls_out_on_spot else Spot.NEVER,
        max_hourly_micro_usd=job.budget.max_hourly,
        max_total_micro_usd=job.nodes_max_total,
        judge_micro_usd=job.reward.judge_micro_usd,
        deadline_ms=job.budget.deadline,
        max_runtime_ms=job.budget.max_runtime,
        disk=disk,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketView:
    """Offers, and observations of their pools. Pools without observations get the prior."""

    offers: tuple[Offer, ...]
    survival: Mapping[Pool, Survival] = field(default_factory=dict)
    odds: Mapping[Pool, LaunchOdds] = field(default_factory=dict)
    cold_start: Mapping[Pool, Estimate] = field(default_factory=dict)
    cooling: frozenset[Pool] = frozenset()
    """Pools in cool-down, because a recent request found no capacity."""
    prior: HazardPrior | None = None
    """Prior of every spot pool. None: that of the kind of node."""


def market_view(
    offers: Iterable[Offer],
    histories: Iterable[PoolHistory] = (),
    *,
    now_ms: int,
    prior: HazardPrior | None = None,
    priors: Mapping[Pool, HazardPrior] | None = None,
    believed_odds: Mapping[Pool, LaunchOdds] | None = None,
) -> MarketView:
    """Combine offers with the ledger's history of their pools.

    `priors`, `believed_odds`: a cloud's own estimates for some pools.
    """
    offers = tuple(offers)
    by_pool = {history.pool: history for history in histories}
    kinds = {pool_of_offer(offer): prior_of(offer.accelerator, offer.gpus) for offer in offers}
    usual = {pool_of_offer(offer): _usual(offer) for offer in offers if offer.market is Market.SPOT}
    priors, believed_odds = priors or {}, usual | dict(believed_odds or {})
    return MarketView(
        offers=offers,
        survival={
            pool: by_pool.get(pool, PoolHistory(pool=pool)).survival(
                priors.get(pool) or prior or kinds.get(pool, POOLED), now_ms, around(pool, by_pool.values())
            )
            for pool in {*by_pool, *priors, *kinds}
        },
        odds={
            pool: by_pool.get(pool, PoolHistory(pool=pool)).odds(
                believed_odds.get(pool, None if pool.zone else ON_DEMAND)
            )
            for pool in {*by_pool, *believed_odds}
        },
        cold_start={pool: cold_start(history.cold_starts_ms) for pool, history in by_pool.items()},
        cooling=frozenset(
            pool
            for pool, history in by_pool.items()
            if (cools_until_ms(history.stock_outs_ms, history.last_launch_ms) or now_ms) > now_ms
        ),
        prior=prior,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedPool:
    """A kind of rollout node, with its expected value."""

    offer: Offer
    on_demand_micro_usd_per_hour: int
    survival: Survival | None
    """None: the cloud never preempts the node."""
    odds: Estimate
    cold_start: Estimate
    terms: NodeTerms
    value: SlotValue
    workers: int
    """GPUs of a node that sample."""
    gpu_spread: float
    """Standard deviation of the node's workers at work."""

    @property
    def spells(self) -> ZoneSpells:
        """Return the spells that the plan expects of a spot pool."""
        offer = self.offer
        return ZoneSpells(
            cloud=offer.cloud,
            region=offer.region,
            zone=offer.zone,
            instance_type=offer.instance_type,
            spells=Spells(hazards=self.terms.hazards, uptime=self.terms.launch_odds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """An offer or region that is not bought, with the reason."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLosses:
    """How often a trainer on spot is lost in a region, and what is done about it."""

    share: float
    """Share of time with spot for it in the region."""
    life_hours: float
    """Mean hours until a node of it is lost."""
    checkpoint_every: int
    """Iterations between two checkpoints."""
    deadline_hours: float
    """inf: none, or the run may buy nothing on demand, so it waits for spot in any case."""

    def slower(self, seconds_per_iteration: float) -> float:
        """Return how many times as much work a run does: 1 + s (lost + change) / L.

        s: the share. L: the life. A loss costs half of the work between two checkpoints, and the time until the next
        node trains.
        """
        lost_hours = self.checkpoint_every * seconds_per_iteration / 3600 / 2 + CHANGE_HOURS
        return 1 + self.share * lost_hours / max(self.life_hours, CHANGE_HOURS)

    def on_demand(self, work_hours: float) -> float:
        """Return the share f of the work W that is done on demand: max((1 - s) min(1, 2 W / D), 1 - s D / W).

        D: the deadline. Without spot a run waits as long as it has time. Fitted: of one zone with s = .45, replays did
        24 % of the work on demand where D was 5.8 W, and 6 % where D was 19 W (plan_search, qwen_image_ocr and
        wan_video). Below D = 2 W, and where spot alone would be late, the formula is assumed.
        """
        waits = work_hours / self.deadline_hours
        late = 0.0 if not waits else 1 - self.share / waits
        return min(1.0, max((1 - self.share) * min(1.0, 2 * waits), late))

    def hours(self, work_hours: float) -> float:
        """Return the hours until work is done: W (f + (1 - f) / s), and no more than the deadline if W allows it."""
        on_demand = self.on_demand(work_hours)
        takes = work_hours * (on_demand + (1 - on_demand) / self.share)
        return max(work_hours, min(takes, self.deadline_hours))


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A region with a trainer, and its rollout nodes: at most one kind per zone, the cheapest per useful hour."""

    trainer: Offer
    """A node of the trainer on demand."""
    zones: tuple[PricedPool, ...]
    """Spot pools, cheapest hour first."""
    on_demand: PricedPool | None
    left_out: tuple[LeftOut, ...]
    recipe: Recipe
    """The job's recipe on this trainer."""
    trainer_zones: tuple[PricedPool, ...] = ()
    """Spot pools of the trainer, cheapest hour first. Empty: the trainer is on demand."""
    trainer_losses: TrainerLosses | None = None
    """None: the trainer is on demand."""

    @property
    def trainer_nodes(self) -> int:
        """Return the number of equal nodes of the trainer."""
        return self.recipe.trainer_nodes

    @property
    def planned_trainer(self) -> Offer:
        """Return the offer that the plan prefers for the trainer."""
        return self.trainer_zones[0].offer if self.trainer_zones else self.trainer

    @property
    def name(self) -> str:
        return f"{self.trainer.cloud} {self.trainer.region}"

    @property
    def trainer_micro_usd_per_hour(self) -> int:
        """Return the rate of all nodes of the trainer, on spot or on demand as planned."""
        return self.trainer_nodes * self.planned_trainer.micro_usd_per_hour

    @property
    def trainer_on_demand_micro_usd_per_hour(self) -> int:
        return self.trainer_nodes * self.trainer.micro_usd_per_hour


RolloutNodes = tuple[tuple[PricedPool, ...], PricedPool | None, tuple[LeftOut, ...]]
"""The spot pool of each zone of a region, its on-demand pool, and the offers left out."""

TrainerZones = tuple[tuple[PricedPool, ...], tuple[LeftOut, ...]]
"""The spot pools of a trainer in a region, one for each zone, and the offers left out."""


@dataclass(frozen=True, slots=True)
class MarketNodes:
    """The nodes that one market offers, for jobs that differ only in their nodes."""

    rollout: dict[tuple[str, str, NodeRequirements], RolloutNodes] = field(default_factory=dict)
    """By cloud, region and requirements."""
    trainer: dict[tuple[Offer, NodeRequirements, bool], TrainerZones] = field(default_factory=dict)
    """By offer on demand, requirements, and whether the trainer is on spot."""


def sites_of(
    needs: CloudRequirements, market: MarketView, known: MarketNodes | None = None
) -> tuple[tuple[Site, ...], tuple[LeftOut, ...]]:
    """Return every site that the needs allow, by name; and the regions without a site, with the reason.

    `known`: nodes of the same market that earlier calls found; what this call finds is added.
    """
    known = known or MarketNodes()
    recipes: dict[int, Recipe] = {}
    by_region: dict[tuple[str, str], list[Offer]] = {}
    for offer in _each_once(market.offers):
        if offer.cloud in needs.clouds:
            by_region.setdefault((offer.cloud, offer.region), []).append(offer)
    sites, left_out = [], []
    for (cloud, region), offers in sorted(by_region.items()):
        offered = [
            offer
            for offer in offers
            if offer.market is Market.ON_DEMAND and needs.trainer.fits(offer) and offer.quality in USABLE
        ]
        sizes = _trainer_sizes(needs, {offer.gpus for offer in offered})
        offered = [offer for offer in offered if offer.gpus in sizes]
        trainers = [offer for offer in offered if pool_of_offer(offer) not in market.cooling]
        if not trainers:
            missing = f"no trainer with {trainer_text(needs)} on demand"
            why = f"{missing} was to be had a moment ago" if offered else f"{missing} is offered there"
            left_out.append(LeftOut(what=f"{cloud} {region}", why=why))
            continue
        region_key = (cloud, region, needs.rollout)
        if region_key not in known.rollout:
            known.rollout[region_key] = _rollout_nodes(needs, market, offers)
        zones, on_demand, refused = known.rollout[region_key]
        for trainer in trainers:
            trainer_key = (trainer, needs.trainer, needs.trainer_on_spot)
            if trainer_key not in known.trainer:
                known.trainer[trainer_key] = _trainer_zones(needs, market, offers, trainer)
            on_spot, no_spot = known.trainer[trainer_key]
            if needs.trainer_on_spot and not on_spot:
                text = f"no trainer with {trainer_text(needs)} on spot is to be had there"
                left_out += [LeftOut(what=f"{cloud} {region}", why=text), *no_spot]
                continue
            if trainer.gpus not in recipes:
                recipes[trainer.gpus] = needs.recipe.on(trainer.gpus)
            sites.append(
                Site(
                    trainer=trainer,
                    zones=zones,
                    on_demand=on_demand,
                    left_out=(*refused, *no_spot),
                    recipe=recipes[trainer.gpus],
                    trainer_zones=on_spot,
                    trainer_losses=_losses(needs, on_spot),
                )
            )
    return tuple(sites), tuple(left_out)


def trainer_text(needs: CloudRequirements) -> str:
    """Return the trainer that a job needs, like `2 x H100`, or `2 nodes of 4 x H100`."""
    nodes = needs.recipe.trainer_nodes
    return f"{nodes} nodes of {needs.trainer}" if nodes > 1 else str(needs.trainer)


def _trainer_sizes(needs: CloudRequirements, sold: Collection[int]) -> set[int]:
    """Return the numbers of GPUs of a trainer node to compare, of the numbers that a region sells.

    The smallest number that is not below the requested number. If some of its GPUs would not train, also the largest
    smaller number whose GPUs all train. The cheaper plan of the two is chosen.
    """
    gpus_needed = needs.trainer.gpus
    least = gpus_needed if needs.least_trainer_gpus is None else needs.least_trainer_gpus
    enough = {min(gpus for gpus in sold if gpus >= gpus_needed)} if any(gpus >= gpus_needed for gpus in sold) else set()
    if any(map(needs.recipe.every_gpu_trains, enough)):
        return enough
    smaller = [gpus for gpus in sold if least <= gpus < gpus_needed and needs.recipe.every_gpu_trains(gpus)]
    return enough | ({max(smaller)} if smaller else set())


def _usual(offer: Offer) -> LaunchOdds:
    return usual_odds(offer.accelerator, offer.gpus, offer.cloud, offer.region)


def pool_of_offer(offer: Offer) -> Pool:
    return Pool(cloud=offer.cloud, region=offer.region, zone=offer.zone, instance_type=offer.instance_type)


def priced(needs: CloudRequirements, market: MarketView, offer: Offer, on_demand_micro_usd_per_hour: int) -> PricedPool:
    """Return an offer with the estimates for its pool."""
    pool, is_spot = pool_of_offer(offer), offer.market is Market.SPOT
    prior = market.prior or prior_of(offer.accelerator, offer.gpus)
    survival = (market.survival.get(pool) or learn(prior, Exposure())) if is_spot else None
    odds = (market.odds.get(pool) or (_usual(offer) if is_spot else ON_DEMAND)).estimate()
    cold = market.cold_start.get(pool) or cold_start()
    terms = NodeTerms(
        micro_usd_per_hour=offer.micro_usd_per_hour,
        hazards=survival.mean if survival else STEADY,
        launch_odds=odds.mean,
        cold_start_hours=cold.mean / HOUR_MS,
        horizon_hours=needs.horizon_ms / HOUR_MS,
        lost_work_hours=needs.lost_work_ms / HOUR_MS,
        first_hour_free=False,
        elsewhere=0.0 if is_spot else None,
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
        workers=offer.gpus - needs.rollout.pool_gpus,
        gpu_spread=(offer.gpus - needs.rollout.pool_gpus) * value.spread if is_spot else 0.0,
    )


def in_one_region(pools: Sequence[PricedPool]) -> list[PricedPool]:
    """Return the spot pools of a region, each with the chance that another pool has capacity when it has none.

    A slot goes to any zone of the region that is not dear (`DEAR`).
    """
    lowest = min((pool.offer.micro_usd_per_hour for pool in pools), default=0)
    near = [pool for pool in pools if pool.offer.micro_usd_per_hour <= DEAR * lowest]
    revalued_pools = []
    for pool in pools:
        no_capacity = (1 - other.terms.launch_odds for other in near if other is not pool)
        terms = replace(pool.terms, elsewhere=chance_elsewhere(1 - pool.terms.launch_odds, no_capacity))
        revalued_pools.append(revalued(pool, terms))
    return revalued_pools


def revalued(pool: PricedPool, terms: NodeTerms) -> PricedPool:
    """Return the pool on other terms."""
    value, is_spot = value_of(terms), pool.offer.market is Market.SPOT
    return replace(pool, terms=terms, value=value, gpu_spread=pool.workers * value.spread if is_spot else 0.0)


def _rollout_nodes(needs: CloudRequirements, market: MarketView, offers: Sequence[Offer]) -> RolloutNodes:
    """Return the spot pool of each zone, the on-demand pool, and the offers left out."""
    fitting = [offer for offer in offers if needs.rollout.fits(offer) and offer.gpus == needs.rollout.gpus]
    steady = [offer for offer in fitting if offer.market is Market.ON_DEMAND and offer.quality in USABLE]
    on_demand = {offer.instance_type: offer.micro_usd_per_hour for offer in steady}
    otherwise = _worst_case(needs.rollout, offers)
    zones: dict[str, PricedPool] = {}
    spot, left_out = [], []
    for offer in fitting:
        if offer.market is Market.SPOT:
            worst_case = on_demand.get(offer.instance_type, otherwise)
            if why := _refusal(market, offer, worst_case):
                left_out.append(LeftOut(what=_place(offer), why=why))
            elif worst_case is not None:
                spot.append(priced(needs, market, offer, worst_case))
    for pool in sorted(spot, key=_index):
        kept = zones.setdefault(pool.offer.zone, pool)
        if kept is not pool:
            why = f"{kept.offer.instance_type} is cheaper there per useful hour"
            left_out.append(LeftOut(what=_place(pool.offer), why=why))
    always = [priced(needs, market, offer, offer.micro_usd_per_hour) for offer in steady]
    cheapest_first = sorted(
        in_one_region(list(zones.values())), key=lambda pool: (pool.value.micro_usd_per_hour, pool.offer.zone)
    )
    return tuple(cheapest_first), min(always, key=_index, default=None), tuple(left_out)


def _trainer_zones(
    needs: CloudRequirements, market: MarketView, offers: Sequence[Offer], trainer: Offer
) -> TrainerZones:
    """Return the spot pools with the GPUs of a trainer on demand, one for each zone, and the offers left out.

    None for a job with its trainer on demand.
    """
    if not needs.trainer_on_spot:
        return (), ()
    zones: dict[str, PricedPool] = {}
    left_out = []
    for offer in offers:
        if offer.market is not Market.SPOT or offer.gpus != trainer.gpus or not needs.trainer.fits(offer):
            continue
        if why := _refusal(market, offer, trainer.micro_usd_per_hour):
            left_out.append(LeftOut(what=f"the trainer: {_place(offer)}", why=why))
            continue
        pool = priced(needs, market, offer, trainer.micro_usd_per_hour)
        kept = zones.get(offer.zone)
        if kept is None or _index(pool) < _index(kept):
            zones[offer.zone] = pool
    cheapest_first = sorted(zones.values(), key=lambda pool: (pool.offer.micro_usd_per_hour, pool.offer.zone))
    return tuple(in_one_region(cheapest_first)), tuple(left_out)


def _losses(needs: CloudRequirements, pools: Sequence[PricedPool]) -> TrainerLosses | None:
    """Return the losses of a trainer in the spot pools of a region. None: it is on demand."""
    if not pools:
        return None
    terms = pools[0].terms
    return TrainerLosses(
        share=1 - (1 - terms.launch_odds) * (1 - (terms.elsewhere or 0.0)),
        life_hours=life_hours(terms, needs.horizon_ms / HOUR_MS),
        checkpoint_every=needs.checkpoint_every,
        deadline_hours=inf if needs.deadline_ms is None or not needs.stands_in else needs.deadline_ms / HOUR_MS,
    )


def _worst_case(rollout: NodeRequirements, offers: Iterable[Offer]) -> int | None:
    """Return the worst-case price of a node type without an on-demand offer of its own.

    The worst case is the node's share of the dearest on-demand instance with the same GPU. An unknown price counts as
    on demand. $88 for 8 GPUs: $11 for 1. None if no instance has the GPU.
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
    """Return the reason not to buy a spot offer, or None if the offer may be bought."""
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
    """Return the offers in a fixed order, without duplicates.

    Of two prices for the same product, the dearer counts.
    """
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
