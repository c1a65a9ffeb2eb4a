"""Which nodes are given back, as a pure function of facts: leftovers, replaced stand-ins, nodes above a limit."""

from dataclasses import replace

import pytest

from engine.events import Market
from launcher.decide.budget_guard import Limits
from launcher.decide.facts import NodeRecord, Others
from launcher.decide.giving_back import nodes_to_release
from launcher.decide.launch_history import MoveRules, Tried
from launcher.decide.replacing import attempt_of, is_stand_in
from launcher.decide.run_budget import hourly_of
from tests.launcher.cluster.stage import SPOT_RATE, cloud_option
from tests.launcher.cluster.test_reconcile import (
    HOUR,
    SIDE,
    SITE,
    SPOT_OPTION,
    STEADY_OPTION,
    cloud_facts,
    cloud_wanted,
    on_cloud,
    on_cloud_up,
)
from tests.launcher.replay.markets import work

NOW = 2 * HOUR
MINUTE = 60_000
SPOT_COST = SPOT_RATE + SIDE[Market.SPOT]
TRAINER = on_cloud_up("trainer", STEADY_OPTION)


def stand_in(number: int, generation: int = 0, **happened: int) -> NodeRecord:
    return on_cloud_up(f"spot-{number}", STEADY_OPTION, generation, **happened)


def spot(number: int, generation: int = 1, *, minutes: float = 120, option=SPOT_OPTION, **happened: int) -> NodeRecord:
    """Return a spot node that has worked for so many minutes."""
    at = NOW - round(minutes * MINUTE)
    return on_cloud(f"spot-{number}", option, generation, requested=at, up=at, ready=at, **happened)


def starting(number: int) -> NodeRecord:
    return on_cloud(f"spot-{number}", SPOT_OPTION, 1, requested=NOW - MINUTE, up=NOW - MINUTE)


def released(
    *nodes: NodeRecord, spots: int = 3, max_hourly=None, all_hourly=None, others: int = 0, **more
) -> list[str]:
    """Return the names of the nodes to release."""
    run = replace(
        cloud_wanted(spots, max_hourly=max_hourly), all_runs=Limits(max_total=None, max_hourly=all_hourly), **more
    )
    facts = cloud_facts(*nodes, others=Others(hourly=others))
    live = [node for node in nodes if node.is_live]
    return [node.name for node in nodes_to_release(facts, run, live, Tried(map(attempt_of, nodes)))]


# --- a settled spot node replaces a stand-in -----------------------------------------------------------


@pytest.mark.parametrize(
    ("successor", "goes"),
    [
        (spot(0, minutes=10), True),
        (spot(0, minutes=9.9), False),
        (spot(0, notice=NOW - 1), False),
        (spot(0, releasing=NOW - 1), False),
        (on_cloud("spot-0", SPOT_OPTION, 1, requested=0, up=0), False),
        (on_cloud("spot-0", SPOT_OPTION, 1, requested=0, up=NOW - MINUTE, ready=NOW), False),
    ],
    ids=["settled", "young", "under notice", "releasing", "never ready", "booted for long"],
)
def test_a_stand_in_goes_once_a_spot_node_of_its_slot_has_settled_and_stays(successor, goes):
    assert released(TRAINER, stand_in(0), successor) == (["demo-spot-0-g0"] if goes else [])


def test_a_young_spot_node_has_settled_where_another_has_had_capacity_for_long():
    young = spot(0, minutes=1)
    elsewhere = spot(1, option=SITE.rollout[1])
    assert released(TRAINER, stand_in(0), young, elsewhere) == []
    assert released(TRAINER, stand_in(0), young, spot(1)) == ["demo-spot-0-g0"]
    assert released(TRAINER, stand_in(0), spot(1)) == [], "it has no successor"


@pytest.mark.parametrize(
    ("paid", "planned", "lowest", "is_dear"),
    [(2.0, 1.0, 1.0, True), (2.0, 2.0, 1.0, False), (2.0, 1.0, 2.0, False), (2.0, 1.0, None, False)],
    ids=["dear", "as planned", "as the lowest", "none on offer"],
)
def test_spot_is_a_stand_in_if_it_is_dear_against_the_plan_and_against_the_lowest_price(paid, planned, lowest, is_dear):
    option = replace(
        SPOT_OPTION, placement=replace(SPOT_OPTION.placement, micro_usd_per_hour=round((lowest or 0) * SPOT_RATE))
    )
    site = replace(SITE, rollout=(STEADY_OPTION,) if lowest is None else (option, STEADY_OPTION))
    slot = next(slot for slot in cloud_wanted(1).slots if slot.role == "rollout")
    slot = replace(slot, placement=replace(slot.placement, micro_usd_per_hour=round(planned * SPOT_RATE)))
    node = replace(spot(0), micro_usd_per_hour=round(paid * SPOT_RATE))
    now = replace(cloud_facts(node), sites=(site,))
    assert is_stand_in(node, slot, replace(now, work=work(2))) == is_dear
    assert not is_stand_in(node, slot, now), "a plan without predicted times buys no dear spot"
    assert is_stand_in(stand_in(0), slot, now)


# --- the hourly limit ----------------------------------------------------------------------------------

TIGHT = hourly_of([TRAINER, stand_in(0), stand_in(1)])
"""Hourly cost of a trainer and two stand-ins: no spot node fits beside them."""


