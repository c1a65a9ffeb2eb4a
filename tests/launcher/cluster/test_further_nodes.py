"""Decisions on the further nodes of a trainer, as pure functions: their zone, their wait, and the give-back."""

from dataclasses import replace

import pytest

from engine.events import Market
from launcher.decide.actions import Buy, Enter, Release
from launcher.decide.budget_guard import Limits
from launcher.decide.facts import INCOMPLETE, NodeRecord, Others, Stage
from launcher.decide.failover import NothingLeft, Wait, next_trainer
from launcher.decide.further_nodes import (
    LACKING_MS,
    given_back_trainer,
    next_trainer_node,
    nodes_in_other_zones,
    number_of_trainer_nodes,
    offer_beside,
)
from launcher.decide.giving_back import nodes_to_release
from launcher.decide.launch_history import AGAIN_MS, Attempt, MoveRules, Outcome, Tried
from launcher.decide.reconcile import decide
from launcher.decide.replacing import attempt_of
from launcher.placement.options import Option
from tests.launcher.cluster.stage import CLOUD_SITES, TRAINER_RATE, cloud_option, cloud_slots
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
    rollout = replace(trainer_node("spot-0", "g1-a", releasing=NOW - 1), role="rollout")
    assert zone_of(next_trainer_node("trainer-1", [first, rollout], Tried(), RULES, NOW)) == "g1-a"


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
    newer = trainer_node("trainer-2", "g1-c", requested=MINUTE)
    assert nodes_in_other_zones([newer, older]) == [newer], "and of those, the zone of the oldest"
    new_first = trainer_node("trainer", "g1-c", requested=6 * MINUTE)
    assert zone_of(offer_beside([new_first, first])) == "g1-a"


def test_a_further_node_is_bought_as_the_first_really_is_and_waits_for_its_zone():
    wish = trainer_node("trainer", "")
    wait = next_trainer_node("trainer-1", [wish], Tried(), RULES, NOW)
    assert wait == Wait(until_ms=None, why="the zone of the trainer's first node is not known yet")
    assert next_trainer_node("trainer", [], Tried(), RULES, NOW) is None, "the first node may be in any zone"
    requested = replace(trainer_node("trainer", "g1-a"), happened={"requested": 0})
    assert offer_beside([requested]) is None, "the cloud may still choose another zone"
    first = replace(trainer_node("trainer", "g1-b"), instance_type="g6.2xlarge", micro_usd_per_hour=7)
    beside = offer_beside([first])
    assert beside is not None
    assert (beside.placement.zone, beside.placement.instance_type) == ("g1-b", "g6.2xlarge")
    assert beside.placement.micro_usd_per_hour == 7
    asked = replace(trainer_node("trainer-1", "g1-a"), happened={"requested": 0})
    assert zone_of(next_trainer_node("trainer", [asked], Tried(), RULES, NOW)) == "g1-a", "beside the one asked for"
    leaving = trainer_node("trainer", "g1-a", notice=NOW)
    assert offer_beside([leaving, trainer_node("trainer-1", "g1-b")]).placement.zone == "g1-b"


def denial(zone: str, at_ms: int) -> Attempt:
    return replace(refusal(zone, at_ms), outcome=Outcome.DENIED, evidence="the image is not for sale")


def test_a_denied_further_node_is_not_asked_for_and_gives_the_trainer_back():
    two, first = wanted(spot=0, trainers=2), trainer_node("trainer", "g1-a", requested=NOW - 1000)
    denied = Tried([denial("g1-a", NOW - 500)])
    wait = next_trainer_node("trainer-1", [first], denied, RULES, NOW)
    assert isinstance(wait, Wait)
    assert "not for sale" in wait.why
    on_clouds = facts(first, stage=Stage.RUNNING, sites=CLOUD_SITES)
    release = given_back_trainer(on_clouds, two, [first], denied)
    assert release is not None
    assert release.why.startswith("the trainer lacks trainer-1: ")
    assert "not for sale" in release.why


