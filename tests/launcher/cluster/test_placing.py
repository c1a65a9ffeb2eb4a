"""Where a slot's next node is bought, as a pure function: within the hourly limit, beside the trainer, by prices."""

from dataclasses import replace

import pytest

from engine.events import Market
from launcher.decide.facts import Facts, NodeRecord, Wanted
from launcher.decide.failover import Move, NothingLeft, StandIn, Wait
from launcher.decide.launch_history import Tried
from launcher.decide.placing import place_of
from launcher.decide.replacing import attempt_of
from launcher.decide.waiting import Seen
from launcher.money import HOUR_MS
from launcher.placement.options import Option, SiteOptions
from launcher.placement.price_of_waiting import MOST_OVER, Prices, Waiting
from tests.launcher.cluster.stage import SPOT_RATE, TRAINER_RATE, cloud_option, cloud_slots
from tests.launcher.cluster.test_reconcile import (
    SIDE,
    SITE,
    SPOT_OPTION,
    STEADY_OPTION,
    facts,
    on_cloud,
    on_cloud_up,
    wanted,
)
from tests.launcher.replay.markets import work

NOW = 2 * HOUR_MS
TRAINER_COST, SPOT_COST = TRAINER_RATE + SIDE[Market.ON_DEMAND], SPOT_RATE + SIDE[Market.SPOT]
TRAINER = on_cloud_up("trainer", STEADY_OPTION)


def priced(option: Option, rate: int) -> Option:
    return replace(option, placement=replace(option.placement, micro_usd_per_hour=rate))


def site(*rollout: Option, trainer: tuple[Option, ...] = SITE.trainer, region: str = "g1") -> SiteOptions:
    return SiteOptions(cloud="gcp", region=region, trainer=trainer, rollout=rollout)


def run(spot: int = 1, trainers: int = 1, **more) -> Wanted:
    return replace(wanted(spot, trainers=trainers, **more), slots=cloud_slots(spot, (SITE,), trainers))


def state(*nodes: NodeRecord, sites: tuple[SiteOptions, ...] = (SITE,), **more) -> Facts:
    return replace(facts(*nodes, sites=sites, **more), now_ms=NOW)


def move(slot: str, job: Wanted, on_clouds: Facts, *bought: NodeRecord) -> Move:
    """Return where the slot's node is bought. `bought`: nodes that this pass has bought already."""
    after = [*(node for node in on_clouds.nodes if node.is_live), *bought]
    tried = Tried(map(attempt_of, (*on_clouds.nodes, *bought)))
    return place_of(next(one for one in job.slots if one.name == slot), tried, after, on_clouds, job)


def intended(slot: str, option: Option) -> NodeRecord:
    return replace(on_cloud(slot, option, requested=NOW), happened={})


# --- the trainer ------------------------------------------------------------------------------------------

DEAR = cloud_option("gcp", "g1", "", Market.ON_DEMAND, 2 * TRAINER_RATE)
DEAR_COST = 2 * TRAINER_RATE + SIDE[Market.ON_DEMAND]
TWO_PRICES = site(*SITE.rollout, trainer=(DEAR, STEADY_OPTION))


@pytest.mark.parametrize("trainers", [1, 2])
def test_each_node_of_a_trainer_has_its_part_of_the_hourly_limit(trainers):
    def bought_at(max_hourly: int | None) -> Move:
        return move("trainer", run(0, trainers, max_hourly=max_hourly), state(sites=(TWO_PRICES,)))

    assert bought_at(None) == DEAR
    assert bought_at(trainers * DEAR_COST) == DEAR
    assert bought_at(trainers * DEAR_COST - 1) == STEADY_OPTION


def test_rollout_nodes_do_not_make_the_next_trainer_a_cheaper_one():
    """The budget guard names the amounts, and the nodes go first if the limit bears no trainer beside them."""
    rollout = on_cloud_up("spot-0", SPOT_OPTION)
    limited = run(max_hourly=DEAR_COST)
    assert move("trainer", limited, state(rollout, sites=(TWO_PRICES,))) == DEAR


