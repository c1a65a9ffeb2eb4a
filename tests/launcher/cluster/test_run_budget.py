"""The budget guard on the facts of a run: each term of a sum counts, to the micro-dollar."""

from dataclasses import replace

from engine.events import Market
from launcher.decide.actions import Buy
from launcher.decide.budget_guard import Limits, worst_case
from launcher.decide.facts import INSTANCE_ENDED, Others, Wanted
from launcher.decide.run_budget import (
    bound_of_plan,
    describe_limits,
    hourly_micro_usd,
    planned_hourly,
    refused_now,
    reserved_micro_usd,
    stuck_micro_usd,
)
from launcher.market.side_prices import disk_micro_usd_per_hour
from launcher.placement.plan import Plan
from tests.launcher.cluster.stage import SPOT_RATE, TRAINER_RATE, cloud_slots
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
    wanted,
)

NOW, MINUTE = 2 * HOUR, 60_000
ALLOWANCE_MS = cloud_wanted().allowance_ms
TRAINER_COST, SPOT_COST = TRAINER_RATE + SIDE[Market.ON_DEMAND], SPOT_RATE + SIDE[Market.SPOT]
DISK_COST = disk_micro_usd_per_hour("gcp", 100)
TRAINER = on_cloud_up("trainer", STEADY_OPTION)
DOLLAR = 1_000_000


def pending(number: int, *, since_ms: int = 0, reserved: int = 400_000, **happened: int):
    """Return a spot node that was asked for `since_ms` ago and is not up."""
    record = on_cloud(f"spot-{number}", SPOT_OPTION, requested=NOW - since_ms, **happened)
    return replace(record, reserved_micro_usd=reserved)


def leaving(number: int, ordered_ms: int, **happened: int):
    return on_cloud_up(f"spot-{number}", SPOT_OPTION, releasing=ordered_ms, **happened)


# --- what nodes cost and hold -----------------------------------------------------------------------------


def test_every_node_without_an_end_costs_its_hour():
    gone = on_cloud_up("spot-0", SPOT_OPTION, gone=NOW - 1)
    without_vm = leaving(3, NOW - 2 * MINUTE, **{INSTANCE_ENDED: NOW - MINUTE})
    assert hourly_micro_usd([TRAINER, gone]) == TRAINER_COST
    nodes = [TRAINER, gone, pending(1), leaving(2, NOW - MINUTE), without_vm]
    assert hourly_micro_usd(nodes) == TRAINER_COST + 2 * SPOT_COST + DISK_COST


def test_nodes_hold_the_time_of_a_stop_and_a_launch_what_it_may_be_billed():
    gone = replace(pending(0), happened={"requested": 0, "no_capacity": NOW - 1})
    stopping = worst_case(TRAINER_COST, ALLOWANCE_MS)
    assert reserved_micro_usd([TRAINER, gone], ALLOWANCE_MS, NOW) == stopping
    started = pending(3, up=NOW)  # its bill has begun
    nodes = [TRAINER, gone, leaving(1, NOW - MINUTE), started]
    assert reserved_micro_usd(nodes, ALLOWANCE_MS, NOW) == worst_case(TRAINER_COST + 2 * SPOT_COST, ALLOWANCE_MS)
    short, long = pending(1, since_ms=HOUR), pending(2, since_ms=HOUR, reserved=1000)
    held = worst_case(TRAINER_COST + 2 * SPOT_COST, ALLOWANCE_MS) + 400_000 + SPOT_COST
    assert reserved_micro_usd([TRAINER, short, long], ALLOWANCE_MS, NOW) == held


def test_a_spend_deadline_counts_the_whole_plan_or_dearer_nodes_even_while_they_leave():
    run = cloud_wanted(2)
    plan = TRAINER_COST + 2 * SPOT_COST
    assert planned_hourly(cloud_facts(TRAINER), run) == plan
    stand_ins = [on_cloud_up(f"spot-{number}", STEADY_OPTION, releasing=NOW) for number in range(2)]
    assert planned_hourly(cloud_facts(TRAINER, *stand_ins), run) == 3 * TRAINER_COST
    gone = [replace(one, happened={**one.happened, "released": NOW}) for one in stand_ins]
    assert planned_hourly(cloud_facts(TRAINER, *gone), run) == plan


