"""Random schedules of losses, notices and late news: at most one node trains, and one always gets the role.

The decisions are real; nodes, the cloud's news and a controller that dies between an event and its order are simulated.
A planted fault of each rule is found.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from launcher.decide import promotion, reconcile
from launcher.decide.actions import Buy, Promote, RepeatPromotion, RepeatRequest
from launcher.decide.facts import PROMOTED, Facts, NodeRecord, Stage
from launcher.decide.known_nodes import KnownNodes
from launcher.decide.reconcile import decide
from tests.launcher.cluster.test_promotion import on_spot, wanted

STEP_MS, STEPS, SCHEDULES = 20_000, 60, 60
START_MS = 1_000_000


class Broken(AssertionError):
    """A promise does not hold."""


@dataclass
class Schedule:
    """A run with a spot trainer and two rollout nodes under one random schedule."""

    seed: int
    now_ms: int = START_MS
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    really: dict[str, tuple[str, int]] = field(default_factory=dict)
    """What each running node's agent does: its role and generation, as its last order said."""
    promotions: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.wanted = wanted(*on_spot(2))

    def change(self, name: str, **happened: int) -> None:
        node = self.nodes[name]
        self.nodes[name] = replace(node, happened={**node.happened, **happened})

    def live(self) -> list[NodeRecord]:
        return [node for node in self.nodes.values() if node.is_live]

    def news(self, is_calm: bool) -> None:
        """Nodes come up, call in and, unless the schedule is calm, get notices and are lost."""
        for node in self.live():
            if "up" not in node.happened:
                self.change(node.name, up=self.now_ms)
                self.really[node.name] = (node.role, node.generation)
            elif "ready" not in node.happened:
                if self.really.get(node.name) == (node.role, node.generation) and self.dice.random() < 0.6:
                    self.change(node.name, ready=self.now_ms)
            elif not is_calm and "notice" not in node.happened and self.dice.random() < 0.05:
                self.change(node.name, notice=self.now_ms)
        for node in self.live():
            is_due = "notice" in node.happened and self.dice.random() < 0.5
            if is_due or (not is_calm and self.dice.random() < 0.06):
                self.really.pop(node.name, None)
                self.nodes[node.name] = replace(
                    node, happened={**node.happened, "gone": self.now_ms}, reclaimed=True, evidence="preempted"
                )

    def one_pass(self, dies: bool) -> None:
        facts = Facts(
            now_ms=self.now_ms,
            stage=Stage.RUNNING,
            reason="",
            stage_ms=0,
            planned_ms=0,
            nodes=list(self.nodes.values()),
            metered=0,
            advances_ms=(self.now_ms,),
        )
        for action in decide(facts, self.wanted):
            match action:
                case Buy():
                    if action.name in self.nodes:
                        raise Broken(f"{action.name} was bought twice")
                    self.nodes[action.name] = reconcile._intended(
                        action.name, action.slot, action.option, action.generation, 0, facts
                    )
                    self.change(action.name, requested=self.now_ms)
                case RepeatRequest():
                    self.change(action.node, requested=self.now_ms)
                case Promote():
                    self.promote(action)
                    if not dies:
                        self.order(action.node)
                case RepeatPromotion():
                    self.order(action.node)

    def promote(self, action: Promote) -> None:
        node = self.nodes[action.node]
        if not {"up", "ready"} <= node.happened.keys() or {"notice", "gone"} & node.happened.keys():
            raise Broken(f"{node.name} cannot take the role: {dict(node.happened)}")
        happened = {kind: at_ms for kind, at_ms in node.happened.items() if kind != "ready"}
        self.nodes[node.name] = replace(
            node,
            slot=action.slot,
            generation=action.generation,
            role="trainer",
            happened={**happened, PROMOTED: self.now_ms},
        )
        self.promotions += 1

    def order(self, name: str) -> None:
        if name in self.really:
            self.really[name] = (self.nodes[name].role, self.nodes[name].generation)

    def check(self) -> None:
        trainers = [node.name for node in self.live() if node.slot == "trainer"]
        training = [name for name, (role, _) in self.really.items() if role == "trainer"]
        if len(trainers) > 1 or len(training) > 1:
            raise Broken(f"two trainers: {trainers}, {training}")
        if set(training) - set(trainers):
            raise Broken(f"{training} trains without the role")

    def run(self) -> None:
        for step in range(2 * STEPS):
            self.now_ms += STEP_MS
            self.news(is_calm=step >= STEPS)
            self.one_pass(dies=step < STEPS and self.dice.random() < 0.2)
            self.check()
        ready = sorted(node.slot for node in self.live() if node.is_ready)
        if ready != ["spot-0", "spot-1", "trainer"]:
            raise Broken(f"after an hour of calm only {ready} work")


def all_schedules() -> int:
    promotions = 0
    for seed in range(SCHEDULES):
        schedule = Schedule(seed)
        schedule.run()
        promotions += schedule.promotions
    return promotions


def test_at_most_one_node_trains_and_every_slot_is_filled_again() -> None:
    assert all_schedules() > SCHEDULES, "a schedule has a promotion, on average"


Patch = Callable[[pytest.MonkeyPatch], None]


def promotes_beside_a_trainer(patch: pytest.MonkeyPatch) -> None:
    """Promote as soon as the trainer's node has a notice, before its end is on record."""
    real = promotion.successor_among
    patch.setattr(
        reconcile,
        "successor_among",
        lambda slot, held, facts, wanted: real(slot, [node for node in held if not node.is_leaving], facts, wanted),
    )
    patch.setattr(
        reconcile, "needs_successor", lambda slot, latest, held, facts: not latest.is_live or latest.is_leaving
    )


def takes_any_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(promotion, "can_take_over", lambda node: node.is_live)


def forgets_the_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconcile, "is_taking_over", lambda node: False)


def names_a_node_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KnownNodes, "next_generation", lambda self, run, slot, generation: generation)


@pytest.mark.parametrize(
    "bug",
    [promotes_beside_a_trainer, takes_any_node, forgets_the_order, names_a_node_again],
    ids=lambda bug: bug.__name__,
)
def test_a_planted_fault_is_found(bug: Patch, monkeypatch: pytest.MonkeyPatch):
    bug(monkeypatch)
    with pytest.raises(Broken):
        all_schedules()
