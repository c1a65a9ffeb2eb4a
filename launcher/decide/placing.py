"""Decide where a slot's next node is bought."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from engine.events import Market
from launcher.decide.facts import Facts, NodeRecord, Wanted
from launcher.decide.failover import (
    Move,
    StandIn,
    Wait,
    back_to_spot,
    home_of,
    next_elsewhere,
    next_rollout,
    next_spot_trainer,
    next_trainer,
    site_of_run,
)
from launcher.decide.further_nodes import (
    missing_trainer_slots,
    next_trainer_node,
    number_of_trainer_nodes,
    trains_without,
)
from launcher.decide.launch_history import Tried
from launcher.decide.moving import options_elsewhere
from launcher.decide.promotion import SUCCESSOR, LossOfTrainer, may_train, trainer_on_spot, why_on_demand
from launcher.decide.replacing import stays
from launcher.decide.run_budget import beside, hourly_of
from launcher.decide.waiting import may_risk_spot, why_late, why_stand_in, why_trainer_stand_in
from launcher.placement.options import Option, SiteOptions
from launcher.placement.plan import Slot
from launcher.placement.price_of_waiting import Prices


def place_of(slot: Slot, tried: Tried, after: Sequence[NodeRecord], facts: Facts, wanted: Wanted) -> Move:
    """Return the offer to buy for a slot's next node, a wait, or `NothingLeft`.

    Offers above the hourly limit are left out. A trainer of several nodes is whole before rollout nodes are bought, or
    trains without the missing one.

    `after`: the nodes after the actions decided so far.
    """
    if not facts.sites:
        return slot.option
    limit, trainer_nodes = wanted.limits.max_hourly, number_of_trainer_nodes(wanted)
    if slot.role != "rollout":
        if trainer_nodes > 1:
            beside_others = next_trainer_node(slot.name, after, tried, wanted.rules, facts.now_ms)
            if beside_others is not None:
                return beside_others
        sites = _within(facts.sites, None if limit is None else limit // trainer_nodes)
        if slot.placement.market is Market.SPOT:
            return _trainer_on_spot(slot, tried, after, facts, wanted, sites)
        return next_trainer(tried, sites, wanted.rules, facts.now_ms)
    lacking = missing_trainer_slots(wanted, after) if trainer_nodes > 1 else []
    if lacking and not trains_without(lacking, after, facts.nodes, wanted):
        return Wait(until_ms=None, why="the trainer comes first")
    is_alike = may_train(slot, wanted)
    place = tried.trainer.site if tried.trainer is not None else site_of_run(tried, facts.sites).place
    here = [site for site in facts.sites if site.place == place and (tried.trainer is not None or is_alike)]
    sites = _within(here, None if limit is None else limit - hourly_of(after))
    nodes = sum(slot.role == "rollout" for slot in wanted.slots)
    if slot.name == SUCCESSOR or any(node.slot == slot.name and stays(node) for node in after):
        if not may_risk_spot(facts, wanted):
            return Wait(until_ms=None, why="the deadline leaves no time for another preemption")
        of_trainer = slot.name == SUCCESSOR
        return back_to_spot(slot.option, nodes, tried, sites, wanted.rules, facts.now_ms, of_trainer=of_trainer)
    price = None if facts.work is None else partial(_why_stand_in, slot, after, facts, wanted)
    return next_rollout(slot.option, nodes, tried, sites, wanted.rules, facts.now_ms, price, may_train=is_alike)


def _trainer_on_spot(
    slot: Slot, tried: Tried, after: Sequence[NodeRecord], facts: Facts, wanted: Wanted, sites: Sequence[SiteOptions]
) -> Move:
    """Return the next trainer of a plan with its trainer on spot: on spot, or on demand where spot does not pay."""
    spot = [option for option in home_of(tried, sites).trainer if option.placement.market is Market.SPOT]
    loss = LossOfTrainer.of(facts, wanted)
    refused = {
        option.place: "" if loss is None else loss.why_not_on_spot(option, tried, facts.now_ms) for option in spot
    }
    costs_more = next(iter(refused.values()), "") if all(refused.values()) else ""
    if tried.trainer is None:
        home = home_of(tried, sites)
        elsewhere = options_elsewhere(home, sites, tried, facts, wanted, after)
        if (next_site := next_elsewhere(elsewhere, home, tried, wanted.rules, facts.now_ms)) is not None:
            return next_site
    why = why_on_demand(facts, wanted) or why_late(facts, wanted) or costs_more
    if why and wanted.rules.on_demand:
        move = next_trainer(tried, [_on_demand_only(site) for site in sites], wanted.rules, facts.now_ms)
        return StandIn(option=move, why=why) if isinstance(move, Option) else move
    pays = sites
    if any(refused.values()):
        pays = [
            replace(site, trainer=tuple(option for option in site.trainer if not refused.get(option.place)))
            for site in sites
        ]
    price = None if facts.work is None else partial(_why_trainer_stand_in, slot, after, facts, wanted)
    nodes = sum(slot.role == "rollout" for slot in wanted.slots)
    return next_spot_trainer(slot.option, nodes, tried, pays, wanted.rules, facts.now_ms, price)


def _on_demand_only(site: SiteOptions) -> SiteOptions:
    steady = tuple(option for option in site.trainer if option.placement.market is Market.ON_DEMAND)
    return replace(site, trainer=steady)


def _why_trainer_stand_in(
    slot: Slot,
    after: Sequence[NodeRecord],
    facts: Facts,
    wanted: Wanted,
    stand_in: Option,
    lacking: Sequence[Option],
    out_since_ms: int,
) -> str | None:
    working = [node for node in after if node.role == "rollout" and stays(node)]
    rollout = [other for other in wanted.slots if other.role == "rollout"]
    prices = Prices(
        trainer=min(option.whole_micro_usd_per_hour for option in lacking),
        spot=sum(other.option.whole_micro_usd_per_hour for other in rollout) / max(1, len(rollout)),
        on_demand=sum(map(_on_demand_price, rollout)) / max(1, len(rollout)),
        trainer_on_demand=_on_demand_price(slot),
    )
    idle = hourly_of(working)
    price = stand_in.whole_micro_usd_per_hour
    return why_trainer_stand_in(facts, wanted, prices, len({n.slot for n in working}), idle, out_since_ms, price)


def _on_demand_price(slot: Slot) -> int:
    """Return the hourly price of a slot's node on demand; its address may cost more than beside spot."""
    on_demand = replace(slot.placement, market=Market.ON_DEMAND)
    return slot.on_demand_micro_usd_per_hour + on_demand.side_micro_usd_per_hour


