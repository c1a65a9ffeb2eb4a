"""Every fleet of a grid: an independent brute force for the benchmark of the planner's search (plan_search.py).

    offers -> kinds of node in each region -> grid of fleets -> closed form of hours and dollars -> best few -> plans

The brute force shares with the product the offers, what fits into a GPU's memory, the seconds of a GPU's images, the
priors of spot capacity and the replay. Everything else is written a second time: the model of an iteration, what
exploration saves, the share of time with spot, the choice of regions, the plan's slots and sites. The closed form only
ranks; the price of a fleet is the mean of its replays.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist

from engine.events import Market
from engine.timing.figures import LINK_BYTES_PER_SECOND, LINK_OTHERWISE, LINK_SHARE
from launcher.job.resolved import Resolved, resolve
from launcher.job.schema import Job
from launcher.market.hazard import prior_of, usual_odds
from launcher.market.offers import Offer
from launcher.market.quality import USABLE
from launcher.money import HOUR_MS
from launcher.placement.options import Option, SiteOptions
from launcher.placement.plan import Plan, Slot, SlotRole, placement_of, slot_of

GPUS = ("L40S", "A100-80GB", "H100", "H200")
SIZES = (1, 2, 4, 8)
"""GPUs of a node. The trainer has a rank on each, up to the groups of an optimiser step."""

MOST_NODES = 4
MOST_REGIONS = 4
MOST_RANKS = 8

COLD_HOURS = 0.2
"""Hours from a loss to the next node at work: two minutes for the answer, eight for the cold start, and a pass."""

PROMOTED_HOURS = 0.05
"""Hours from a loss of the trainer until a rollout node with the same GPUs trains in its place."""

FURTHER_ZONE, FURTHER_REGION = 0.5, 0.1
"""Weight of a further zone of the region, and of a further region, in the chance that a slot finds no spot. 1: as if
independent and tried at once. Zones are out together more often than by chance; the live policy seldom moves."""

NEAR = 1.25
"""Spot above this many times the cheapest of its region is left out: the live policy buys it as a stand-in only."""

SAME_KINDS, SAME_NODES = 4, 2
"""Most fleets among the best with the same kinds of node, and with the same number of them too."""

Place = tuple[str, str]
"""A cloud and a region."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Kind:
    """A kind of node."""

    gpu: str
    gpus: int
    market: Market

    def __str__(self) -> str:
        return f"{self.gpu}:{self.gpus} {'spot' if self.market is Market.SPOT else 'on demand'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSeconds:
    """Seconds of one GPU of a kind for an image. None: the model does not fit in that role."""

    sample: float | None
    candidate: float
    train: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A job as the brute force sees it. Money in micro-dollars, times in the unit of the name."""

    iterations: float
    prompts: int
    images_per_prompt: int
    updates: int
    """Optimiser steps of an iteration."""
    trained_bytes: int
    """Bytes of the trained weights in fp32."""
    seconds: Mapping[str, GpuSeconds]
    explores: bool
    trains_candidates: bool
    max_candidates: int | None
    rho: float
    exponent: float
    """Iterations fall with this power of the variance of the trained rewards."""
    checkpoint_every: int
    deadline_ms: int | None
    max_hourly: int | None
    max_total: int | None

    @property
    def groups(self) -> int:
        """Return the groups of an optimiser step, which ranks divide."""
        return self.prompts // self.updates

    @classmethod
    def of(cls, job: Job) -> "Work":
        """Return the work of a job. Raises JobError as `resolve`."""
        plain = resolve(on_gpu(job, GPUS[2]))
        recipe = plain.recipe
        return cls(
            iterations=float(job.iterations),
            prompts=job.algorithm.prompts_per_batch,
            images_per_prompt=job.algorithm.images_per_prompt,
            updates=job.algorithm.updates_per_batch,
            trained_bytes=plain.trained_bytes,
            seconds={gpu: _seconds(resolve(on_gpu(job, gpu))) for gpu in GPUS},
            explores=job.exploration.mode == "stale",
            trains_candidates=recipe.trains_candidates,
            max_candidates=recipe.max_candidates,
            rho=recipe.rho,
            exponent=recipe.gain_exponent.mean,
            checkpoint_every=1 if job.checkpoint.every == "auto" else job.checkpoint.every,
            deadline_ms=job.budget.deadline,
            max_hourly=job.budget.max_hourly,
            max_total=job.budget.max_total,
        )


def on_gpu(job: Job, gpu: str) -> Job:
    """Return a job with a trainer and rollout nodes of one GPU of a kind."""
    trainer = job.resources.trainer.model_copy(update={"accelerators": f"{gpu}:1", "num_nodes": 1})
    rollout = job.resources.rollout.model_copy(update={"accelerators": f"{gpu}:1", "num_nodes": 1, "min_nodes": None})
    resources = job.resources.model_copy(update={"trainer": trainer, "rollout": rollout})
    runtime = job.runtime.model_copy(update={"trainer_ranks": 1})
    return job.model_copy(update={"resources": resources, "runtime": runtime})


def _seconds(resolved: Resolved) -> GpuSeconds:
    memory, seconds = resolved.memory, resolved.seconds
    if memory is None or seconds is None or resolved.trainer_usable is None or resolved.rollout_usable is None:
        return GpuSeconds(sample=None, candidate=math.inf, train=None)
    return GpuSeconds(
        sample=seconds.rollout if memory.rollout.fitting(resolved.rollout_usable) else None,
        candidate=seconds.candidate,
        train=seconds.train if memory.trainer.fitting(resolved.trainer_usable) else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """A point of the grid."""

    trainer: Kind
    rollout: Kind | None
    nodes: int
    regions: tuple[Place, ...]
    """Where the run may be, its home first."""
    explores: bool

    def __str__(self) -> str:
        rollout = f" + {self.nodes} x {self.rollout}" if self.nodes else ""
        explores = ", explores" if self.explores else ""
        return f"{self.trainer}{rollout}{explores}; {', '.join(' '.join(place) for place in self.regions)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimated:
    """A fleet with what the closed form expects of it."""

    fleet: Fleet
    usd: float
    hours: float


# --- offers ----------------------------------------------------------------------------------------------------------


class Shop:
    """Offers by region and kind of node, cheapest first."""

    def __init__(self, offers: Iterable[Offer]) -> None:
        dearest: dict[tuple[str, ...], Offer] = {}
        for offer in offers:
            if offer.gpus not in SIZES or offer.accelerator not in GPUS or offer.quality not in USABLE:
                continue
            name = (offer.cloud, offer.region, offer.zone, offer.instance_type, offer.market.value)
            if name not in dearest or offer.micro_usd_per_hour > dearest[name].micro_usd_per_hour:
                dearest[name] = offer
        self._offers: defaultdict[Place, list[Offer]] = defaultdict(list)
        for offer in dearest.values():
            self._offers[offer.cloud, offer.region].append(offer)
        self.kinds: dict[Place, dict[Kind, tuple[Offer, ...]]] = {}
        for place, sold in sorted(self._offers.items()):
            by_kind: defaultdict[Kind, list[Offer]] = defaultdict(list)
            for offer in sold:
                worst = self.on_demand_price(place, offer)
                if offer.market is Market.ON_DEMAND or (worst is not None and offer.micro_usd_per_hour < worst):
                    by_kind[Kind(gpu=offer.accelerator, gpus=offer.gpus, market=offer.market)].append(offer)
            self.kinds[place] = {kind: _cheapest_first(kept) for kind, kept in by_kind.items()}
        self.spot_zones = sorted(
            {
                (*place, offer.zone or f"{place[1]}, any zone")
                for place, sold in self._offers.items()
                for offer in sold
                if offer.market is Market.SPOT
            }
        )

    def on_demand_price(self, place: Place, offer: Offer) -> int | None:
        """Return the price of an offer's instance type on demand, else of as many GPUs of the dearest such node."""
        steady = [o for o in self._offers[place] if o.market is Market.ON_DEMAND and o.accelerator == offer.accelerator]
        same = [o.micro_usd_per_hour for o in steady if o.instance_type == offer.instance_type]
        if same:
            return max(same)
        return max((-(-o.micro_usd_per_hour * offer.gpus // o.gpus) for o in steady), default=None)

    def steady(self, place: Place, kind: Kind) -> Offer | None:
        """Return the smallest node on demand with a kind's GPUs or more of them, the cheapest of that size."""
        enough = [
            (other.gpus, sold[0].micro_usd_per_hour, sold[0].instance_type, sold[0])
            for other, sold in self.kinds[place].items()
            if other.market is Market.ON_DEMAND and other.gpu == kind.gpu and other.gpus >= kind.gpus
        ]
        return min(enough)[-1] if enough else None

    def price(self, place: Place, kind: Kind) -> int:
        return self.kinds[place][kind][0].micro_usd_per_hour


def _cheapest_first(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Return an offer of each zone, cheapest first, without the dear ones."""
    cheapest: dict[str, Offer] = {}
    for offer in sorted(offers, key=lambda offer: (offer.micro_usd_per_hour, offer.zone, offer.instance_type)):
        cheapest.setdefault(offer.zone, offer)
    sold = list(cheapest.values())
    return tuple(offer for offer in sold if offer.micro_usd_per_hour <= NEAR * sold[0].micro_usd_per_hour)


def grid(work: Work, shop: Shop) -> Iterator[Fleet]:
    """Yield every fleet of the grid that is sold and holds the model."""
    can_train = {gpu for gpu, seconds in work.seconds.items() if None not in (seconds.train, seconds.sample)}
    can_sample = {gpu for gpu, seconds in work.seconds.items() if seconds.sample is not None}
    explored = (False, True) if work.explores else (False,)
    for home, kinds in shop.kinds.items():
        for trainer in kinds:
            if trainer.gpu not in can_train or shop.steady(home, trainer) is None:
                continue
            rollouts: list[Kind | None] = [None, *(kind for kind in kinds if kind.gpu in can_sample)]
            for rollout in rollouts:
                for regions in _regions(shop, home, trainer, rollout):
                    for nodes in range(1, MOST_NODES + 1) if rollout else (0,):
                        for explores in explored if nodes else (False,):
                            yield Fleet(
                                trainer=trainer, rollout=rollout, nodes=nodes, regions=regions, explores=explores
                            )


def _regions(shop: Shop, home: Place, trainer: Kind, rollout: Kind | None) -> Iterator[tuple[Place, ...]]:
    """Yield the home alone, and with the cheapest one to three other regions. A trainer on demand never moves."""
    yield (home,)
    if trainer.market is Market.ON_DEMAND:
        return
    others = [
        (shop.price(place, trainer) + (shop.price(place, rollout) if rollout else 0), place)
        for place, kinds in shop.kinds.items()
        if place != home and trainer in kinds and (rollout is None or rollout in kinds) and shop.steady(place, trainer)
    ]
    cheapest = [place for _, place in sorted(others)]
    for count in range(1, min(MOST_REGIONS - 1, len(cheapest)) + 1):
        yield (home, *cheapest[:count])


# --- an iteration ----------------------------------------------------------------------------------------------------


def training_seconds(work: Work, kind: Kind) -> float:
    """Return the training seconds of an iteration on a trainer of this kind.

    A step has as many rounds as the busiest rank has groups. Ranks send sums of gradients and new weights: 2 (r - 1) /
    r + 1 times the trained weights, at a share of the link's peak.
    """
    train = work.seconds[kind.gpu].train
    if train is None:
        raise ValueError(f"the model does not fit a trainer of {kind.gpu}")
    ranks = ranks_of(work, kind)
    rounds = math.ceil(work.groups / ranks)
    sent = work.trained_bytes * (2 * (ranks - 1) / ranks + 1) if ranks > 1 else 0.0
    link = LINK_BYTES_PER_SECOND.get(kind.gpu, LINK_OTHERWISE).value * LINK_SHARE.value
    return work.updates * (rounds * work.images_per_prompt * train + sent / link)


def ranks_of(work: Work, kind: Kind) -> int:
    """Return the ranks of a trainer: its GPUs, up to the groups of an optimiser step."""
    return min(kind.gpus, work.groups, MOST_RANKS)


def candidates(work: Work, fleet: Fleet, nodes: float) -> int:
    """Return the candidates of an iteration that so many rollout nodes try while the trainer trains."""
    if not fleet.explores or fleet.rollout is None:
        return 0
    of_gpu = training_seconds(work, fleet.trainer) / work.seconds[fleet.rollout.gpu].candidate
    made = int(nodes * fleet.rollout.gpus * of_gpu)
    return made if work.max_candidates is None else min(made, work.max_candidates)


def iteration_seconds(work: Work, fleet: Fleet, nodes: float) -> float:
    """Return the seconds of an iteration with so many rollout nodes at work; every rank samples."""
    images: float = work.prompts * work.images_per_prompt
    if work.trains_candidates:
        images -= min(images, candidates(work, fleet, nodes))
    own = work.seconds[fleet.trainer.gpu].sample
    images_a_second = ranks_of(work, fleet.trainer) / own if own else 0.0
    if fleet.rollout is not None:
        images_a_second += nodes * fleet.rollout.gpus / (work.seconds[fleet.rollout.gpu].sample or math.inf)
    return images / images_a_second + training_seconds(work, fleet.trainer)


def iterations_share(work: Work, fleet: Fleet, nodes: float) -> float:
    """Return the share of the iterations that is left with exploration, with so many rollout nodes at work.

    A normal distribution of which the share p is kept, half at each end, has 1 + 2 z pdf(z) / p times the variance; the
    trained rewards have rho^2 of that gain.
    """
    of_prompt = candidates(work, fleet, nodes) // work.prompts
    if of_prompt <= work.images_per_prompt:
        return 1.0
    kept = work.images_per_prompt / of_prompt
    normal = NormalDist()
    z = normal.inv_cdf(1 - kept / 2)
    gain = 1 + work.rho**2 * 2 * z * normal.pdf(z) / kept
    return float(gain**-work.exponent)


def pace(work: Work, fleet: Fleet) -> tuple[float, tuple[float, ...]]:
    """Return the iterations with every node at work, and the seconds of one with 0, 1, 2, ... nodes, which never rise.

    With fewer nodes exploration saves fewer iterations: that time is in the seconds.
    """
    share = iterations_share(work, fleet, fleet.nodes)
    seconds: list[float] = []
    for nodes in range(fleet.nodes + 1):
        each = iteration_seconds(work, fleet, nodes) * iterations_share(work, fleet, nodes) / share
        seconds.append(min([each, *seconds[-1:]]))
    return work.iterations * share, tuple(seconds)


# --- spot ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotTime:
    """Spot capacity as a slot meets it."""

    at_hand: float
    """Share of time in which some zone has capacity."""
    life_hours: float
    """Mean hours from one node of the slot to its loss."""

    def at_work(self, change_hours: float) -> float:
        """Return the share of time at work."""
        return self.at_hand * max(0.0, self.life_hours - change_hours) / self.life_hours


def spot_time(shop: Shop, kind: Kind, regions: Sequence[Place]) -> SpotTime:
    """Return the spot capacity of a kind in these regions, by the priors."""
    out = 1.0 - usual_odds(kind.gpu, kind.gpus, *regions[0]).mean
    zones = [len(shop.kinds[place][kind]) for place in regions]
    all_out = out ** (1 + FURTHER_ZONE * (zones[0] - 1) + FURTHER_REGION * len(zones[1:]))
    curve = prior_of(kind.gpu, kind.gpus).curve
    # A node bought elsewhere meets a spell in its middle, one bought after an outage begins a spell.
    met = 1.0 - all_out / out
    return SpotTime(at_hand=1.0 - all_out, life_hours=met * curve.mean_rest() + (1 - met) * curve.mean_life())


def estimate(work: Work, shop: Shop, fleet: Fleet) -> Estimated | None:
    """Return the expected hours and dollars of a fleet, or None if it cannot be done within the limits.

    A fleet that is late on spot has its trainer on demand for as much of the time as the deadline needs, and if that is
    not enough every node.
    """
    home = fleet.regions[0]
    steady = shop.steady(home, fleet.trainer)
    if steady is None:
        return None
    iterations, seconds = pace(work, fleet)
    trainer, trainer_steady = shop.price(home, fleet.trainer), steady.micro_usd_per_hour
    rollout = rollout_steady = 0
    at_work, rollouts_at_hand = 1.0, 1.0
    if fleet.rollout is not None:
        cheapest = shop.kinds[home][fleet.rollout][0]
        rollout = cheapest.micro_usd_per_hour
        rollout_steady = shop.on_demand_price(home, cheapest) or rollout
        if fleet.rollout.market is Market.SPOT:
            spot = spot_time(shop, fleet.rollout, (home,))
            at_work, rollouts_at_hand = spot.at_work(COLD_HOURS), spot.at_hand
    if work.max_hourly is not None and trainer + fleet.nodes * rollout > work.max_hourly:
        return None
    per_hour = 3600 * (
        rollouts_at_hand / _between(seconds, fleet.nodes * at_work / rollouts_at_hand)
        + (1 - rollouts_at_hand) / seconds[0]
    )
    hours = iterations / per_hour + COLD_HOURS
    rollouts = fleet.nodes * rollouts_at_hand * rollout
    ways = [(hours, hours * (trainer_steady + rollouts))]
    if fleet.trainer.market is Market.SPOT:
        kinds = [(kind.gpu, kind.gpus) for kind in (fleet.trainer, fleet.rollout) if kind is not None]
        change = PROMOTED_HOURS if len(kinds) == 2 and kinds[0] == kinds[1] else COLD_HOURS
        spot = spot_time(shop, fleet.trainer, fleet.regions)
        hours = _hours_with_losses(work, iterations / per_hour, iterations, spot.life_hours, change) / spot.at_hand
        ways.insert(0, (hours, hours * (spot.at_hand * trainer + rollouts)))
    hours = iterations * seconds[-1] / 3600 + COLD_HOURS
    ways.append((hours, hours * (trainer_steady + fleet.nodes * rollout_steady)))
    hours, micro_usd = _in_time(ways, math.inf if work.deadline_ms is None else work.deadline_ms / HOUR_MS)
    if micro_usd == math.inf or (work.max_total is not None and micro_usd > work.max_total):
        return None
    return Estimated(fleet=fleet, usd=micro_usd / 1e6, hours=hours)


def _in_time(ways: Sequence[tuple[float, float]], deadline: float) -> tuple[float, float]:
    """Return the hours and dollars of the first way that is in time, mixed with the way before it; else infinite ones.

    ways  (hours, dollars), each quicker than the one before
    """
    if ways[0][0] <= deadline:
        return ways[0]
    for (slow, cheap), (quick, dear) in pairwise(ways):
        if quick <= deadline:
            weight = min(1.0, (slow - deadline) / (slow - quick)) if slow > quick else 1.0
            return deadline, cheap + weight * (dear - cheap)
    return math.inf, math.inf


def _hours_with_losses(work: Work, hours: float, iterations: float, life_hours: float, change_hours: float) -> float:
    """Return the hours with a trainer that is lost after `life_hours` on average, at random.

    Each loss repeats the work since the last checkpoint: a stretch of t hours takes (e^(t / life) - 1) (life + change).
    """
    stretch = work.checkpoint_every * hours / iterations
    return hours / stretch * math.expm1(min(50.0, stretch / life_hours)) * (life_hours + change_hours)


def _between(seconds: Sequence[float], nodes: float) -> float:
    low = min(int(nodes), len(seconds) - 1)
    high = min(low + 1, len(seconds) - 1)
    return 1 / (1 / seconds[low] + (nodes - low) * (1 / seconds[high] - 1 / seconds[low]))


def best(work: Work, shop: Shop, count: int) -> tuple[list[Estimated], int]:
    """Return the cheapest fleets of the grid by the closed form, and the number of fleets that were compared.

    Half of them have their trainer on spot, and half on demand. Fleets that are much alike are left out (`SAME_KINDS`,
    `SAME_NODES`): their replays would be, too.
    """
    compared = 0
    possible: list[Estimated] = []
    for fleet in grid(work, shop):
        compared += 1
        if fleet.explores and not work.trains_candidates and iterations_share(work, fleet, fleet.nodes) == 1:
            continue  # too few candidates for a choice: the same as without exploration
        estimated = estimate(work, shop, fleet)
        if estimated is not None:
            possible.append(estimated)
    kept: list[Estimated] = []
    alike: Counter[object] = Counter()
    for estimated in sorted(possible, key=lambda each: (each.usd, each.hours, str(each.fleet))):
        fleet = estimated.fleet
        kinds = (fleet.trainer, fleet.rollout)
        most = {fleet.trainer.market: count // 2, kinds: SAME_KINDS, (*kinds, fleet.nodes): SAME_NODES}
        if all(alike[name] < number for name, number in most.items()):
            alike.update(most.keys())
            kept.append(estimated)
    return kept, compared


# --- plans -----------------------------------------------------------------------------------------------------------


def plan_of(work: Work, shop: Shop, fleet: Fleet) -> Plan:
    """Return the plan of a fleet: its slots, the offers of each of its regions, and the pace of its iterations."""
    iterations, seconds = pace(work, fleet)
    sites = tuple(_site(shop, fleet, place) for place in fleet.regions)
    home = sites[0]
    slots = [_slot("trainer", "trainer", home.trainer[0])]
    if fleet.rollout is not None:
        market = fleet.rollout.market
        offered = [option for option in home.rollout if option.placement.market is market][:2]
        prefix = "spot" if market is Market.SPOT else "on-demand"
        slots += [_slot(f"{prefix}-{n}", "rollout", offered[n % len(offered)]) for n in range(fleet.nodes)]
    return Plan(
        region=home.region,
        slots=tuple(slots),
        max_total_micro_usd=work.max_total,
        max_hourly_micro_usd=work.max_hourly,
        money_basis="metered",
        sites=sites,
        iteration_ms=round(1000 * seconds[0]),
        iterations=iterations,
        pace_ms=tuple(round(1000 * each) for each in seconds),
        checkpoint_every=work.checkpoint_every,
    )


def _slot(name: str, role: SlotRole, option: Option) -> Slot:
    placement = option.placement
    offer = Offer(
        cloud=placement.cloud,
        region=placement.region,
        zone=placement.zone,
        instance_type=placement.instance_type,
        accelerator=placement.accelerator,
        gpus=placement.gpus,
        market=placement.market,
        micro_usd_per_hour=placement.micro_usd_per_hour,
        source=placement.price_source,
        observed_at=placement.price_observed_at,
    )
    return slot_of(name, role, offer, option.on_demand_micro_usd_per_hour)


def _site(shop: Shop, fleet: Fleet, place: Place) -> SiteOptions:
    kinds = shop.kinds[place]
    steady = shop.steady(place, fleet.trainer)
    assert steady is not None, "the grid has no fleet without a trainer on demand"
    trainers = [_option(shop, place, offer) for offer in kinds[fleet.trainer]]
    if fleet.trainer.market is Market.SPOT:
        trainers.append(_option(shop, place, steady))
    rollouts: list[Option] = []
    if fleet.rollout is not None:
        rollouts = [_option(shop, place, offer) for offer in kinds[fleet.rollout]]
        on_demand = replace(fleet.rollout, market=Market.ON_DEMAND)
        if fleet.rollout.market is Market.SPOT and on_demand in kinds:
            rollouts.append(_option(shop, place, kinds[on_demand][0]))
    return SiteOptions(cloud=place[0], region=place[1], trainer=tuple(trainers), rollout=tuple(rollouts))


def _option(shop: Shop, place: Place, offer: Offer) -> Option:
    price = offer.micro_usd_per_hour if offer.market is Market.ON_DEMAND else shop.on_demand_price(place, offer)
    assert price is not None, "spot without a price on demand is not sold"
    return Option(placement=placement_of(offer), on_demand_micro_usd_per_hour=price)
