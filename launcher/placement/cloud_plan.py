"""Plan a run on real clouds: the nodes to keep running, the expected cost, its interval, and the alternatives.

ask + market -> sites -> a policy's choice -> outlook, interval, comparisons, alternatives

Pure: the same ask and market give the same plan, for any order of the offers. No plan exceeds a cap: the listed rate,
the expected cost and the expected time are within the limits of the ask. If no plan fits, the error names the limits
that would fit. Money is integer micro-dollars, time integer milliseconds; expectations are rounded up.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.events import Market
from engine.exploration.value import IterationCost
from launcher.decide.failover import Option, SiteOptions
from launcher.exit_codes import BudgetError
from launcher.market.estimate import Basis, Estimate
from launcher.money import HOUR_MS, dollars, duration, hourly
from launcher.placement.ask import CloudAsk, LeftOut, MarketView, PricedPool, Site, Spot, sites_of
from launcher.placement.forecast import Caps, Choice, Outlook, at_the_end, on_demand_outlook, outlook, share_at_work
from launcher.placement.iteration_time import WhenSpotPays, iterations_share
from launcher.placement.plan import PlacementError, Plan, Slot, placement_of, slot_of, zone_text
from launcher.placement.policy import POLICIES, Ours, Situation, build_policy
from launcher.placement.search import Found, cheapest_choice, is_above_floor, is_spread
from launcher.placement.value import marginal_node, square_root_rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An expected integer with an interval: micro-dollars or milliseconds."""

    expected: int
    low: int
    high: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Ratio of the plan to a baseline: iterations x hours per iteration x dollars per hour.

    The plan takes less if below 1.
    """

    against: str
    iterations: float
    hours_per_iteration: float
    micro_usd_per_hour: float
    their_micro_usd: int
    their_ms: int

    @property
    def micro_usd(self) -> float:
        """Return the product: the plan's dollars over the baseline's dollars."""
        return self.iterations * self.hours_per_iteration * self.micro_usd_per_hour


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorationShare:
    """Benefit of exploration, beside training, with the rollout nodes of the plan."""

    candidates_per_prompt: int
    """0: no exploration, because only the trained candidates fit, or because the job does not explore."""
    kept: int
    variance_gain: float
    rho: float
    iterations_share: Estimate
    """Share of the iterations that remains with exploration."""
    nodes_without: float
    """Rollout nodes that would pay without exploration, by the square-root rule at the price of a useful hour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolShare:
    """A pool of the plan with its known figures."""

    zone: str
    instance_type: str
    market: Market
    nodes: int
    micro_usd_per_hour: int
    micro_usd_per_useful_hour: int
    useful_share: Estimate
    """Share of the time that a slot has a node at work."""
    reclaimed_in_first_hour: Estimate | None
    """None: the cloud never preempts the pool."""
    launch_odds: Estimate
    cold_start_ms: Estimate
    price_source: str
    price_observed_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A plan that was not chosen. `micro_usd`, `ms`: to the target; None if unknown."""

    what: str
    why_not: str
    micro_usd: int | None = None
    ms: int | None = None
    is_at_least: bool = False
    """True if `micro_usd` is a lower bound of the cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudPlan:
    """The nodes that a run keeps running on a cloud, with the expected cost and time."""

    cloud: str
    region: str
    policy: str
    slots: tuple[Slot, ...]
    pools: tuple[PoolShare, ...]
    listed_micro_usd_per_hour: int
    """Rate with every node running, at the offered prices."""
    expected_micro_usd_per_hour: int
    """Average bill of an hour. Counts nodes that are away or not billed, and traffic."""
    maximum_micro_usd_per_hour: int
    """Rate with every node running, at on-demand prices."""
    cost: Span
    time: Span
    iterations: Span
    seconds_per_iteration: float
    seconds_per_iteration_alone: float
    """Seconds of an iteration with the trainer alone: the slowest speed of the run, during an outage of all rollout
    nodes."""
    basis: str
    """Evidence that the intervals rest on."""
    exploration: ExplorationShare
    spot_pays: WhenSpotPays | None
    """None: the site has no rollout node to buy."""
    factors: tuple[Factors, ...]
    alternatives: tuple[Alternative, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    max_total_micro_usd: int | None
    max_hourly_micro_usd: int | None
    deadline_ms: int | None
    sites: tuple[SiteOptions, ...] = ()
    """Regions where the run may be. The order of failover: the planned region, then regions of the same cloud, then
    the other cloud; cheapest first."""

    def as_plan(self) -> Plan:
        """Return the plan in the form that the run's controller keeps."""
        return Plan(
            region=self.region,
            slots=self.slots,
            max_total_micro_usd=self.max_total_micro_usd,
            max_hourly_micro_usd=self.max_hourly_micro_usd,
            money_basis="metered",
            sites=self.sites,
            iteration_ms=round(self.seconds_per_iteration_alone * 1000),
        )


def cloud_plan_json(plan: CloudPlan) -> dict[str, Any]:
    """Return the plan as JSON values for scripts; money in micro-dollars, times in milliseconds."""
    pays = plan.spot_pays
    return asdict(plan) | {
        "factors": [asdict(factors) | {"micro_usd": factors.micro_usd} for factors in plan.factors],
        "spot_pays": None
        if pays is None
        else asdict(pays)
        | {
            "costs_more": pays.costs_more,
            "pays_below": pays.pays_below,
            "pays": pays.pays,
            "statement": pays.statement(),
        },
    }


def plan_cloud(ask: CloudAsk, market: MarketView) -> CloudPlan:
    """Make the plan. Raises PlacementError if no offer fits the job, and BudgetError if no plan fits the limits."""
    sites, no_sites = sites_of(ask, market)
    if not sites:
        raise PlacementError(_nowhere(ask, no_sites))
    situation = Situation(ask=ask, sites=sites)
    policy, found = build_policy(ask.policy), Ours().search(situation)
    ours = None if found is None else found.choice
    choice = ours if isinstance(policy, Ours) else policy.choose(situation)
    if choice is None:
        raise BudgetError(_too_tight(ask, sites))
    expected = outlook(ask, choice)
    good, bad = at_the_end(ask, choice, "good"), at_the_end(ask, choice, "bad")
    pays = _when_spot_pays(ask, choice, expected)
    return CloudPlan(
        cloud=choice.site.trainer.cloud,
        region=choice.site.trainer.region,
        policy=ask.policy,
        slots=_slots(choice),
        pools=tuple(_pool_share(pool, count) for pool, count in choice.pools),
        listed_micro_usd_per_hour=choice.listed_micro_usd_per_hour,
        expected_micro_usd_per_hour=expected.micro_usd_per_hour,
        maximum_micro_usd_per_hour=choice.maximum_micro_usd_per_hour,
        cost=_span(expected.micro_usd, good[0], bad[0]),
        time=_span(expected.ms, good[1], bad[1]),
        iterations=_iterations(ask, expected),
        seconds_per_iteration=expected.seconds_per_iteration,
        seconds_per_iteration_alone=outlook(ask, _alone(choice)).seconds_per_iteration,
        basis=_basis(ask, choice),
        exploration=_exploration(ask, choice, expected),
        spot_pays=pays,
        factors=_factors(ask, choice, expected),
        alternatives=(
            *_fewer_or_more(ask, choice, expected),
            *_elsewhere(ask, sites, choice, expected, found),
            *_policies(ask, situation, expected),
        ),
        left_out=(*_dearer_zones(choice), *choice.site.left_out, *no_sites),
        notes=_notes(ask, choice),
        max_total_micro_usd=ask.max_total_micro_usd,
        max_hourly_micro_usd=ask.max_hourly_micro_usd,
        deadline_ms=ask.deadline_ms,
        sites=_site_options(ask, sites, choice),
    )


# --- parts of the plan ----------------------------------------------------------------------------------


def _span(expected: int, *ends: int) -> Span:
    return Span(expected=expected, low=min(expected, *ends), high=max(expected, *ends))


def _iterations(ask: CloudAsk, expected: Outlook) -> Span:
    recipe, gain = ask.recipe, expected.variance_gain
    low = recipe.iterations.low * gain**-recipe.gain_exponent.high
    high = recipe.iterations.high * gain**-recipe.gain_exponent.low
    return _span(round(expected.iterations), round(low), round(high))


def _exploration(ask: CloudAsk, choice: Choice, expected: Outlook) -> ExplorationShare:
    recipe, exponent = ask.recipe.on(choice.site.trainer.gpus), ask.recipe.gain_exponent
    mean, low, high = (
        iterations_share(recipe, expected.candidates_per_prompt, e)
        for e in (exponent.mean, exponent.high, exponent.low)
    )
    return ExplorationShare(
        candidates_per_prompt=expected.candidates_per_prompt,
        kept=recipe.cost.images_per_prompt,
        variance_gain=expected.variance_gain,
        rho=recipe.rho,
        iterations_share=replace(exponent, mean=mean, low=low, high=high),
        nodes_without=_nodes_without_exploring(recipe.cost, choice.site),
    )


def _nodes_without_exploring(cost: IterationCost, site: Site) -> float:
    pools = site.zones or ((site.on_demand,) if site.on_demand is not None else ())
    rates = [pool.value.micro_usd_per_hour / pool.value.useful_share for pool in pools if pool.value.useful_share]
    if not rates:
        return 0.0
    gpus = pools[0].offer.gpus
    pictures = cost.prompts * cost.images_per_prompt
    return square_root_rule(
        pictures * cost.rollout_gpu_seconds / gpus / 3600,
        cost.train_seconds / 3600,
        site.trainer.micro_usd_per_hour,
        min(rates),
        assist_nodes=cost.reserved_gpus / gpus,
    )


def _when_spot_pays(ask: CloudAsk, choice: Choice, expected: Outlook) -> WhenSpotPays | None:
    """Return the cost per iteration relative to the trainer alone, including hazards, cold starts and traffic.

    Without hazards, cold starts and traffic the ratio equals c of papers 6.2. For a plan without rollout nodes, the
    ratio is for the best plan with a single rollout node.
    """
    if not choice.nodes:
        one = _with_nodes(ask, choice.site, 1)
        return None if one is None else _when_spot_pays(ask, one, outlook(ask, one))
    alone = outlook(ask, _alone(choice))
    markets = {pool.offer.market for pool, _ in choice.pools}
    return WhenSpotPays(
        gpus=expected.useful_gpus,
        market="spot and on-demand" if len(markets) > 1 else "spot" if Market.SPOT in markets else "on-demand",
        cost_ratio=(expected.micro_usd / expected.iterations) / (alone.micro_usd / alone.iterations),
        iterations_share=expected.iterations_share,
    )


def _alone(choice: Choice) -> Choice:
    return replace(choice, spot=(0,) * len(choice.spot), on_demand=0)


def _factors(ask: CloudAsk, choice: Choice, expected: Outlook) -> tuple[Factors, ...]:
    """Compare the plan with the same nodes on demand, and with the trainer alone."""
    if not choice.nodes:
        return ()
    others = {
        "the same nodes, all on demand": on_demand_outlook(ask, choice),
        "the trainer alone": outlook(ask, _alone(choice)),
    }
    return tuple(
        Factors(
            against=name,
            iterations=expected.iterations / other.iterations,
            hours_per_iteration=(expected.ms / expected.iterations) / (other.ms / other.iterations),
            micro_usd_per_hour=(expected.micro_usd / expected.ms) / (other.micro_usd / other.ms),
            their_micro_usd=other.micro_usd,
            their_ms=other.ms,
        )
        for name, other in others.items()
    )


def _pool_share(pool: PricedPool, nodes: int) -> PoolShare:
    return PoolShare(
        zone=zone_text(pool.offer),
        instance_type=pool.offer.instance_type,
        market=pool.offer.market,
        nodes=nodes,
        micro_usd_per_hour=pool.offer.micro_usd_per_hour,
        micro_usd_per_useful_hour=round(pool.value.micro_usd_per_useful_hour),
        useful_share=share_at_work(pool),
        reclaimed_in_first_hour=None if pool.survival is None else pool.survival.taken_within(1.0),
        launch_odds=pool.odds,
        cold_start_ms=pool.cold_start,
        price_source=pool.offer.source,
        price_observed_at=pool.offer.observed_at,
    )


def _slots(choice: Choice) -> tuple[Slot, ...]:
    trainer = choice.site.trainer
    slots = [slot_of("trainer", "trainer", trainer, trainer.micro_usd_per_hour)]
    numbers = {Market.SPOT: 0, Market.ON_DEMAND: 0}
    for pool, count in choice.pools:
        for _ in range(count):
            market = pool.offer.market
            name = f"{'spot' if market is Market.SPOT else 'on-demand'}-{numbers[market]}"
            numbers[market] += 1
            slots.append(slot_of(name, "rollout", pool.offer, pool.on_demand_micro_usd_per_hour))
    return tuple(slots)


def _site_options(ask: CloudAsk, sites: Sequence[Site], choice: Choice) -> tuple[SiteOptions, ...]:
    """Return every region with a trainer within `max_hourly`.

    Other clouds come last, because a failover copies the checkpoint to the other cloud.
    """
    limit = ask.max_hourly_micro_usd
    by_region: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        if limit is None or site.trainer.micro_usd_per_hour <= limit:
            by_region.setdefault((site.trainer.cloud, site.trainer.region), []).append(site)
    home = choice.site.trainer

    def preference(options: SiteOptions) -> tuple[bool, bool, int, tuple[str, str]]:
        cheapest = [min(o.placement.micro_usd_per_hour for o in options.trainer)]
        cheapest += sorted(o.placement.micro_usd_per_hour for o in options.rollout)[:1] * choice.nodes
        is_home = options.place == (home.cloud, home.region)
        return not is_home, options.cloud != home.cloud, sum(cheapest), options.place

    every = (_options_in(place, there, choice) for place, there in by_region.items())
    return tuple(sorted(every, key=preference))


def _options_in(place: tuple[str, str], there: Sequence[Site], choice: Choice) -> SiteOptions:
    """Return the options of a region in buying order: the planned trainer in the home region, else the cheapest."""
    trainers = sorted(
        (site.trainer for site in there),
        key=lambda offer: (offer != choice.site.trainer, offer.micro_usd_per_hour, offer.instance_type),
    )
    pools = [*there[0].zones, *([there[0].on_demand] if there[0].on_demand is not None else [])]
    return SiteOptions(
        cloud=place[0],
        region=place[1],
        trainer=tuple(
            Option(placement=placement_of(offer), on_demand_micro_usd_per_hour=offer.micro_usd_per_hour)
            for offer in trainers
        ),
        rollout=tuple(
            Option(placement=placement_of(pool.offer), on_demand_micro_usd_per_hour=pool.on_demand_micro_usd_per_hour)
            for pool in pools
        ),
    )


def _basis(ask: CloudAsk, choice: Choice) -> str:
    """Describe the weakest evidence behind the figures, and the measured part of the evidence."""
    recipe = ask.recipe
    pools = [pool for pool, _ in choice.pools if pool.survival is not None]
    seen = sum(sum(pool.survival.evidence.ms) for pool in pools if pool.survival is not None)
    reclaims = sum(sum(pool.survival.evidence.reclaims) for pool in pools if pool.survival is not None)
    text = (
        f"iterations {recipe.iterations.basis.value}, seconds of an iteration from {recipe.source}; what exploration "
        f"saves {recipe.gain_exponent.basis.value}"
    )
    if pools:
        watched = f"{reclaims} reclaims in {seen / HOUR_MS:.1f} node-hours of our own" if seen else "none of our own"
        text += f"; reclaims: {watched}, beside {Basis.PRIOR.value} figures"
    return f"{text}. The interval has every one of them at its good, or its bad, end at once"


def _notes(ask: CloudAsk, choice: Choice) -> tuple[str, ...]:
    """Return notes for the reader: limits of the plan, and parts that were never run."""
    recipe, trainer = ask.recipe, choice.site.trainer
    notes = list(recipe.never_run)
    used = recipe.on(trainer.gpus).cost.reserved_gpus
    if used != recipe.cost.reserved_gpus:
        notes.append(
            f"the trainer uses {used} GPU, and its seconds are known of {recipe.measured_on}: the work is taken to be "
            "as many GPU-seconds"
        )
    if ask.trainer_gpus_named > used:
        notes.append(
            f"the job names {ask.trainer_gpus_named} x {ask.trainer.accelerator} for the trainer; the engine trains on "
            f"{used}, so the plan counts {used} and looks for a node with {used}"
        )
    if trainer.gpus > used:
        idle = trainer.gpus - used
        notes.append(f"the smallest trainer node that is sold there has {trainer.gpus} GPUs: {idle} are paid for idle")
    if sum(choice.spot) > 1 and len(choice.site.zones) == 1:
        notes.append("the region has one zone with such spot nodes: what takes one back may take all of them")
    if ask.spot is Spot.AUTO and sum(choice.spot) > 0:
        notes.append("not counted: nodes bought on demand while an outage of spot lasts, which work, and cost more")
    notes.append("not counted: the trainer's own start, evaluations, disks, taxes")
    return tuple(notes)


def _dearer_zones(choice: Choice) -> tuple[LeftOut, ...]:
    """Return the zones of the site that the plan does not buy in, with the reason."""
    taken = [pool.value.micro_usd_per_useful_hour for pool, _ in choice.pools if pool.survival is not None]
    why = f" beside {hourly(round(max(taken)))} at most where nodes are" if taken else ""
    return tuple(
        LeftOut(
            what=f"{pool.offer.instance_type} in {pool.offer.zone}",
            why=f"a useful hour costs {hourly(round(pool.value.micro_usd_per_useful_hour))}{why}",
        )
        for pool, count in zip(choice.site.zones, choice.spot, strict=True)
        if not count
    )


# --- alternatives ---------------------------------------------------------------------------------------


def _fewer_or_more(ask: CloudAsk, choice: Choice, expected: Outlook) -> tuple[Alternative, ...]:
    """Return the best choices at the same site with one rollout node fewer and one more.

    The difference is the value of the marginal node, in both directions.
    """
    alternatives = []
    for nodes, word in ((choice.nodes - 1, "one node fewer"), (choice.nodes + 1, "one node more")):
        other = _with_nodes(ask, choice.site, nodes)
        if other is None:
            continue
        there = outlook(ask, other)
        few, more = (there, expected) if nodes < choice.nodes else (expected, there)
        marginal = marginal_node(
            few.ms / HOUR_MS, more.ms / HOUR_MS, few.micro_usd * HOUR_MS / few.ms, more.micro_usd * HOUR_MS / more.ms
        )
        last = f"the last one saves {dollars(marginal.saved)} by ending earlier and costs {dollars(marginal.paid)}"
        broken = _broken(ask, other.listed_micro_usd_per_hour, there.micro_usd, there.ms)
        alternatives.append(
            Alternative(
                what=f"{word}, {nodes}",
                why_not=broken or f"{_difference(there.micro_usd, there.ms, expected)}: {last}",
                micro_usd=there.micro_usd,
                ms=there.ms,
            )
        )
    return tuple(alternatives)


def _with_nodes(ask: CloudAsk, site: Site, nodes: int) -> Choice | None:
    """Return the cheapest choice with exactly `nodes` rollout nodes, ignoring the caps; None if there is none."""
    if not 0 <= nodes <= ask.max_rollout_nodes:
        return None
    found = cheapest_choice(ask, (site,), Caps(), just_nodes=nodes)
    return None if found is None else found.choice


NEAREST = 3
"""Number of alternative sites that are planned completely. For the remaining sites the plan gives a lower bound of
the cost."""


def _elsewhere(
    ask: CloudAsk, sites: Sequence[Site], choice: Choice, expected: Outlook, found: Found | None
) -> tuple[Alternative, ...]:
    """Return the best plan of every site not chosen, cheapest bound first."""
    bounds: Sequence[int | None] = (None,) * len(sites) if found is None else found.at_least_micro_usd
    others = [(site, bound) for site, bound in zip(sites, bounds, strict=True) if site.trainer != choice.site.trainer]
    nearest = sorted((bound, number) for number, (_, bound) in enumerate(others) if bound is not None)
    alternatives = []
    for place, (bound, number) in enumerate(nearest):
        site = others[number][0]
        if place < NEAREST:
            alternatives.append(_at_its_best(ask, site, expected))
        else:
            why_not = f"at least {dollars(max(0, bound - expected.micro_usd))} more"
            alternatives.append(Alternative(what=_name(site), why_not=why_not, micro_usd=bound, is_at_least=True))
    never = [Alternative(what=_name(site), why_not=NOTHING_THERE) for site, bound in others if bound is None]
    return (*alternatives, *never)


NOTHING_THERE = "nothing there keeps the limits"


def _at_its_best(ask: CloudAsk, site: Site, expected: Outlook) -> Alternative:
    found = cheapest_choice(ask, (site,), Caps.of(ask))
    if found is None:
        return Alternative(what=_name(site), why_not=NOTHING_THERE)
    there = outlook(ask, found.choice)
    return Alternative(
        what=f"{_name(site)}: {_rollout(found.choice.nodes)}",
        why_not=_difference(there.micro_usd, there.ms, expected),
        micro_usd=there.micro_usd,
        ms=there.ms,
    )


def _name(site: Site) -> str:
    return f"{site.name}, {site.trainer.instance_type}"


def _policies(ask: CloudAsk, situation: Situation, expected: Outlook) -> tuple[Alternative, ...]:
    alternatives = []
    for policy in POLICIES:
        if policy == ask.policy:
            continue
        choice = build_policy(policy).choose(situation)
        if choice is None:
            alternatives.append(Alternative(what=f"policy {policy}", why_not="nothing it chooses keeps the limits"))
            continue
        there = outlook(ask, choice)
        alternatives.append(
            Alternative(
                what=f"policy {policy}: {_rollout(choice.nodes)} in {choice.site.name}",
                why_not=", ".join([_difference(there.micro_usd, there.ms, expected), *_not_asked(ask, choice)]),
                micro_usd=there.micro_usd,
                ms=there.ms,
            )
        )
    return tuple(alternatives)


def _not_asked(ask: CloudAsk, choice: Choice) -> list[str]:
    """Return the properties of another policy's choice that a plan of our own policy must not have."""
    reasons = {
        "but more than half of its nodes in one zone": not is_spread(choice),
        "but on spot": ask.spot is Spot.NEVER and sum(choice.spot) > 0,
        "but on demand": ask.spot is Spot.ONLY and choice.on_demand > 0,
        "but below the floor": not is_above_floor(ask, choice),
    }
    return [reason for reason, holds in reasons.items() if holds]


def _difference(micro_usd: int, ms: int, expected: Outlook) -> str:
    more, longer = micro_usd - expected.micro_usd, ms - expected.ms
    money = f"{dollars(abs(more))} {'more' if more > 0 else 'less'}" if more else "as much"
    time = f"{duration(abs(longer))} {'longer' if longer > 0 else 'shorter'}" if longer else "as long"
    return f"{money}, {time}"


def _rollout(nodes: int) -> str:
    return f"{nodes} rollout node{'' if nodes == 1 else 's'}"


# --- errors without a plan ------------------------------------------------------------------------------


def _broken(ask: CloudAsk, listed: int, micro_usd: int, ms: int) -> str | None:
    """Describe for people the limits that the figures break; None if none is broken."""
    limits = []
    if ask.max_hourly_micro_usd is not None and listed > ask.max_hourly_micro_usd:
        limits.append(f"{hourly(listed)} is above max_hourly {hourly(ask.max_hourly_micro_usd)}")
    if ask.max_total_micro_usd is not None and micro_usd > ask.max_total_micro_usd:
        limits.append(f"{dollars(micro_usd)} is above max_total {dollars(ask.max_total_micro_usd)}")
    if ask.deadline_ms is not None and ms > ask.deadline_ms:
        limits.append(f"{duration(ms)} is past the deadline of {duration(ask.deadline_ms)}")
    return " and ".join(limits) or None


def _too_tight(ask: CloudAsk, sites: Sequence[Site]) -> str:
    """Describe the cheapest plan with each limit lifted alone, and with all limits lifted."""
    caps = Caps.of(ask)
    lifted = {
        "--max-hourly": replace(caps, max_hourly_micro_usd=None),
        "--max-total": replace(caps, max_total_micro_usd=None),
        "--deadline": replace(caps, deadline_ms=None),
    }
    ways = []
    for flag, fewer in lifted.items():
        found = cheapest_choice(ask, sites, fewer) if fewer != caps else None
        if found is not None:
            there = outlook(ask, found.choice)
            enough = {
                "--max-hourly": hourly(found.choice.listed_micro_usd_per_hour),
                "--max-total": dollars(there.micro_usd),
                "--deadline": duration(there.ms),
            }
            ways.append(f"raise {flag} to {enough[flag]}")
    free = cheapest_choice(ask, sites, Caps())
    if free is None:
        return (
            f"no site has {ask.floor_nodes} rollout nodes, which floor_nodes asks for; lower it, or allow more nodes "
            "(resources.rollout.num_nodes) or on-demand ones (--spot auto)"
        )
    there = outlook(ask, free.choice)
    why = _broken(ask, free.choice.listed_micro_usd_per_hour, there.micro_usd, there.ms)
    best = (
        f"the cheapest plan is expected to take {dollars(there.micro_usd)} and {duration(there.ms)} at "
        f"{hourly(free.choice.listed_micro_usd_per_hour)}: {why or 'the policy found nothing within the limits'}"
    )
    remedy = " or ".join(ways) or "raise them together, or ask for fewer iterations (--iterations)"
    return f"no plan reaches the target within the limits; {best}; {remedy}"


def _nowhere(ask: CloudAsk, no_sites: Sequence[LeftOut]) -> str:
    clouds = " or ".join(ask.clouds) or "no cloud"
    if not no_sites:
        return f"nothing is offered on {clouds}; refresh the catalog (spotrl catalog refresh), or name another cloud"
    places = ", ".join(place.what for place in no_sites)
    return (
        f"no region of {clouds} offers a trainer with {ask.trainer} or more on demand (looked in {places}); take "
        "another accelerator (resources.trainer.accelerators), or loosen resources.trainer.infra"
    )