def test_under_a_tight_hourly_limit_one_stand_in_goes_at_a_time():
    both = (TRAINER, stand_in(0), stand_in(1))
    assert released(*both, max_hourly=TIGHT) == ["demo-spot-0-g0"]
    assert released(*both, max_hourly=TIGHT + SPOT_COST - 1) == ["demo-spot-0-g0"]
    assert released(*both, max_hourly=TIGHT + SPOT_COST) == [], "a spot node fits beside them"
    assert released(*both, all_hourly=TIGHT + SPOT_COST - 1) == ["demo-spot-0-g0"]
    assert released(*both, all_hourly=TIGHT + SPOT_COST) == []
    assert released(*both, all_hourly=TIGHT + SPOT_COST, others=1) == ["demo-spot-0-g0"]


def test_no_stand_in_goes_for_the_limit_while_money_or_a_spot_node_is_on_its_way():
    leaving = stand_in(0, releasing=NOW - MINUTE)
    limit = hourly_of([TRAINER, stand_in(1)])
    assert released(TRAINER, leaving, stand_in(1), max_hourly=limit) == [], "the leaving stand-in frees money"
    starts = starting(2)
    assert released(TRAINER, stand_in(0), starts, max_hourly=hourly_of([TRAINER, stand_in(0), starts])) == []
    young = spot(0, minutes=1)
    assert released(TRAINER, stand_in(0), young, max_hourly=hourly_of([TRAINER, stand_in(0), young])) == []
    gone = spot(2, releasing=NOW - MINUTE)
    limit = hourly_of([TRAINER, stand_in(0)])
    assert released(TRAINER, stand_in(0), gone, max_hourly=limit) == ["demo-spot-0-g0"], "a spot node frees too little"
    new = replace(stand_in(1), happened={"requested": NOW - MINUTE})
    assert released(TRAINER, stand_in(0), new, max_hourly=hourly_of([TRAINER, stand_in(0), new])) == ["demo-spot-0-g0"]


def test_after_a_give_back_the_next_stand_in_stays_under_a_tight_limit():
    before = [stand_in(0, n, releasing=NOW - ago, released=NOW - ago) for n, ago in enumerate((HOUR, 20 * MINUTE))]
    again = stand_in(0, 2)
    limit = hourly_of([TRAINER, again])
    assert released(TRAINER, *before, again, spots=1, max_hourly=limit) == []
    assert released(TRAINER, before[0], again, spots=1, max_hourly=limit) == ["demo-spot-0-g2"]


def test_above_the_hourly_limit_the_dearest_go_and_never_the_trainer():
    cheap, dear = spot(1), replace(spot(0), micro_usd_per_hour=2 * SPOT_RATE)
    nodes = (TRAINER, cheap, dear)
    assert released(*nodes, max_hourly=hourly_of(nodes)) == []
    assert released(*nodes, max_hourly=hourly_of(nodes) - 1) == [dear.name]
    assert released(*nodes, max_hourly=hourly_of([TRAINER, cheap]) - 1) == [dear.name, cheap.name]
    assert released(*nodes, max_hourly=1) == [dear.name, cheap.name]
    dearer = replace(stand_in(2), micro_usd_per_hour=SPOT_RATE)
    assert released(*nodes, dearer, max_hourly=hourly_of([*nodes, dearer]) - 1) == [dearer.name]
    settled = (TRAINER, stand_in(0), spot(0), spot(1))
    limit = hourly_of([TRAINER, spot(0), spot(1)])
    assert released(*settled, max_hourly=limit) == ["demo-spot-0-g0"], "a replaced stand-in counts no more"


# --- nodes that a failover leaves behind ---------------------------------------------------------------


def test_nodes_of_another_region_or_of_an_earlier_trainer_are_left_behind():
    far = cloud_option("gcp", "g2", "g2-a", Market.SPOT, SPOT_RATE)
    elsewhere, here, earlier = spot(0, option=far), spot(1), on_cloud_up("trainer", STEADY_OPTION)
    newer = on_cloud("trainer", STEADY_OPTION, 1, requested=HOUR, up=HOUR, ready=HOUR)
    assert released(TRAINER, here, elsewhere) == [elsewhere.name]
    assert released(earlier, newer, here) == [earlier.name]
    assert released(replace(earlier, happened={**earlier.happened, "releasing": HOUR}), newer, here) == []


def test_without_a_trainer_in_sight_all_nodes_go_and_a_starting_trainer_stays():
    gone = on_cloud_up("trainer", STEADY_OPTION, gone=MINUTE)
    assert released(gone, spot(0), spot(1)) == ["demo-spot-0-g1", "demo-spot-1-g1"]
    lately = on_cloud_up("trainer", STEADY_OPTION, gone=NOW - MINUTE)
    refused = on_cloud("trainer", STEADY_OPTION, 1, requested=NOW - MINUTE, no_capacity=NOW - MINUTE)
    assert released(lately, refused, spot(0)) == []
    assert released(lately, refused, spot(0), rules=MoveRules(trainer_wait_ms=MINUTE)) == ["demo-spot-0-g1"]
    asked = on_cloud("trainer", STEADY_OPTION, requested=MINUTE)
    assert released(asked, spot(0)) == ["demo-spot-0-g1"], "its launch hangs"
    first, again = (
        on_cloud("trainer", STEADY_OPTION, number, requested=NOW - ago, no_capacity=NOW - ago)
        for number, ago in ((1, 6 * MINUTE), (2, MINUTE))
    )
    assert released(lately, first, again, spot(0)) == ["demo-spot-0-g1"], "counted from the first answer"
    elsewhere = on_cloud("trainer", STEADY_OPTION, 3, requested=NOW - MINUTE)
    impatient = MoveRules(trainer_wait_ms=MINUTE)
    assert released(first, again, elsewhere, rules=impatient) == [], "a trainer that was asked for after the wait stays"
