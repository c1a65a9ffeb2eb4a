"""Decisions on the further nodes of a trainer, as pure functions: their zone, their wait, and the give-back."""

from dataclasses import replace

from engine.events import Market
from launcher.decide.facts import NodeRecord, Stage
from launcher.decide.failover import Wait
from launcher.decide.further_nodes import (
    LACKING_MS,
    given_back_trainer,
    next_trainer_node,
    nodes_in_other_zones,
    offer_beside,
)
from launcher.decide.giving_back import nodes_to_release
from launcher.decide.launch_history import Attempt, MoveRules, Outcome, Tried
from launcher.decide.replacing import attempt_of
from launcher.placement.options import Option
from tests.launcher.cluster.stage import CLOUD_SITES, TRAINER_RATE, cloud_option
from tests.launcher.cluster.test_reconcile import NOW, facts, node, wanted

RULES = MoveRules()
MINUTE = 60_000


def offer(zone: str = "") -> Option:
    return cloud_option("gcp", "g1", zone, Market.ON_DEMAND, TRAINER_RATE)


def trainer_node(slot: str, zone: str, *, requested: int = 0, **happened: int) -> NodeRecord:
    record = node(slot, requested=requested, up=requested, **happened)
    wish = offer(zone if slot != "trainer" else "")
    kind = wish.placement.instance_type
    return replace(record, requested_ms=requested, wanted=wish, zone=zone, instance_type=kind)


def refusal(zone: str, at_ms: int) -> Attempt:
    return Attempt(
        name=f"demo-trainer-1-at-{at_ms}",
        role="ranks",
        option=offer(zone),
        requested_ms=at_ms,
        outcome=Outcome.REFUSED,
        ended_ms=at_ms + 1000,
        evidence="there is no capacity",
    )


def zone_of(option: Option | Wait | None) -> str:
    assert isinstance(option, Option)
    return option.placement.zone


def test_no_further_node_is_bought_while_a_node_of_the_trainer_is_leaving():
    """Both trainers would write the same checkpoints."""
    first = trainer_node("trainer", "g1-a")
    assert zone_of(next_trainer_node("trainer-1", [first], Tried(), RULES, NOW)) == "g1-a"
    for leaving in (
        trainer_node("trainer-1", "g1-a", releasing=NOW - 1),
        trainer_node("trainer-1", "g1-a", notice=NOW - 1),
    ):
        wait = next_trainer_node("trainer-1", [first, leaving], Tried(), RULES, NOW)
        assert wait == Wait(until_ms=None, why="earlier nodes of the trainer are ending")
    old, new = trainer_node("trainer", "g1-a", releasing=NOW - 1), trainer_node("trainer-1", "g1-a")
    assert isinstance(next_trainer_node("trainer", [old, new], Tried(), RULES, NOW), Wait)


def test_refusals_from_before_this_trainer_neither_delay_nor_give_back_a_node():
    two, began = wanted(spot=0, trainers=2), NOW - LACKING_MS // 2
    first = trainer_node("trainer", "g1-a", requested=began)
    on_clouds = facts(first, stage=Stage.RUNNING, sites=CLOUD_SITES)
    earlier = Tried([refusal("g1-a", began - 2 * LACKING_MS)])
    assert given_back_trainer(on_clouds, two, [first], earlier) is None
    assert zone_of(next_trainer_node("trainer-1", [first], earlier, RULES, NOW)) == "g1-a"

    later = Tried([refusal("g1-a", began)])
    assert given_back_trainer(on_clouds, two, [first], later) is None, "not yet for long"
    after = replace(on_clouds, now_ms=began + LACKING_MS)
    release = given_back_trainer(after, two, [first], later)
    assert release is not None
    assert (release.nodes, release.never_whole) == ((first.name,), True)
    wait = next_trainer_node("trainer-1", [first], Tried([refusal("g1-a", NOW - 2000)]), RULES, NOW)
    assert isinstance(wait, Wait)
    assert "no capacity in g1-a" in wait.why


def test_further_nodes_outside_the_zone_of_the_first_are_given_back():
    first = trainer_node("trainer", "g1-a")
    near, far = trainer_node("trainer-1", "g1-a"), trainer_node("trainer-2", "g1-b")
    assert nodes_in_other_zones([first, near]) == []
    assert nodes_in_other_zones([first, near, far]) == [far]
    assert nodes_in_other_zones([first, near, replace(far, happened={**far.happened, "gone": NOW})]) == []
    three, live = wanted(spot=0, trainers=3), [first, near, far]
    on_clouds = facts(*live, stage=Stage.RUNNING, sites=CLOUD_SITES)
    tried = Tried(attempt_of(node) for node in live)
    assert nodes_to_release(on_clouds, three, live, tried) == [far]


def test_the_zone_of_the_first_node_counts_even_if_a_further_node_is_older():
    older = trainer_node("trainer-1", "g1-b", requested=0)
    first = trainer_node("trainer", "g1-a", requested=5 * MINUTE)
    assert zone_of(offer_beside([older, first])) == "g1-a"
    assert nodes_in_other_zones([older, first]) == [older]
    assert zone_of(offer_beside([older])) == "g1-b", "without the first node, the zone of the others counts"
