"""The trainer is a role that a node has for a time. When a spot trainer is lost, a node that is up takes its role.

The node's agent starts again as coordinator and trainer, from the newest checkpoint. That takes seconds, where a new
node takes minutes. The slot that the node leaves is filled again.

    on spot -> lost -> a node that is up takes the role
                    -> no such node: bought, on spot or as a stand-in on demand (waiting.py)
    on spot -> the bucket answers the controller and not the trainer -> released; a node that is up takes the role
    on demand -> a spot node has settled, and a checkpoint was saved just now -> released; the spot node takes the role

A trainer is on demand, too, while losses cost more than spot saves, and after three losses without a new iteration.
Pure: no clock, no I/O.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.events import Market
from launcher.decide.actions import Release
from launcher.decide.facts import PROMOTED, STEADY_ITERATIONS, Facts, NodeRecord, Wanted
from launcher.decide.launch_history import Tried
from launcher.decide.replacing import is_stand_in
from launcher.decide.waiting import needs_on_demand, why_late
from launcher.money import HOUR_MS, dollars, duration
from launcher.placement.options import Option
from launcher.placement.plan import Slot
from launcher.placement.price_of_waiting import CHANGE_MS, RESTART_MS

LOSSES = 3
"""Preemptions of the trainer without a new iteration after which the next trainer is on demand. The lives of such a
market are shorter than an iteration, so the run would pay and never end."""

SAVED_MS = 15_000
"""Longest age of a checkpoint, in milliseconds, at which a stand-in is given back: the work since then is lost. A pass
takes two seconds, and a checkpoint is reported within seconds."""

STORE_AWAY_MS = 10 * 60_000
"""Time after which a trainer that cannot reach its bucket gives its role to another node, in milliseconds. Networks of
clouds mend themselves within minutes, and the batch that waits to be saved would be trained again."""

PRIOR_LOSSES = 2.0
"""Losses that the prior of the restart weighs."""

SUCCESSOR = "successor"
"""Name of the slot of a spot node that is to take the role of a trainer on demand, in a plan whose rollout nodes have
other GPUs. The node works as a rollout node until then."""


def trainer_on_spot(wanted: Wanted) -> Slot | None:
    """Return the trainer's slot if the plan has it on spot."""
    trainer = next((slot for slot in wanted.slots if slot.role == "trainer"), None)
    return trainer if trainer is not None and trainer.placement.market is Market.SPOT else None


def may_train(slot: Slot, wanted: Wanted) -> bool:
    """Return whether a node of a rollout slot can take the role of a lost trainer: it has the same GPUs."""
    trainer = trainer_on_spot(wanted)
    if trainer is None or slot.role != "rollout" or not wanted.rules.promotes:
        return False
    ours, its = slot.placement, trainer.placement
    return (ours.accelerator, ours.gpus) == (its.accelerator, its.gpus)


def with_successor(wanted: Wanted, facts: Facts) -> Sequence[Slot]:
    """Return the plan's slots, and one for the successor of a trainer on demand if no rollout node can be that."""
    trainer = trainer_on_spot(wanted)
    if trainer is None or not facts.sites or not wanted.rules.promotes:
        return wanted.slots
    if any(may_train(slot, wanted) for slot in wanted.slots):
        return wanted.slots
    is_wanted = trainer_that_stands_in(facts.nodes, facts, wanted) is not None and not why_on_demand(facts, wanted)
    return (*wanted.slots, replace(trainer, name=SUCCESSOR, role="rollout")) if is_wanted else wanted.slots


def trainer_that_stands_in(nodes: Sequence[NodeRecord], facts: Facts, wanted: Wanted) -> NodeRecord | None:
    """Return the trainer on demand, or on dear spot, of a plan with its trainer on spot. None: there is none."""
    slot = trainer_on_spot(wanted)
    if slot is None:
        return None
    here = (node for node in nodes if node.slot == slot.name and node.is_live and not node.is_leaving)
    return next((node for node in here if is_stand_in(node, slot, facts)), None)


def successor_among(slot: Slot, held: Sequence[NodeRecord], facts: Facts, wanted: Wanted) -> NodeRecord | None:
    """Return the node that takes the role of the lost trainer; None if a node has to be bought.

    `slot`: the trainer's, empty now. `held`: all nodes that ever had it. None of them may still run: its end is on
    record, so at most one node trains. The oldest node that is ready and alike is taken, because spot nodes that have
    lived longer are lost less often. A late run prefers nodes on demand after a loss, and a trainer that must be on
    demand takes no other.
    """
    if slot.role != "trainer" or slot.placement.market is not Market.SPOT or not held or not wanted.rules.promotes:
        return None
    if any(node.is_live for node in held):
        return None
    ready = _that_can_train(facts, wanted)
    if why_on_demand(facts, wanted):
        ready = [node for node in ready if node.market is Market.ON_DEMAND]
    latest = max(held, key=lambda node: node.generation)
    is_lost = "releasing" not in latest.happened  # not given back to spot
    hurries = is_lost and why_late(facts, wanted) is not None
    order = {Market.ON_DEMAND: -1 if hurries else 1, Market.SPOT: 0}
    return min(ready, key=lambda node: (order[node.market], node.happened["up"], node.name), default=None)


def _that_can_train(facts: Facts, wanted: Wanted) -> list[NodeRecord]:
    """Return the nodes at work that can take the trainer's role."""
    alike = {slot.name for slot in wanted.slots if may_train(slot, wanted)} | {SUCCESSOR}
    return [node for node in facts.nodes if node.role == "rollout" and node.slot in alike and can_take_over(node)]


