"""Policies to compare with, each a function of the same facts as the shipped `decide`. Pure.

all-on-demand: every node on demand
spot-only: the shipped functions, stand-ins forbidden
uniform-progress: Can't Be Late (Wu et al., NSDI 2024): on demand when behind the line from 0 to the deadline
greedy-net: spot whenever there is any; on demand from the moment at which only that is in time
spothedge: SkyServe (arXiv 2411.01438): one extra spot node, and on demand for what is missing of the plan

trainer-on-demand: the shipped functions, the trainer on demand
no-promotion: the shipped functions, and a trainer lost on spot is replaced by a new node

A zone that refused is asked again after ten minutes. In the baselines with rules of their own all nodes of the trainer
are on demand.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.events import Market
from launcher.decide.actions import Action, Buy, Enter, Release
from launcher.decide.facts import Facts, NodeRecord, Stage, Wanted
from launcher.decide.reconcile import decide
from launcher.decide.replacing import stays
from launcher.market.hazard import COLD_START_MS
from launcher.placement.options import Option
from launcher.placement.plan import Slot
from launcher.replay.replay import PASS_MS, QUIET_MS, Policy
from launcher.replay.world import ANSWER_MS

AGAIN_MS = 600_000
"""Time after a refusal until a zone is asked again."""

CHANGE_MS = COLD_START_MS + 2 * ANSWER_MS + PASS_MS
"""Time that a change of capacity type costs: the cold start, the longest answer, and a pass."""

SPOTHEDGE_EXTRA = 1
"""Spot nodes above the plan that SpotHedge keeps."""


def all_on_demand(facts: Facts, wanted: Wanted) -> list[Action]:
    return _fill(facts, wanted, lambda slot: True)


def spot_only(facts: Facts, wanted: Wanted) -> list[Action]:
    """Return the actions of the shipped policy for a job with `spot: only`."""
    return decide(facts, replace(wanted, deadline_ms=None, rules=replace(wanted.rules, on_demand=False)))


def uniform_progress(facts: Facts, wanted: Wanted) -> list[Action]:
    """Keep at or above the line e(t) = work t / deadline; on demand stays until ahead by one change."""
    work, deadline_ms = facts.work, wanted.deadline_ms
    if work is None or deadline_ms is None:
        return _fill(facts, wanted, lambda slot: False)
    ahead_ms = work.done * work.iteration_ms[-1] - work.iterations * work.iteration_ms[-1] * facts.now_ms / deadline_ms
    has_steady = {node.slot for node in facts.nodes if stays(node) and node.market is Market.ON_DEMAND}
    is_late = _is_last_moment(facts, deadline_ms)
    return _fill(
        facts,
        wanted,
        lambda slot: is_late or ahead_ms < (CHANGE_MS if slot.name in has_steady else 0),
        goes_back=not is_late,
    )


def greedy_net(facts: Facts, wanted: Wanted) -> list[Action]:
    if wanted.deadline_ms is None:
        return _fill(facts, wanted, lambda slot: False)
    is_late = _is_last_moment(facts, wanted.deadline_ms)
    return _fill(facts, wanted, lambda slot: is_late, goes_back=False)


def spothedge(facts: Facts, wanted: Wanted) -> list[Action]:
    """Return actions for N + extra spot nodes, and min(N, N + extra - ready spot nodes) on demand."""
    slots = [slot for slot in wanted.slots if slot.role == "rollout"]
    spare = [replace(slot, name=f"extra-{n}") for n, slot in enumerate(slots[:SPOTHEDGE_EXTRA])]
    steady = [replace(slot, name=f"bridge-{n}") for n, slot in enumerate(slots)]
    ready = sum(stays(n) and n.market is Market.SPOT and "ready" in n.happened for n in facts.nodes)
    bridge = min(len(slots), len(slots) + SPOTHEDGE_EXTRA - ready)
    trainer = [slot for slot in wanted.slots if slot.role != "rollout"]
    surplus = {slot.name for slot in steady[bridge:]}
    let_go = tuple(n.name for n in facts.nodes if n.slot in surplus and stays(n))
    wider = replace(wanted, slots=(*trainer, *slots, *spare, *steady[:bridge]))
    actions = _fill(facts, wider, lambda slot: slot.name.startswith("bridge"), goes_back=False)
    return [*actions, Release(nodes=let_go)] if let_go else actions


BASELINES: Mapping[str, Policy] = {
    "all-on-demand": all_on_demand,
    "spot-only": spot_only,
    "uniform-progress": uniform_progress,
    "greedy-net": greedy_net,
    "spothedge": spothedge,
}


def trainer_on_demand(facts: Facts, wanted: Wanted) -> list[Action]:
    """Return the actions of the shipped policy for a job with `resources.trainer.use_spot: false`."""
    sites = [
        replace(site, trainer=tuple(o for o in site.trainer if o.placement.market is Market.ON_DEMAND))
        for site in facts.sites
    ]
    slots = [
        replace(slot, placement=sites[0].trainer[0].placement) if slot.role == "trainer" else slot
        for slot in wanted.slots
    ]
    return decide(replace(facts, sites=sites), replace(wanted, slots=slots))


def no_promotion(facts: Facts, wanted: Wanted) -> list[Action]:
    return decide(facts, replace(wanted, rules=replace(wanted.rules, promotes=False)))


TRAINER_POLICIES: Mapping[str, Policy] = {"trainer-on-demand": trainer_on_demand, "no-promotion": no_promotion}
"""Policies that differ from the shipped one for a trainer on spot only."""


def _is_last_moment(facts: Facts, deadline_ms: int) -> bool:
    """Return whether only on demand, from now to the end, is in time. One change may still be ahead."""
    work = facts.work
    assert work is not None
    return facts.now_ms + work.left_ms(work.nodes) + 2 * CHANGE_MS + QUIET_MS >= deadline_ms


def _fill(
    facts: Facts, wanted: Wanted, wants_steady: Callable[[Slot], bool], *, goes_back: bool = True
) -> list[Action]:
    """Return the actions that fill every slot: on demand where wanted, else spot of the cheapest ready zone.

    `goes_back`: replace on-demand nodes where spot is wanted again; the old node works until the new one does.
    """
    actions: list[Action] = []
    if facts.stage is Stage.PLANNED:
        actions.append(Enter(stage=Stage.RUNNING))
    site = facts.sites[0]
    held: dict[str, list[NodeRecord]] = {slot.name: [] for slot in wanted.slots}
    for node in facts.nodes:
        held.setdefault(node.slot, []).append(node)
    trainer = [slot.name for slot in wanted.slots if slot.role != "rollout"]
    trainer_up = all(any("up" in n.happened and n.is_live for n in held[name]) for name in trainer)
    free = _ready_zones(facts, [o for o in site.rollout if o.placement.market is Market.SPOT])
    steady = next((o for o in site.rollout if o.placement.market is Market.ON_DEMAND), None)
    of_trainer = [o for o in site.trainer if o.placement.market is Market.ON_DEMAND]
    for slot in wanted.slots:
        mine = [n for n in held[slot.name] if stays(n)]
        if slot.role != "rollout":
            if not mine:
                actions.append(_buy(slot, of_trainer[0], held[slot.name], wanted))
            continue
        stand_ins = [n for n in mine if n.market is Market.ON_DEMAND]
        on_spot = [n for n in mine if n.market is Market.SPOT]
        keeps = wants_steady(slot)
        if stand_ins and any("ready" in n.happened for n in on_spot):
            actions.append(Release(nodes=tuple(n.name for n in stand_ins)))
        elif trainer_up and not mine and keeps and steady is not None:
            actions.append(_buy(slot, steady, held[slot.name], wanted))
        elif trainer_up and not on_spot and not keeps and free and (not stand_ins or goes_back):
            actions.append(_buy(slot, free[0], held[slot.name], wanted))
    return actions


def _ready_zones(facts: Facts, options: list[Option]) -> list[Option]:
    """Return the spot options that did not refuse a node in the last ten minutes, cheapest first."""
    refused = {n.zone for n in facts.nodes if facts.now_ms - n.happened.get("no_capacity", -AGAIN_MS) < AGAIN_MS}
    ready = [option for option in options if option.placement.zone not in refused]
    return sorted(ready, key=lambda option: option.placement.micro_usd_per_hour)


def _buy(slot: Slot, option: Option, held: list[NodeRecord], wanted: Wanted) -> Buy:
    return Buy(
        slot=slot,
        option=option,
        generation=len(held),
        name=f"{wanted.run}-{slot.name}-g{len(held)}",
        reserved_micro_usd=0,
    )
