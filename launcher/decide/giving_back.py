"""Decide which nodes to give back: leftover nodes, and stand-ins whose spot successor has settled."""

from collections.abc import Sequence

from engine.events import Market
from launcher.decide.facts import Facts, NodeRecord, Wanted
from launcher.decide.failover import GIVE_BACK_GAP_MS, is_home_given_up, why_idle
from launcher.decide.further_nodes import nodes_in_other_zones
from launcher.decide.launch_history import GIVE_BACK_AFTER_MS, Tried
from launcher.decide.placing import place_of
from launcher.decide.promotion import (
    SAVED_MS,
    SUCCESSOR,
    LossOfTrainer,
    may_train,
    trainer_that_stands_in,
    why_on_demand,
)
from launcher.decide.replacing import is_stand_in, needs_successor
from launcher.decide.run_budget import beside, hourly_of
from launcher.decide.steps import Steps, unprotected
from launcher.decide.waiting import why_late
from launcher.placement.options import Option
from launcher.placement.plan import Slot


def nodes_to_release(
    facts: Facts, wanted: Wanted, live: Sequence[NodeRecord], tried: Tried, steps: Steps | None = None
) -> list[NodeRecord]:
    """Return the nodes to release.

    First come nodes without a trainer, then nodes left behind by a failover, then replaced stand-ins, then nodes above
    the hourly limit. Each is a step of its own: the hourly limit holds even if the search for replaced stand-ins fails.
    """
    if not facts.sites:
        return []
    steps = steps or unprotected()
    staying = [node for node in live if "releasing" not in node.happened]
    if steps.take(lambda: is_home_given_up(tried, wanted.rules, facts.now_ms), False):
        return staying
    if steps.take(lambda: why_idle(tried, facts.now_ms), None) is not None:
        idle = {slot.name for slot in wanted.slots if not may_train(slot, wanted)}
        return [node for node in staying if node.role != "trainer" and node.slot in idle]
    none: list[NodeRecord] = []
    left = steps.take(lambda: _left_behind(staying, tried), none)
    kept = [node for node in staying if node not in left]
    replaced = steps.take(lambda: _given_back(facts, wanted, live, kept, tried), none)
    replaced += steps.take(lambda: _given_back_trainer(facts, wanted, kept, tried), none)
    kept = [node for node in kept if node not in replaced]
    return left + replaced + nodes_above_hourly_limit(facts, wanted, kept, steps)


def _left_behind(staying: Sequence[NodeRecord], tried: Tried) -> list[NodeRecord]:
    """Return the nodes that a failover of the trainer left behind."""
    trainer = tried.trainer
    elsewhere = [
        node
        for node in staying
        if trainer is not None and node.name != trainer.name and (node.role == "trainer" or node.site != trainer.site)
    ]
    return elsewhere + [node for node in nodes_in_other_zones(staying) if node not in elsewhere]


def nodes_above_hourly_limit(
    facts: Facts, wanted: Wanted, staying: Sequence[NodeRecord], steps: Steps
) -> list[NodeRecord]:
    """Return the nodes above the hourly limit: failed ones, then stand-ins, then spot nodes; the dearest first."""
    slots = {slot.name: slot for slot in wanted.slots}

    def may_go(node: NodeRecord) -> bool:
        if node.market is Market.SPOT:
            return True
        return node.slot in slots and steps.take(lambda: is_stand_in(node, slots[node.slot], facts), False)

    failed, shed = [node for node in facts.kept if "releasing" not in node.happened], list[NodeRecord]()
    while wanted.limits.max_hourly is not None and failed:
        if hourly_of([*staying, *failed]) <= wanted.limits.max_hourly:
            break
        shed.append(failed.pop())
    kept = [*staying, *failed]
    sheddable = sorted(
        filter(may_go, staying), key=lambda node: (node.market is Market.ON_DEMAND, node.micro_usd_per_hour, node.name)
    )
    while wanted.limits.max_hourly is not None and sheddable and hourly_of(kept) > wanted.limits.max_hourly:
        dearest = sheddable.pop()
        kept.remove(dearest)
        shed.append(dearest)
    return shed


