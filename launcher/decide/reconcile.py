"""Decide the controller's actions from facts. Pure: no I/O and no clock.

news:   the cloud's state now - the ledger's records = events to write down
paid:   the real purchases and current prices - the ledger's records = price events
decide: the plan - the existing nodes = stops, requests and purchases

The functions keep no state. Equal facts give equal answers, and every action may be repeated.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from engine.events import EngineFinished
from launcher.decide import budget_guard
from launcher.decide.actions import Action, Buy, Enter, Promote, Release, RepeatPromotion, RepeatRequest, StopEngine
from launcher.decide.facts import FAILING, FINISHING, FOUND, OVER, Facts, NodeRecord, Stage, Wanted
from launcher.decide.failover import Elsewhere, StandIn, why_idle
from launcher.decide.further_nodes import given_back_trainer
from launcher.decide.giving_back import nodes_above_hourly_limit, nodes_to_release
from launcher.decide.known_nodes import KnownNodes
from launcher.decide.launch_history import Tried
from launcher.decide.placing import place_of
from launcher.decide.promotion import cut_off_trainer, is_taking_over, successor_among, with_successor
from launcher.decide.replacing import attempt_of, needs_successor, stays
from launcher.decide.run_budget import beside, budget_refusal
from launcher.decide.steps import Steps, unprotected
from launcher.decide.stopping import SAME_ENDS, is_given_up, limit_reached, nothing_works
from launcher.market.side_prices import MINIMUM_BILLED_MS
from launcher.placement.options import Option
from launcher.placement.plan import Slot


def decide(facts: Facts, wanted: Wanted, steps: Steps | None = None) -> list[Action]:
    """Return the actions that turn the existing nodes into the wanted nodes.

    Guards come first, each as a step of its own: the end of a run, the limits, nodes that must go. Purchases come last,
    and only if no step of the pass has failed. `steps`: None raises every error at once.
    """
    steps = steps or unprotected()
    live = _live(facts.nodes)
    paid = [*live, *facts.kept]
    if facts.stage in OVER:
        return [_release(paid)] if paid else []
    ends_all: list[Action] = [_release(paid)] if paid else []
    finished = facts.finished
    if finished is not None:
        return steps.take(lambda: _wind_up(facts, wanted, finished, paid), ends_all)
    if facts.stage in (Stage.STOPPING, Stage.DRAINING):
        return steps.take(lambda: _stop(facts, wanted, live), ends_all)
    stop = limit_reached(facts, wanted, live, steps)
    if stop is not None and facts.kept and limit_reached(replace(facts, kept=()), wanted, live, steps) is None:
        failed = [node for node in facts.kept if "releasing" not in node.happened]
        return [replace(_release(failed), why="the budget needs its money")] if failed else []
    index = steps.take(lambda: _index(facts), None)
    if stop is None and index is not None:
        known, tried, recent = index
        stop = nothing_works(recent, wanted, tried, steps)
    if stop is not None and not (facts.doubt is not None and facts.doubt.is_ahead):
        return [stop]
    if facts.doubt is not None:
        is_recorded = facts.stage is Stage.RUNNING and facts.reason == facts.doubt.text
        return [] if is_recorded else [Enter(stage=Stage.RUNNING, reason=facts.doubt.text)]
    if index is None:
        staying = [node for node in live if "releasing" not in node.happened]
        above = nodes_above_hourly_limit(facts, wanted, staying, steps) if facts.sites else []
        return [_release(above)] if above else []
    if facts.login:
        reason = f"waits: {facts.login}"
        is_recorded = (facts.stage, facts.reason) == (Stage.RUNNING, reason)
        return [] if is_recorded else [Enter(stage=Stage.RUNNING, reason=reason)]
    known, tried, recent = index
    given_back = steps.take(lambda: given_back_trainer(recent, wanted, live, tried), None)
    if given_back is not None:
        return [given_back]
    cut_off = steps.take(lambda: cut_off_trainer(recent, wanted), None)
    if cut_off is not None:
        return [cut_off]
    let_go = nodes_to_release(recent, wanted, live, tried, steps)
    why = steps.take(lambda: why_idle(tried, facts.now_ms), None) or ""
    releases: list[Action] = [replace(_release(let_go), why=why)] if let_go else []
    if steps.errors:
        return releases
    return steps.take(lambda: _fill(facts, recent, known, wanted, tried, releases), releases)


def _live(nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    return nodes.live if isinstance(nodes, KnownNodes) else [node for node in nodes if node.is_live]


def _index(facts: Facts) -> tuple[KnownNodes, Tried, Facts]:
    """Return all nodes, what they tried, and the facts with only those nodes that can change a decision on a slot."""
    known = KnownNodes.of(facts.nodes)
    tried = known.tried(facts.planned_ms) if facts.sites else Tried()
    return known, tried, replace(facts, nodes=known.decisive())


def _release(nodes: Sequence[NodeRecord]) -> Release:
    return Release(nodes=tuple(node.name for node in nodes))


def _wind_up(facts: Facts, wanted: Wanted, finished: EngineFinished, live: Sequence[NodeRecord]) -> list[Action]:
    """Release the nodes of an engine without further work, then enter the final stage.

    Only the trainer gets `settle_ms` to exit by itself.
    """
    since_ms = facts.stage_ms if facts.stage in (Stage.STOPPING, Stage.DRAINING) else facts.finished_ms
    settling = facts.now_ms < min(since_ms, facts.finished_ms) + wanted.settle_ms
    surplus = [node for node in live if not (settling and node.role == "trainer")]
    if surplus:
        return [_release(surplus)]
    if live:
        return []
    if facts.reason.startswith(FAILING):
        return [Enter(stage=Stage.FAILED, reason=facts.reason.removeprefix(FAILING))]
    match finished.reason:
        case "target" | "iterations":
            return [Enter(stage=Stage.FINISHED, reason=finished.reason)]
        case "stopped" if facts.reason.startswith(FINISHING):
            return [Enter(stage=Stage.FINISHED, reason=facts.reason.removeprefix(FINISHING))]
        case "stopped":
            return [Enter(stage=Stage.STOPPED, reason=facts.reason or finished.text or "stopped")]
        case _:
            return [Enter(stage=Stage.FAILED, reason=f"{finished.reason}: {finished.text}")]


def _stop(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord]) -> list[Action]:
    """Ask the engine to stop, wait `settle_ms`, then release every node.

    A run that fails by itself waits for its kept node, so that a person may look at it, unless a limit is reached.
    """
    waits_for_kept = facts.stage is Stage.DRAINING and facts.reason.startswith(FAILING)
    if not waits_for_kept or limit_reached(facts, wanted, live, unprotected()) is not None:
        live = [*live, *facts.kept]
    elif not live and facts.kept:
        return []
    if not live and facts.reason.startswith(FAILING):
        return [Enter(stage=Stage.FAILED, reason=facts.reason.removeprefix(FAILING))]
    if not live and facts.reason.startswith(FINISHING):
        return [Enter(stage=Stage.FINISHED, reason=facts.reason.removeprefix(FINISHING))]
    if not live:
        return [Enter(stage=Stage.STOPPED, reason=facts.reason)]
    settling = facts.now_ms < facts.stage_ms + wanted.settle_ms
    if settling and any(node.role == "trainer" and "ready" in node.happened for node in live):
        return [StopEngine(reason=facts.reason)]
    return [_release(live)]


def _fill(
    facts: Facts, recent: Facts, known: KnownNodes, wanted: Wanted, tried: Tried, releases: Sequence[Action]
) -> list[Action]:
    """Repeat unsent requests, and buy a successor for every empty or soon empty slot.

    `recent`: the facts with only those nodes that can change a decision on a slot. `releases`: the releases decided
    before.
    """
    live = known.live
    actions: list[Action] = [
        RepeatRequest(node=node.name) for node in live if not {"requested", FOUND} & node.happened.keys()
    ]
    actions += [RepeatPromotion(node=node.name) for node in live if is_taking_over(node)]
    actions += releases
    after, launches = list(live), _launches(known, wanted, facts.now_ms)
    refusals: list[str] = []
    by_slot: defaultdict[str, list[NodeRecord]] = defaultdict(list)
    for node in recent.nodes:
        by_slot[node.slot].append(node)
    for slot in with_successor(wanted, recent):
        held = by_slot[slot.name]
        latest = max(held, key=lambda node: node.generation, default=None)
        if latest is not None and not needs_successor(slot, latest, held, recent):
            continue
        if slot.role == "rollout" and (evidence := is_given_up(recent, slot)) is not None:
            refusals.append(f"{slot.name} is left empty, its last {SAME_ENDS} nodes ended in the same way: {evidence}")
            continue
        promoted = successor_among(slot, held, recent, wanted)
        if latest is not None and promoted is not None:
            generation = latest.generation + 1
            why = f"{latest.name} ended: {latest.evidence}"
            actions.append(Promote(node=promoted.name, slot=slot.name, generation=generation, why=why))
            by_slot[promoted.slot] = [node for node in by_slot[promoted.slot] if node.name != promoted.name]
            after = [node for node in after if node.name != promoted.name]
            after.append(replace(promoted, slot=slot.name, generation=generation, role=slot.role))
            continue
        works = any(stays(node) for node in held)  # a stand-in counts as working; the slot's next node may be on spot
        if wanted.launch_rate is not None and wanted.launch_rate.next_ms(launches) > facts.now_ms:
            refusals.append(f"{slot.name} is not bought: {wanted.launch_rate.per_minute} launches a minute at most")
            break
        placed = place_of(slot, tried, after, facts, wanted)
        move, why = (placed.option, placed.why) if isinstance(placed, StandIn | Elsewhere) else (placed, "")
        if not isinstance(move, Option):
            refusals += [] if works else [f"{slot.name} is not bought: {move.why}"]
            continue
        rate = move.placement.micro_usd_per_hour + beside(move.placement, facts)
        generation = known.next_generation(wanted.run, slot.name, 0 if latest is None else latest.generation + 1)
        reserve = budget_guard.worst_case(rate, MINIMUM_BILLED_MS)
        missing = _missing_beside(slot, after, wanted)
        # On clouds, the trainer's nodes are alike, but the plan's prices may be old.
        rates = [rate, *(rate if facts.sites else one.placement.micro_usd_per_hour for one in missing)]
        reserves = sum(budget_guard.worst_case(one, MINIMUM_BILLED_MS) for one in rates)
        # Each amount is rounded up, so that of several nodes may be less than their sum, by as many micro-dollars.
        refusal = budget_refusal(facts, wanted, after, sum(rates), reserves + len(missing))
        if refusal is not None and facts.kept:
            failed = [node for node in facts.kept if "releasing" not in node.happened]
            actions += [replace(_release(failed), why=f"{slot.name} needs its money")] if failed else []
            refusals.append(
                f"{slot.name} is not bought before the end of {', '.join(node.name for node in facts.kept)}"
            )
            continue
        if refusal is not None:
            if slot.role != "rollout" and refusal.for_good and not why:
                return [Enter(stage=Stage.DRAINING, reason="budget")]
            trainer = [node for node in live if node.role != "rollout" and stays(node)]
            if slot.role != "rollout" and facts.sites and trainer:
                # The money went to other runs meanwhile. Nodes of a trainer that is not whole train nothing.
                return [replace(_release(trainer), why=f"{slot.name} is not bought: {refusal.text}")]
            without = f" without {', '.join(one.name for one in missing)}" if missing else ""
            refusals += [] if works else [f"{slot.name} is not bought{without}: {refusal.text}"]
            continue
        name = f"{wanted.run}-{slot.name}-g{generation}"
        actions.append(
            Buy(
                slot=slot,
                option=move,
                generation=generation,
                name=name,
                reserved_micro_usd=reserve,
                stand_in=why if isinstance(placed, StandIn) else "",
                move=why if isinstance(placed, Elsewhere) else "",
            )
        )
        bought = _intended(name, slot, move, generation, reserve, facts)
        after.append(bought)
        launches.append(facts.now_ms)
        if facts.sites:
            tried.add(attempt_of(bought))
    away = None if facts.store_away_ms is None else "the bucket does not answer the trainer"
    waiting = [f"waits: {trouble}" for trouble in (facts.trouble, away) if trouble]
    reason = "; ".join(waiting + [_steady(text) for text in refusals])
    if facts.stage is not Stage.RUNNING or facts.reason != reason:
        actions.append(Enter(stage=Stage.RUNNING, reason=reason))
    return actions


def _missing_beside(slot: Slot, after: Sequence[NodeRecord], wanted: Wanted) -> list[Slot]:
    """Return the other nodes of the trainer that are missing too. None is bought if the money does not bear all."""
    if slot.role == "rollout":
        return []
    held = {node.slot for node in after if stays(node)} | {slot.name}
    return [one for one in wanted.slots if one.role != "rollout" and one.name not in held]


def _launches(known: KnownNodes, wanted: Wanted, now_ms: int) -> list[int]:
    """Return the launches that may delay the next one: n launches use up n spacings at most, so older ones do not."""
    if wanted.launch_rate is None:
        return []
    return known.requested_after(now_ms - len(known) * wanted.launch_rate.spacing_ms - 1)


def _steady(refusal: str) -> str:
    """Return the refusal without its amounts. Amounts change from pass to pass and would fill the ledger."""
    return refusal.partition(": $")[0]


def _intended(name: str, slot: Slot, option: Option, generation: int, reserve: int, facts: Facts) -> NodeRecord:
    return NodeRecord(
        name=name,
        slot=slot.name,
        generation=generation,
        role=slot.role,
        market=option.placement.market,
        micro_usd_per_hour=option.placement.micro_usd_per_hour,
        requested_ms=facts.now_ms,
        reserved_micro_usd=reserve,
        happened={},
        wanted=option if facts.sites else None,
        zone=option.placement.zone,
        instance_type=option.placement.instance_type,
    )