def test_a_trainer_above_the_limit_is_bought_elsewhere_or_refused_with_its_amounts():
    elsewhere = cloud_option("gcp", "g2", "", Market.ON_DEMAND, TRAINER_RATE)
    sites = (site(trainer=(DEAR,)), site(trainer=(elsewhere,), region="g2"))
    assert move("trainer", run(0), state(sites=sites)) == DEAR
    assert move("trainer", run(0, max_hourly=TRAINER_COST), state(sites=sites)) == elsewhere
    assert move("trainer", run(0, max_hourly=TRAINER_COST - 1), state(sites=sites)) == DEAR


def test_a_further_node_is_bought_beside_the_first_and_waits_for_its_zone():
    two = run(0, 2)
    first = replace(TRAINER, zone="g1-b")
    beside = move("trainer-1", two, state(first))
    assert isinstance(beside, Option)
    assert (beside.placement.zone, beside.placement.market) == ("g1-b", Market.ON_DEMAND)
    asked = on_cloud("trainer", STEADY_OPTION, requested=NOW)
    wait = move("trainer-1", two, state(asked))
    assert wait == Wait(until_ms=None, why="the zone of the trainer's first node is not known yet")
    further = intended("trainer-1", cloud_option("gcp", "g1", "g1-b", Market.ON_DEMAND, TRAINER_RATE))
    beside = move("trainer", two, state(), further)
    assert isinstance(beside, Option)
    assert beside.placement.zone == "g1-b", "beside the node that the same pass has bought"


def test_rollout_nodes_come_after_every_node_of_the_trainer():
    two, first = run(1, 2), replace(TRAINER, zone="g1-a")
    further = cloud_option("gcp", "g1", "g1-a", Market.ON_DEMAND, TRAINER_RATE)
    assert move("spot-0", two, state(first)) == Wait(until_ms=None, why="the trainer comes first")
    assert move("spot-0", two, state(first), intended("trainer-1", further)) == SPOT_OPTION
    leaving = replace(TRAINER, happened={**TRAINER.happened, "notice": NOW})
    assert move("spot-0", run(), state(leaving)) == SPOT_OPTION, "a trainer of one node may be replaced meanwhile"


# --- rollout nodes ----------------------------------------------------------------------------------------