def _why_stand_in(
    slot: Slot,
    after: Sequence[NodeRecord],
    facts: Facts,
    wanted: Wanted,
    stand_in: Option,
    lacking: Sequence[Option],
    out_since_ms: int,
) -> str | None:
    trainer = next((node for node in after if node.role == "trainer"), None)
    if trainer is None:
        return None  # a stand-in has nothing to work for
    working = len({node.slot for node in after if node.role == "rollout" and stays(node)})
    planned = trainer_on_spot(wanted)
    prices = Prices(
        trainer=number_of_trainer_nodes(wanted) * (trainer.micro_usd_per_hour + trainer.beside_micro_usd_per_hour),
        spot=min((option.whole_micro_usd_per_hour for option in lacking), default=slot.on_demand_micro_usd_per_hour),
        on_demand=_on_demand_price(slot),
        trainer_on_demand=None if planned is None else _on_demand_price(planned),
    )
    price = stand_in.placement.micro_usd_per_hour + beside(stand_in.placement, facts)
    return why_stand_in(facts, wanted, prices, working, out_since_ms, price)


def _within(sites: Sequence[SiteOptions], micro_usd_per_hour: int | None) -> Sequence[SiteOptions]:
    """Return the sites without offers above the price limit.

    If every offer is too expensive, the sites are returned unchanged, so that the budget guard's refusal names the
    amounts.
    """
    if micro_usd_per_hour is None:
        return sites

    def fits(option: Option) -> bool:
        return option.whole_micro_usd_per_hour <= micro_usd_per_hour

    def cheap(options: tuple[Option, ...]) -> tuple[Option, ...]:
        return tuple(option for option in options if fits(option)) or options

    if all(site.dearest_micro_usd_per_hour <= micro_usd_per_hour for site in sites):
        return sites
    trainers_fit = any(fits(option) for site in sites for option in site.trainer)
    return [
        replace(
            site,
            trainer=tuple(option for option in site.trainer if fits(option)) if trainers_fit else site.trainer,
            rollout=cheap(site.rollout),
        )
        for site in sites
    ]