# --- nodes that a cloud does not end ----------------------------------------------------------------------

ORDERED = NOW - 10 * MINUTE
STUCK_RUN = cloud_wanted(2, max_total=100 * DOLLAR)
LEFT_AN_HOUR = 100 * DOLLAR - TRAINER_COST - 2 * SPOT_COST
"""Spent money with which the rest pays for an hour of the plan."""


def stuck(*nodes, run: Wanted = STUCK_RUN, spent_then: int = LEFT_AN_HOUR, now_ms: int = NOW, **more) -> int:
    known = {node.name: spent_then for node in nodes}
    return stuck_micro_usd(replace(cloud_facts(*nodes, metered_when_ordered=known, **more), now_ms=now_ms), run)


def test_a_node_that_does_not_end_holds_its_cost_until_the_spend_deadline_of_its_order():
    node = leaving(0, ORDERED)
    held = worst_case(SPOT_COST, HOUR - 10 * MINUTE - ALLOWANCE_MS)
    assert stuck(node) == held
    assert stuck(node, metered=LEFT_AN_HOUR + DOLLAR) == held, "what was spent since the order does not count"
    dearer = on_cloud_up("spot-1", STEADY_OPTION)
    assert stuck(node, dearer) == held, "the plan used up the money, so the deadline is not earlier"
    assert stuck(node, spent_then=100 * DOLLAR) == 0, "its deadline is over"
    assert stuck(node, run=cloud_wanted(2)) == 0, "no limit, no deadline"


def test_a_node_is_stuck_only_after_the_time_of_a_stop():
    node = leaving(0, ORDERED)
    assert stuck(node, now_ms=ORDERED + ALLOWANCE_MS) == 0
    assert stuck(node, now_ms=ORDERED + ALLOWANCE_MS + 1) == worst_case(SPOT_COST, HOUR - 2 * ALLOWANCE_MS - 1)


def test_the_money_of_all_stuck_nodes_adds_up():
    alone = stuck(leaving(1, ORDERED))
    others = [TRAINER, on_cloud_up("spot-2", SPOT_OPTION), leaving(3, NOW - 1)]
    ended = leaving(4, ORDERED, released=NOW - MINUTE)
    without_vm = leaving(5, ORDERED, **{INSTANCE_ENDED: NOW - MINUTE})
    assert stuck(*others, leaving(0, ORDERED), ended, without_vm, leaving(1, ORDERED)) == 2 * alone > 0


# --- a purchase -------------------------------------------------------------------------------------------

NODES = (TRAINER, pending(0, reserved=400_000), leaving(1, ORDERED))
PURCHASE = Buy(slot=cloud_slots(2, (SITE,))[2], option=SPOT_OPTION, generation=1, name="x", reserved_micro_usd=70_000)
HOURLY = TRAINER_COST + 2 * SPOT_COST
HELD = worst_case(HOURLY, ALLOWANCE_MS) + 400_000
STUCK = worst_case(SPOT_COST, 50 * MINUTE - ALLOWANCE_MS)
NEW = 70_000 + worst_case(SPOT_COST, ALLOWANCE_MS)
OTHERS = Others(metered=5 * DOLLAR, reserved=7 * DOLLAR, hourly=11 * DOLLAR)


def refusal_of(metered: int = 0, **budget: int | None) -> str:
    """Return the section and the limit that refuse the purchase. `all_...`: limits across all runs. Empty: bought."""
    own = Limits(max_total=budget.get("max_total"), max_hourly=budget.get("max_hourly"))
    every = Limits(max_total=budget.get("all_total"), max_hourly=budget.get("all_hourly"))
    then = {NODES[2].name: LEFT_AN_HOUR}
    on_clouds = cloud_facts(*NODES, metered=metered, others=OTHERS, metered_when_ordered=then)
    refusal = refused_now(on_clouds, replace(STUCK_RUN, limits=own, all_runs=every), PURCHASE)
    return "" if refusal is None else refusal.text.partition(" ")[0]