def test_a_trainer_is_given_back_whole_for_refusals_of_its_own_nodes():
    """Counted from the moment at which the oldest node came up; the newest refusal is the reason."""
    three = wanted(spot=2, trainers=3)
    assert number_of_trainer_nodes(three) == 3
    booted = {"requested": 0, "up": LACKING_MS}
    first = replace(trainer_node("trainer", "g1-a"), happened=booted)
    second = replace(trainer_node("trainer-1", "g1-a"), happened={"requested": 0, "up": 2 * LACKING_MS})
    live = [first, second]
    at_ms = 3 * LACKING_MS - 1
    on_clouds = facts(*live, stage=Stage.RUNNING, sites=CLOUD_SITES, now_ms=at_ms)

    def release_for(*refusals: Attempt, nodes=live, job=three, sites=CLOUD_SITES):
        return given_back_trainer(replace(on_clouds, sites=sites), job, nodes, Tried(refusals))

    since = [refusal("g1-a", LACKING_MS), replace(refusal("g1-a", 2 * LACKING_MS), evidence="still no capacity")]
    release = release_for(*since)
    assert release is not None
    assert release.nodes == (first.name, second.name)
    assert release.why == "the trainer lacks trainer-2: g1-a refused it: still no capacity"
    assert release_for(*reversed(since)) == release
    full = replace(refusal("g1-a", LACKING_MS), outcome=Outcome.FULL, evidence="the quota is full")
    assert release_for(full, since[1]) == release, "whatever it was refused for before"
    assert release_for(refusal("g1-a", LACKING_MS - 1)) is None, "from before the first node was up"
    assert release_for(*(replace(one, role="rollout") for one in since)) is None
    assert release_for(*since, sites=()) is None
    assert release_for(*since, job=wanted(spot=2, trainers=1)) is None, "rollout nodes are no part of the trainer"
    third = replace(second, slot="trainer-2", name="demo-trainer-2-g0")
    assert release_for(*since, nodes=[*live, third]) is None
    leaving = replace(third, happened={**third.happened, "notice": at_ms})
    assert release_for(*since, nodes=[*live, leaving]) is not None, "a leaving node is a missing one"


def test_a_trainer_was_whole_only_if_every_missing_node_was_up_beside_the_others():
    three, first = wanted(spot=0, trainers=3), trainer_node("trainer", "g1-a", requested=LACKING_MS)
    tried = Tried([refusal("g1-a", 2 * LACKING_MS)])

    def never_whole(*lost: NodeRecord) -> bool:
        on_clouds = facts(first, *lost, stage=Stage.RUNNING, sites=CLOUD_SITES, now_ms=4 * LACKING_MS)
        release = given_back_trainer(on_clouds, three, [first], tried)
        assert release is not None
        return release.never_whole

    def lost(slot: str, gone: int) -> NodeRecord:
        return trainer_node(slot, "g1-a", gone=gone)

    both = lost("trainer-1", 2 * LACKING_MS), lost("trainer-2", 3 * LACKING_MS)
    assert not never_whole(*both)
    assert never_whole(both[0])
    never_up = replace(both[1], happened={"requested": 0, "gone": 3 * LACKING_MS})
    assert never_whole(both[0], never_up)
    assert never_whole(both[0], lost("trainer-2", LACKING_MS)), "it ended when the first node came"


def test_the_first_node_is_never_one_of_the_nodes_in_other_zones():
    leaving = trainer_node("trainer", "g1-b", releasing=NOW)
    first, near = trainer_node("trainer", "g1-a", requested=MINUTE), trainer_node("trainer-1", "g1-a")
    assert nodes_in_other_zones([leaving, first, near]) == []
    moved = replace(trainer_node("trainer", "g1-b", requested=MINUTE), name="demo-trainer-g1")
    assert nodes_in_other_zones([first, moved, near]) == [], "the earlier first node counts, and two are left to others"
    assert nodes_in_other_zones([first]) == []


def test_a_refused_node_is_asked_for_again_soon_and_never_later_than_after_the_cool_down():
    first = trainer_node("trainer", "g1-a")
    once = [refusal("g1-a", 0)]
    wait = next_trainer_node("trainer-1", [first], Tried(once), RULES, 1000)
    assert isinstance(wait, Wait)
    assert AGAIN_MS <= wait.until_ms - once[0].ended_ms <= 1.5 * AGAIN_MS, "the other nodes are idle and paid"
    assert isinstance(next_trainer_node("trainer-1", [first], Tried(once), RULES, wait.until_ms - 1), Wait)
    assert zone_of(next_trainer_node("trainer-1", [first], Tried(once), RULES, wait.until_ms)) == "g1-a"
    often = [refusal("g1-a", number * 10 * MINUTE) for number in range(8)]
    impatient = MoveRules(trainer_wait_ms=5 * MINUTE)
    wait = next_trainer_node("trainer-1", [first], Tried(often), impatient, often[-1].ended_ms)
    assert isinstance(wait, Wait)
    assert wait.until_ms == often[-1].ended_ms + 5 * MINUTE