def cut_off_trainer(facts: Facts, wanted: Wanted) -> Release | None:
    """Return the release of a trainer on spot that its bucket does not answer, if a node at work can take its role.

    The bucket answers the controller, so the trainer's own network is at fault, and it can save nothing. The wait of an
    earlier trainer does not count. A second release comes only after a new iteration.
    """
    slot, away_ms = trainer_on_spot(wanted), facts.store_away_ms
    if slot is None or away_ms is None or not facts.store_answers or facts.now_ms - away_ms < STORE_AWAY_MS:
        return None
    held = [node for node in facts.nodes if node.slot == slot.name]
    trainer = next((node for node in held if node.is_live and not node.is_leaving), None)
    if trainer is None or not _that_can_train(facts, wanted):
        return None
    trains_since_ms = trainer.happened.get(PROMOTED, trainer.happened.get("up"))
    if trains_since_ms is None or trains_since_ms > away_ms:
        return None
    if any(node.happened.get("releasing", -1) > facts.advanced_ms for node in held):
        return None
    why = f"its bucket has not answered it for {duration(facts.now_ms - away_ms)}, and answers the controller"
    return Release(nodes=(trainer.name,), why=why)


def can_take_over(node: NodeRecord) -> bool:
    return node.is_live and node.is_ready and not node.is_leaving


def is_taking_over(node: NodeRecord) -> bool:
    """Return whether a node has been promoted, and its workers have not called in since."""
    return node.is_live and PROMOTED in node.happened and "ready" not in node.happened


def why_on_demand(facts: Facts, wanted: Wanted) -> str:
    """Return why the trainer is on demand for now: it was preempted `LOSSES` times without a new iteration.

    Empty: it may be on spot. It may be again after `STEADY_ITERATIONS` new iterations.
    """
    slot = trainer_on_spot(wanted)
    if slot is None or not wanted.rules.on_demand or not facts.sites:
        return ""
    lost = sorted(
        node.ended_ms
        for node in facts.nodes
        if node.slot == slot.name and node.role == "trainer" and node.reclaimed and node.ended_ms is not None
        if node.ended_ms >= facts.planned_ms
    )
    reached = facts.advances_ms
    for first, last in zip(lost, lost[LOSSES - 1 :], strict=False):
        is_without_one = not any(first <= at_ms <= last for at_ms in reached)
        if is_without_one and sum(at_ms > last for at_ms in reached) < STEADY_ITERATIONS:
            return f"the trainer was preempted {LOSSES} times without a new iteration"
    return ""


def restart_ms(facts: Facts, wanted: Wanted) -> float:
    """Return the mean time from the loss of a trainer until the next one trains, as this run has seen it.

    The prior counts as `PRIOR_LOSSES` losses: a restart where a rollout node may take the role, else a new node.
    """
    ready_ms = sorted(n.happened["ready"] for n in facts.nodes if n.role == "trainer" and "ready" in n.happened)
    waits = []
    for node in facts.nodes:
        if node.role == "trainer" and node.reclaimed and node.ended_ms is not None and "ready" in node.happened:
            after = bisect_right(ready_ms, node.ended_ms)
            waits.append((ready_ms[after] if after < len(ready_ms) else facts.now_ms) - node.ended_ms)
    has_successor = any(may_train(slot, wanted) for slot in wanted.slots)
    prior = RESTART_MS if has_successor else CHANGE_MS
    return (sum(waits) + PRIOR_LOSSES * prior) / (len(waits) + PRIOR_LOSSES)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOfTrainer:
    """What a loss of a trainer on spot costs, in micro-dollars.

    (work since a checkpoint + restart) x price of the fleet + change x price of a node. A run that needs nodes on
    demand to be in time makes good what it loses at their price.
    """

    micro_usd: float

    @classmethod
    def of(cls, facts: Facts, wanted: Wanted) -> "LossOfTrainer | None":
        """Return the cost of a loss now. None: the trainer is on demand, or the plan predicts no iteration times."""
        work, trainer = facts.work, trainer_on_spot(wanted)
        if work is None or trainer is None:
            return None
        is_tight = needs_on_demand(facts, wanted, work)
        prices = {
            slot.name: slot.on_demand_micro_usd_per_hour if is_tight else slot.placement.micro_usd_per_hour
            for slot in wanted.slots
        }
        lost_ms = work.lost_ms + restart_ms(facts, wanted)
        return cls(micro_usd=(lost_ms * sum(prices.values()) + CHANGE_MS * prices[trainer.name]) / HOUR_MS)

    def why_not_on_spot(self, option: Option, tried: Tried, now_ms: int) -> str:
        """Return why a pool's losses of a trainer cost more than its spot price saves. Empty: they cost less.

        losses an hour x cost of a loss >= on demand - spot. 1.4 preemptions an hour, iterations of 10 minutes, a
        restart of 90 s, and seven nodes of $88 on demand: $118 an hour.
        """
        losses = tried.hazard_per_hour(option, now_ms)
        costs = losses * self.micro_usd
        saves = option.on_demand_micro_usd_per_hour - option.placement.micro_usd_per_hour
        if costs < saves:
            return ""
        return (
            f"{losses:.1f} preemptions an hour in {option.placement.zone} would cost {dollars(round(costs))} an hour, "
            f"and spot saves {dollars(round(saves))}"
        )