def _given_back(
    facts: Facts, wanted: Wanted, live: Sequence[NodeRecord], kept: Sequence[NodeRecord], tried: Tried
) -> list[NodeRecord]:
    """Return the stand-ins to give back. A settled spot node of the slot replaces each of them.

    A spot node is settled once its zone and type have had capacity for `GIVE_BACK_AFTER_MS`.
    If the hourly limit does not allow a spot node beside any stand-in, one stand-in is released first, as soon as the
    spot offer may be requested. Waiting would keep the stand-in for the rest of the run. If spot is then refused, a
    stand-in is bought again.
    """
    given_back: list[NodeRecord] = []
    alone: list[tuple[Slot, NodeRecord]] = []
    for slot in wanted.slots:
        if slot.role == "trainer":
            continue
        here = [node for node in kept if node.slot == slot.name]
        stand_ins = [node for node in here if is_stand_in(node, slot, facts)]
        if any(_has_settled(node, facts, tried) for node in here if node not in stand_ins):
            given_back += stand_ins
        elif stand_ins and len(stand_ins) == len(here):
            alone += [(slot, node) for node in stand_ins]
    frees_budget = any(node.is_leaving and node.market is Market.ON_DEMAND for node in live)
    if given_back or frees_budget or any(_is_starting_on_spot(node) for node in kept):
        return given_back
    for slot, stand_in in alone:
        if _exceeds_hourly_limit(slot, kept, tried, facts, wanted):
            held = [node for node in facts.nodes if node.slot == slot.name]
            if needs_successor(slot, max(held, key=lambda node: node.generation), held, facts):
                return [stand_in]
    return []


def _given_back_trainer(facts: Facts, wanted: Wanted, kept: Sequence[NodeRecord], tried: Tried) -> list[NodeRecord]:
    """Return the trainer on demand of a plan with its trainer on spot, if a spot node may take its role now.

    Right after a checkpoint, because the work since then is lost. The spot node is settled, and takes the role as after
    a loss, once the end of the old trainer is on record. Nodes of the successor's slot go once nobody needs them.
    """
    spare = [node for node in kept if node.slot == SUCCESSOR]
    trainer = trainer_that_stands_in(kept, facts, wanted)
    if trainer is None:
        is_coming = any(node.role == "trainer" and node.is_live for node in facts.nodes)
        return spare if is_coming and not any(map(_is_ending_trainer, facts.nodes)) else []
    if facts.saved_ms is None or facts.now_ms - facts.saved_ms > SAVED_MS:
        return []
    if why_on_demand(facts, wanted) or why_late(facts, wanted) is not None:
        return []
    released_ms = [
        node.happened["releasing"] for node in facts.nodes if node.slot == trainer.slot and "releasing" in node.happened
    ]
    if released_ms and facts.now_ms < max(released_ms) + GIVE_BACK_GAP_MS:
        return []
    alike = {slot.name for slot in wanted.slots if may_train(slot, wanted)} | {SUCCESSOR}
    loss = LossOfTrainer.of(facts, wanted)
    is_there = any(
        node.slot in alike and node.market is Market.SPOT and _has_settled(node, facts, tried)
        for node in kept
        if node.wanted is not None and not (loss and loss.why_not_on_spot(node.wanted, tried, facts.now_ms))
    )
    return [trainer] if is_there else []


def _is_ending_trainer(node: NodeRecord) -> bool:
    return node.role == "trainer" and node.is_live and node.is_leaving


def _is_starting_on_spot(node: NodeRecord) -> bool:
    return node.market is Market.SPOT and not node.is_ready


def _has_settled(node: NodeRecord, facts: Facts, tried: Tried) -> bool:
    if not node.is_ready or node.wanted is None or node.is_leaving:
        return False
    return facts.now_ms >= node.happened["up"] + GIVE_BACK_AFTER_MS or tried.has_stayed(node.wanted, facts.now_ms)


def _exceeds_hourly_limit(slot: Slot, kept: Sequence[NodeRecord], tried: Tried, facts: Facts, wanted: Wanted) -> bool:
    """Return whether the hourly limit alone prevents a request for a spot node beside the stand-in."""
    move = place_of(slot, tried, kept, facts, wanted)
    if not isinstance(move, Option):
        return False
    rate = move.placement.micro_usd_per_hour + beside(move.placement, facts)
    limits = ((wanted.limits.max_hourly, 0), (wanted.all_runs.max_hourly, facts.others.hourly))
    paid = hourly_of([*kept, *facts.kept])
    return any(limit is not None and paid + others + rate > limit for limit, others in limits)
