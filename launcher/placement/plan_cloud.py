"""Plan a run on real clouds: the nodes to keep running, the expected cost, its interval, and the alternatives.

needs + market -> sites -> a policy's choice -> outlook, interval, comparisons, alternatives

Pure: the same needs and market give the same plan, for any order of the offers. No plan exceeds a cap: the listed rate,
the expected cost and the expected time are within the limits of the needs. If no plan fits, the error names the limits
that would fit. Money is integer micro-dollars, time integer milliseconds; expectations are rounded up.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from engine.events import Market
from engine.trainer.cadence import ON_DEMAND_HOURS, batches_between
from launcher.exit_codes import BudgetError
from launcher.job.recipe import Recipe
from launcher.market.offers import Offer
from launcher.market.side_prices import DISK_GIB
from launcher.market.spells import ZoneSpells
from launcher.money import HOUR_MS
from launcher.placement.alternatives import elsewhere, fewer_or_more, other_policies, with_nodes
from launcher.placement.cloud_plan import (
    THE_TRAINER_ALONE,
    CloudPlan,
    ExplorationShare,
    Factors,
    PlanStandIns,
    PoolShare,
    Span,
    WhenSpotPays,
)
from launcher.placement.forecast import (
    Choice,
    Outlook,
    cost,
    moved_site,
    on_demand_outlook,
    outlook,
    progress,
    share_at_work,
    sums,
)
from launcher.placement.no_plan import not_sold, nowhere, too_tight
from launcher.placement.options import Option, SiteOptions
from launcher.placement.plan import PlacementError, Slot, placement_of, slot_of, trainer_slot, zone_text
from launcher.placement.plan_notes import basis_of, dearer_zones, notes_of
from launcher.placement.policy import Ours, Situation, build_policy
from launcher.placement.ranks import ranks_of_nodes
from launcher.placement.requirements import (
    CHECKPOINT_BYTES_PER_SECOND,
    CloudRequirements,
    MarketView,
    PricedPool,
    Site,
    sites_of,
)
from launcher.placement.stand_ins import with_stand_ins
from launcher.placement.value import square_root_rule


def plan_cloud(needs: CloudRequirements, market: MarketView) -> CloudPlan:
    """Make the plan. Raises PlacementError if no offer fits the job, and BudgetError if no plan fits the limits."""
    if why := not_sold(needs, market.offers):
        raise PlacementError(why)
    sites, no_sites = sites_of(needs, market)
    if not sites:
        raise PlacementError(nowhere(needs, no_sites))
    situation = Situation(needs=needs, sites=sites)
    policy, cheapest = build_policy(needs.policy), Ours().search(situation)
    ours = None if cheapest is None else cheapest.choice
    choice = ours if isinstance(policy, Ours) else policy.choose(situation)
    if choice is None:
        raise BudgetError(too_tight(needs, sites))
    expected, alone = outlook(choice), outlook(replace(choice, spot=(0,) * len(choice.spot), on_demand=0))
    good, bad = (cost(replace(choice, site=moved_site(choice.site, end))) for end in ("good", "bad"))
    ranks = ranks_of_nodes(needs.recipe, choice.site.trainer.gpus)
    disk_gib = DISK_GIB if needs.disk is None else needs.disk.gib
    return CloudPlan(
        cloud=choice.site.trainer.cloud,
        region=choice.site.trainer.region,
        policy=needs.policy,
        slots=_slots(choice, disk_gib),
        trainer=ranks,
        pools=tuple(_pool_share(choice.site, pool, count) for pool, count in choice.pools),
        listed_micro_usd_per_hour=choice.listed_micro_usd_per_hour,
        expected_micro_usd_per_hour=expected.micro_usd_per_hour,
        maximum_micro_usd_per_hour=choice.maximum_micro_usd_per_hour,
        cost=_span(expected.micro_usd, good[0], bad[0]),
        time=_span(expected.ms, good[1], bad[1]),
        iterations=_iterations(choice, expected),
        seconds_per_iteration=expected.seconds_per_iteration,
        seconds_per_iteration_alone=alone.seconds_per_iteration,
        basis=basis_of(needs, choice),
        exploration=_exploration(choice, expected),
        spot_pays=_when_spot_pays(needs, choice, expected, alone),
        factors=_factors(choice, expected, alone),
        alternatives=(
            *fewer_or_more(needs, choice, expected),
            *elsewhere(needs, sites, choice, expected, cheapest),
            *other_policies(needs, situation, expected),
        ),
        left_out=(*dearer_zones(choice), *choice.site.left_out, *no_sites),
        notes=notes_of(needs, choice, ranks),
        max_total_micro_usd=None
        if needs.max_total_micro_usd is None
        else needs.max_total_micro_usd + needs.judge_micro_usd,
        judge_micro_usd=needs.judge_micro_usd,
        max_hourly_micro_usd=needs.max_hourly_micro_usd,
        deadline_ms=needs.deadline_ms,
        max_runtime_ms=needs.max_runtime_ms,
        sites=_site_options(needs, sites, choice, disk_gib),
        pace_ms=_pace_ms(choice, expected),
        checkpoint_every=_checkpoint_every(needs, choice, expected),
        disk={} if needs.disk is None else dict(needs.disk.parts),
        zones=_spells(choice.site, sites),
        stand_ins=_stand_ins(needs, choice),
    )


def _spells(home: Site, sites: Sequence[Site]) -> tuple[ZoneSpells, ...]:
    """Return the spells of capacity of the zones where a run may have spot nodes, the plan's region first.

    Only a trainer on spot goes elsewhere for lack of spot (launcher/decide/moving.py). A zone has one kind of spell in
    a replay: that of the nodes for which it has capacity less often, or for less long.
    """
    by_zone: dict[tuple[str, str, str], ZoneSpells] = {}
    for site in (home, *(sites if home.trainer_zones else ())):
        for pool in site.zones:
            by_zone.setdefault((site.trainer.cloud, site.trainer.region, pool.offer.zone), pool.spells)
        for pool in site.trainer_zones:
            zone = (site.trainer.cloud, site.trainer.region, pool.offer.zone)
            kept = by_zone.setdefault(zone, pool.spells)
            own, known = pool.spells.spells, kept.spells
            if (own.uptime, own.up_hours) < (known.uptime, known.up_hours):
                by_zone[zone] = pool.spells
    return tuple(by_zone.values())


def _checkpoint_every(needs: CloudRequirements, choice: Choice, expected: Outlook) -> int:
    """Return the iterations between two checkpoints that the trainer will choose (engine/trainer/cadence.py)."""
    if not needs.paced_checkpoint_bytes:
        return needs.checkpoint_every
    on_spot = choice.site.trainer_zones
    hours = on_spot[0].terms.hazards.mean_life() if on_spot else ON_DEMAND_HOURS
    cost_ms = 1000 * needs.paced_checkpoint_bytes / CHECKPOINT_BYTES_PER_SECOND
    return batches_between(cost_ms, hours * HOUR_MS, 1000 * expected.seconds_per_iteration)


def _stand_ins(needs: CloudRequirements, choice: Choice) -> PlanStandIns | None:
    forecast, good, bad = (with_stand_ins(needs, choice, end) for end in (None, "good", "bad"))
    if forecast is None or good is None or bad is None:
        return None
    usd, ms = zip(
        *((ceil(outcome.micro_usd), ceil(outcome.hours * HOUR_MS)) for outcome in (forecast, good, bad)), strict=True
    )
    return PlanStandIns(
        hours=forecast.stand_in_hours, micro_usd=ceil(forecast.stand_in_micro_usd), cost=_span(*usd), time=_span(*ms)
    )


def _pace_ms(choice: Choice, expected: Outlook) -> tuple[int, ...]:
    """Return the time of an iteration of the plan with 0, 1, 2, ... rollout nodes at work.

    With fewer nodes fewer candidates fit, and the target takes more iterations: their time is counted in here.
    """
    recipe = choice.site.recipe
    gpus = max((pool.workers for pool, _ in choice.pools), default=0)
    pace: list[int] = []
    for nodes in range(choice.nodes + 1):
        share = recipe.iterations_share(recipe.candidates_per_prompt(nodes * gpus), recipe.gain_exponent.mean)
        ms = round(1000 * recipe.seconds(nodes * gpus) * share / expected.iterations_share)
        pace.append(min([ms, *pace[-1:]]))
    return tuple(pace)


def _span(expected: int, *ends: int) -> Span:
    return Span(expected=expected, low=min(expected, *ends), high=max(expected, *ends))


def _iterations(choice: Choice, expected: Outlook) -> Span:
    recipe, gpus = choice.site.recipe, sums(choice)[0]
    low = recipe.iterations.low * progress(recipe, gpus, recipe.gain_exponent.high).iterations_share
    high = recipe.iterations.high * progress(recipe, gpus, recipe.gain_exponent.low).iterations_share
    return _span(round(expected.iterations), round(low), round(high))


def _exploration(choice: Choice, expected: Outlook) -> ExplorationShare:
    recipe, exponent = choice.site.recipe, choice.site.recipe.gain_exponent
    gpus = sums(choice)[0]
    mean, low, high = (progress(recipe, gpus, e).iterations_share for e in (exponent.mean, exponent.high, exponent.low))
    return ExplorationShare(
        candidates_per_prompt=expected.candidates_per_prompt,
        kept=recipe.images_per_prompt,
        variance_gain=expected.variance_gain,
        rho=recipe.rho,
        iterations_share=replace(exponent, mean=mean, low=low, high=high),
        nodes_without=_nodes_without_exploring(recipe, choice.site),
    )


def _nodes_without_exploring(recipe: Recipe, site: Site) -> float:
    pools = site.zones or ((site.on_demand,) if site.on_demand is not None else ())
    rates = [pool.value.micro_usd_per_hour / pool.value.useful_share for pool in pools if pool.value.useful_share]
    if not rates:
        return 0.0
    gpus = pools[0].workers
    images = recipe.prompts * recipe.images_per_prompt
    return square_root_rule(
        images * recipe.rollout_gpu_seconds / gpus / 3600,
        recipe.train_seconds / 3600,
        site.trainer_micro_usd_per_hour,
        min(rates),
        assist_nodes=recipe.sampling_gpus * recipe.sampling_speed / gpus,
    )


def _when_spot_pays(needs: CloudRequirements, choice: Choice, expected: Outlook, alone: Outlook) -> WhenSpotPays | None:
    """Return the cost per iteration relative to the trainer alone, including hazards, cold starts and traffic.

    Without hazards, cold starts and traffic the ratio equals `relative_cost` of engine/exploration/value.py. For
    a plan without rollout nodes, the ratio is for the best plan with a single rollout node.
    """
    if not choice.nodes:
        single = with_nodes(needs, choice.site, 1)
        return None if single is None else _when_spot_pays(needs, single, outlook(single), alone)
    markets = {pool.offer.market for pool, _ in choice.pools}
    return WhenSpotPays(
        gpus=expected.useful_gpus,
        market="spot and on-demand" if len(markets) > 1 else "spot" if Market.SPOT in markets else "on-demand",
        cost_ratio=(expected.micro_usd / expected.iterations) / (alone.micro_usd / alone.iterations),
        iterations_share=expected.iterations_share,
    )


def _factors(choice: Choice, expected: Outlook, alone: Outlook) -> tuple[Factors, ...]:
    """Compare the plan with the same nodes on demand, and with the trainer alone."""
    if not choice.nodes:
        return ()
    baselines = {"the same nodes, all on demand": on_demand_outlook(choice), THE_TRAINER_ALONE: alone}
    return tuple(
        Factors(
            against=name,
            iterations=expected.iterations / baseline.iterations,
            hours_per_iteration=(expected.ms / expected.iterations) / (baseline.ms / baseline.iterations),
            micro_usd_per_hour=(expected.micro_usd / expected.ms) / (baseline.micro_usd / baseline.ms),
            their_micro_usd=baseline.micro_usd,
            their_ms=baseline.ms,
        )
        for name, baseline in baselines.items()
    )


def _pool_share(site: Site, pool: PricedPool, nodes: int) -> PoolShare:
    return PoolShare(
        zone=zone_text(pool.offer),
        instance_type=pool.offer.instance_type,
        market=pool.offer.market,
        nodes=nodes,
        micro_usd_per_hour=pool.offer.micro_usd_per_hour,
        micro_usd_per_useful_hour=round(pool.value.micro_usd_per_useful_hour),
        useful_share=share_at_work(site, pool),
        reclaimed_in_first_hour=None if pool.survival is None else pool.survival.taken_within(1.0),
        launch_odds=pool.odds,
        cold_start_ms=pool.cold_start,
        price_source=pool.offer.source,
        price_observed_at=pool.offer.observed_at,
    )


def _slots(choice: Choice, disk_gib: int) -> tuple[Slot, ...]:
    trainer, on_demand = choice.site.planned_trainer, choice.site.trainer.micro_usd_per_hour
    slots = [
        slot_of(trainer_slot(number), "ranks" if number else "trainer", trainer, on_demand, disk_gib)
        for number in range(choice.site.trainer_nodes)
    ]
    numbers = {Market.SPOT: 0, Market.ON_DEMAND: 0}
    for pool, count in choice.pools:
        for _ in range(count):
            market = pool.offer.market
            name = f"{'spot' if market is Market.SPOT else 'on-demand'}-{numbers[market]}"
            numbers[market] += 1
            slots.append(slot_of(name, "rollout", pool.offer, pool.on_demand_micro_usd_per_hour, disk_gib))
    return tuple(slots)


def _site_options(
    needs: CloudRequirements, sites: Sequence[Site], choice: Choice, disk_gib: int
) -> tuple[SiteOptions, ...]:
    """Return every region with a trainer whose nodes are together within `max_hourly`.

    Other clouds come last, because a failover copies the checkpoint to the other cloud.
    """
    limit = needs.max_hourly_micro_usd
    by_region: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        if limit is None or site.trainer_micro_usd_per_hour <= limit:
            by_region.setdefault((site.trainer.cloud, site.trainer.region), []).append(site)
    home = choice.site.trainer

    def preference(options: SiteOptions) -> tuple[bool, bool, int, tuple[str, str]]:
        cheapest = [min(o.placement.micro_usd_per_hour for o in options.trainer)] * choice.site.trainer_nodes
        cheapest += sorted(o.placement.micro_usd_per_hour for o in options.rollout)[:1] * choice.nodes
        is_home = options.place == (home.cloud, home.region)
        return not is_home, options.cloud != home.cloud, sum(cheapest), options.place

    every = (_options_in(place, there, choice, disk_gib) for place, there in by_region.items())
    return tuple(sorted(every, key=preference))


def _options_in(place: tuple[str, str], there: Sequence[Site], choice: Choice, disk_gib: int) -> SiteOptions:
    """Return the options of a region in buying order.

    In the planned region the planned trainer comes first, in other regions the cheapest trainer.
    """
    trainers = sorted(
        (site.trainer for site in there),
        key=lambda offer: (offer != choice.site.trainer, offer.micro_usd_per_hour, offer.instance_type),
    )
    on_spot = {pool.offer: pool for site in there for pool in site.trainer_zones}
    pools = [*there[0].zones, *([there[0].on_demand] if there[0].on_demand is not None else [])]

    def option(offer: Offer, on_demand_micro_usd_per_hour: int) -> Option:
        placement = placement_of(offer, disk_gib)
        return Option(placement=placement, on_demand_micro_usd_per_hour=on_demand_micro_usd_per_hour)

    return SiteOptions(
        cloud=place[0],
        region=place[1],
        trainer=(
            *(option(offer, pool.on_demand_micro_usd_per_hour) for offer, pool in on_spot.items()),
            *(option(offer, offer.micro_usd_per_hour) for offer in trainers),
        ),
        rollout=tuple(option(pool.offer, pool.on_demand_micro_usd_per_hour) for pool in pools),
    )