CHEAP = priced(SITE.rollout[1], SPOT_RATE // 2)
CHEAP_COST = SPOT_RATE // 2 + SIDE[Market.SPOT]
TWO_ZONES = site(SPOT_OPTION, CHEAP, STEADY_OPTION)


def test_a_rollout_node_fits_beside_all_nodes_of_the_run_or_a_cheaper_one_is_bought():
    leaving = on_cloud_up("spot-1", SPOT_OPTION, releasing=NOW - 1)
    on_clouds = state(TRAINER, leaving, on_cloud_up("spot-2", SPOT_OPTION, gone=NOW - HOUR_MS), sites=(TWO_ZONES,))
    bought = intended("spot-2", CHEAP)

    def bought_at(max_hourly: int | None) -> Move:
        return move("spot-0", run(4, max_hourly=max_hourly), on_clouds, bought)

    least = TRAINER_COST + SPOT_COST + CHEAP_COST + SPOT_COST
    assert bought_at(None) == SPOT_OPTION
    assert bought_at(least) == SPOT_OPTION
    assert bought_at(least - 1) == CHEAP
    assert bought_at(least - SPOT_COST) == SPOT_OPTION, "none fits, and the refusal names the planned node's price"


def test_at_most_half_of_the_rollout_nodes_are_in_a_zone():
    """Nodes of the trainer count for no zone's half."""
    first = replace(TRAINER, zone="g1-a")
    further = replace(on_cloud_up("trainer-1", STEADY_OPTION), zone="g1-a")
    there = on_cloud_up("spot-1", SPOT_OPTION)
    assert move("spot-0", run(2, 2), state(first, further, there)) == SITE.rollout[1]
    assert move("spot-0", run(4, 2), state(first, further, there)) == SPOT_OPTION


def test_an_empty_slot_gets_a_stand_in_and_a_slot_with_one_waits_for_spot():
    no_spot, three = (site(STEADY_OPTION),), run(3)
    nodes = TRAINER, on_cloud_up("spot-0", STEADY_OPTION), on_cloud_up("spot-1", SPOT_OPTION, notice=NOW - 1)
    stand_in = StandIn(option=STEADY_OPTION, why="no spot is offered in the region")
    assert move("spot-0", three, state(*nodes, sites=no_spot)) == Wait(
        until_ms=None, why="spot capacity is not known to be back"
    )
    assert move("spot-1", three, state(*nodes, sites=no_spot)) == stand_in, "its node is leaving"
    assert move("spot-2", three, state(*nodes, sites=no_spot)) == stand_in
    assert move("spot-0", three, state(*nodes)) == SPOT_OPTION


def test_a_stand_in_is_kept_if_the_deadline_bears_no_preemption():
    nodes = TRAINER, on_cloud_up("spot-0", STEADY_OPTION)
    busy = state(*nodes, work=work(1))
    assert move("spot-0", run(deadline_ms=NOW + 20 * HOUR_MS), busy) == SPOT_OPTION
    wait = move("spot-0", run(deadline_ms=NOW + 10 * HOUR_MS), busy)
    assert wait == Wait(until_ms=None, why="the deadline leaves no time for another preemption")


# --- the price of waiting ---------------------------------------------------------------------------------

SLOTS = 4
REFUSED_MS = NOW - HOUR_MS
FIRST, FURTHER = replace(TRAINER, zone="g1-a"), replace(on_cloud_up("trainer-1", STEADY_OPTION), zone="g1-a")
OUT = (
    replace(FURTHER, micro_usd_per_hour=3 * TRAINER_RATE),
    FIRST,
    on_cloud_up("spot-1", STEADY_OPTION),
    on_cloud("spot-1", STEADY_OPTION, 1, requested=NOW),
    on_cloud_up("spot-2", STEADY_OPTION, notice=NOW),
    *(
        on_cloud("spot-0", option, number, requested=NOW - 1000, no_capacity=NOW)
        for number, option in enumerate((SPOT_OPTION, SITE.rollout[1]))
    ),
)
"""A trainer of two nodes, and no spot. One slot has a stand-in and its successor, and one a stand-in that leaves."""
PRICES = Prices(trainer=2 * TRAINER_COST, spot=SPOT_COST, on_demand=TRAINER_COST)


def bought_without_spot(rate: int, metered: int = 0) -> str:
    """Return why a stand-in at this hourly rate, without its disk and address, is bought. Empty: it is not."""
    dear_zone = priced(SITE.rollout[1], SPOT_RATE * 5 // 4)
    out = state(*OUT, sites=(site(dear_zone, SPOT_OPTION, priced(STEADY_OPTION, rate)),), work=work(SLOTS))
    found = move("spot-0", run(SLOTS, 2), replace(out, metered=metered))
    assert isinstance(found, StandIn | Wait)
    return found.why if isinstance(found, StandIn) else ""


def test_a_stand_in_is_bought_up_to_the_price_that_waiting_costs():
    left = work(SLOTS)
    waiting = Waiting(
        left=left.left,
        full_hours=left.left_ms(SLOTS) / HOUR_MS,
        nodes=SLOTS,
        gained=left.per_hour(2) - left.per_hour(1),
        prices=PRICES,
    )
    seen = Seen.of(state(*OUT), SLOTS)
    most = int(waiting.earns(0.0, seen.share)) - SIDE[Market.ON_DEMAND]
    assert "waiting costs more than it saves" in bought_without_spot(most)
    assert bought_without_spot(most + 1) == ""


def test_the_money_for_waiting_is_a_part_of_all_on_demand_with_disks_and_addresses():
    whole = 10 * (PRICES.trainer + SLOTS * PRICES.on_demand)
    assert bought_without_spot(10**9, metered=int(MOST_OVER * whole) - 1) == ""
    assert "the money for waiting is used up" in bought_without_spot(10**9, metered=int(MOST_OVER * whole) + 1)


def test_without_an_offer_for_a_trainer_nothing_is_left():
    assert isinstance(move("trainer", run(0), state(sites=(site(trainer=()),))), NothingLeft)