def test_a_purchase_fits_beside_all_that_is_spent_held_and_stuck():
    most = 100 * DOLLAR - HELD - STUCK - NEW
    assert refusal_of(most, max_total=100 * DOLLAR) == ""
    assert refusal_of(most + 1, max_total=100 * DOLLAR) == "budget.max_total"


def test_a_purchase_fits_beside_all_that_other_runs_spent_and_hold():
    """A stuck node holds its money in a run without a limit of its own, too."""
    most = 100 * DOLLAR - HELD - STUCK - NEW - 12 * DOLLAR
    assert refusal_of(most, all_total=100 * DOLLAR) == ""
    assert refusal_of(most + 1, all_total=100 * DOLLAR) == "all_runs.max_total"
    assert refusal_of(most + 1, all_total=100 * DOLLAR, max_hourly=0) == "budget.max_hourly", (
        "its own limits come first"
    )


def test_a_purchase_keeps_the_hourly_limits_with_disks_and_addresses():
    least = HOURLY + SPOT_COST
    assert refusal_of(max_hourly=least) == ""
    assert refusal_of(max_hourly=least - 1) == "budget.max_hourly"
    assert refusal_of(all_hourly=least + 11 * DOLLAR) == ""
    assert refusal_of(all_hourly=least + 11 * DOLLAR - 1) == "all_runs.max_hourly"


# --- bounds -----------------------------------------------------------------------------------------------


def a_plan(trainers: int = 1, site=SITE, **more) -> Plan:
    budget = {"max_total_micro_usd": 10_000 * DOLLAR, "max_hourly_micro_usd": None, "judge_micro_usd": 20 * DOLLAR}
    return Plan(region="g1", slots=cloud_slots(1, (SITE,), trainers), sites=(site,), **(budget | more))


STOP_MS = 5 * MINUTE
AT_ONCE = 3 * 2 * TRAINER_COST
"""A trainer and a rollout node on demand, each with a successor and a leaving node."""


def test_the_time_of_a_run_bounds_its_cost_with_its_judges_if_its_limit_is_higher():
    assert bound_of_plan(a_plan(), 10 * HOUR) == worst_case(AT_ONCE, 10 * HOUR + STOP_MS) + 20 * DOLLAR
    assert bound_of_plan(a_plan()) == 10_000 * DOLLAR + worst_case(AT_ONCE, STOP_MS)


def test_every_node_of_a_trainer_counts_at_the_trainers_price_in_the_bound():
    dearer = replace(STEADY_OPTION, on_demand_micro_usd_per_hour=5 * DOLLAR)
    several = a_plan(2, replace(SITE, trainer=(dearer,)))
    at_once = 3 * (2 * (5 * DOLLAR + SIDE[Market.ON_DEMAND]) + TRAINER_COST)
    assert bound_of_plan(several) == 10_000 * DOLLAR + worst_case(at_once, STOP_MS)


def test_an_hourly_limit_bounds_the_cost_and_the_bound_is_rounded_up():
    """Spot nodes of a dollar an hour in all may cost $3.395663 and a third of a micro-dollar on demand."""
    limited = a_plan(max_hourly_micro_usd=DOLLAR, judge_micro_usd=0)
    assert bound_of_plan(limited, 10 * HOUR - STOP_MS) == 10 * 3_395_664


def test_the_limits_of_a_run_are_told_with_their_amounts():
    text = describe_limits(wanted(2, max_total=9 * DOLLAR, max_hourly=3 * DOLLAR))
    assert text.startswith("at most $9.00, at most $3.00/h; stopping is given 60000 ms of the run's clock, $0.03 at")
    assert describe_limits(wanted(0)).startswith("no total limit, no hourly limit; ")
    on_clouds = describe_limits(cloud_wanted(0, max_total=9 * DOLLAR), (SITE,))
    assert on_clouds.startswith("at most $9.00, no hourly limit; stopping is given 1m")
    assert on_clouds.endswith("; never more than $9.05")
    assert "never more" not in describe_limits(cloud_wanted(0), (SITE,))