@pytest.mark.parametrize(
    ("happened", "outcome", "was_up"),
    [
        ({}, Outcome.LIVE, True),
        ({"gone": NOW}, Outcome.ENDED, True),
        ({INCOMPLETE: NOW}, Outcome.LIVE, True),
        ({INCOMPLETE: NOW, "releasing": NOW}, Outcome.LIVE, True),
        ({INCOMPLETE: NOW, "released": NOW}, Outcome.REFUSED, False),
        ({INCOMPLETE: NOW, "denied": NOW}, Outcome.DENIED, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_node_of_a_trainer_that_never_was_whole_is_refused_once_it_has_ended(happened, outcome, was_up):
    attempt = attempt_of(trainer_node("trainer", "g1-a", **happened))
    assert (attempt.outcome, attempt.was_up) == (outcome, was_up)


def test_the_denial_of_a_further_node_is_the_reason_why_no_trainer_can_be_had():
    denied = [
        replace(denial("", 0), option=site.trainer[0], evidence=f"no permission in {site.region}")
        for site in CLOUD_SITES
    ]
    nothing = next_trainer(Tried(denied), CLOUD_SITES, RULES, NOW)
    assert nothing == NothingLeft(why="no permission in g1; no permission in g2; no permission in e1")
    assert Tried(denied).denials("rollout") == "nothing on offer fits"


# --- the pass as a whole -------------------------------------------------------------------------------


def job(spot: int = 1, max_hourly: int | None = None):
    """Return a job with a trainer of three nodes."""
    return replace(wanted(spot=spot, max_hourly=max_hourly), slots=cloud_slots(spot, trainers=3))


def test_a_trainer_that_lacks_a_node_for_too_long_is_given_back_before_anything_is_bought():
    first, second = trainer_node("trainer", "g1-a"), trainer_node("trainer-1", "g1-a")
    refused = replace(
        trainer_node("trainer-2", "g1-a", requested=NOW - LACKING_MS),
        happened={"requested": NOW - LACKING_MS, "no_capacity": NOW - LACKING_MS + 1000},
        evidence="there is no capacity",
    )
    now = facts(first, second, refused, stage=Stage.RUNNING, sites=CLOUD_SITES)
    [release] = decide(now, job())
    assert isinstance(release, Release)
    assert (release.nodes, release.never_whole) == ((first.name, second.name), True)
    assert "trainer-2" in bought_of(decide(replace(now, now_ms=NOW - 1), job()))


def bought_of(actions) -> set[str]:
    return {action.slot.name for action in actions if isinstance(action, Buy)}


def test_all_nodes_of_the_trainer_are_given_back_if_the_money_for_the_missing_one_went_to_other_runs():
    live = trainer_node("trainer", "g1-a"), trainer_node("trainer-1", "g1-a")
    all_runs = replace(job(), all_runs=Limits(max_total=None, max_hourly=10 * TRAINER_RATE))
    now = facts(*live, stage=Stage.RUNNING, sites=CLOUD_SITES)
    assert "trainer-2" in bought_of(decide(now, all_runs))
    [release] = decide(replace(now, others=Others(hourly=8 * TRAINER_RATE)), all_runs)
    assert isinstance(release, Release)
    assert release.nodes == (live[0].name, live[1].name)
    assert release.why.startswith("trainer-2 is not bought: all_runs.max_hourly")


def test_the_money_for_a_whole_trainer_is_counted_at_the_prices_of_now():
    """The plan's price was half of the present one: three nodes at the plan's price would fit, and three now do not."""
    dear = [
        replace(site, trainer=(cloud_option(*site.place, "", Market.ON_DEMAND, 2 * TRAINER_RATE),))
        for site in CLOUD_SITES
    ]
    now = facts(stage=Stage.PLANNED, sites=tuple(dear))
    assert bought_of(decide(now, job(spot=0, max_hourly=7 * TRAINER_RATE))) == {"trainer"}
    [enter] = decide(now, job(spot=0, max_hourly=round(4.5 * TRAINER_RATE)))
    assert enter == Enter(stage=Stage.DRAINING, reason="budget")
