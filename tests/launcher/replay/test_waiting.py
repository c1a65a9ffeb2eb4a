"""The price of waiting: when a slot without spot gets a stand-in, by numbers small enough to check by hand."""

from dataclasses import replace

import pytest

from engine.events import Market
from launcher.decide.budget_guard import NO_LIMITS
from launcher.decide.facts import Facts, NodeRecord, Stage, Wanted
from launcher.decide.waiting import (
    Seen,
    costs_more_to_wait,
    is_late,
    is_money_used_up,
    may_risk_spot,
    pays_on_demand,
    reserve_ms,
    slack_ms,
    why_stand_in,
)
from launcher.money import HOUR_MS
from launcher.placement.price_of_waiting import CHANGE_MS, SPARE_CHANGES, Prices, expected_rest_hours
from tests.launcher.replay.markets import SPOT, option, plan, work

PRICES = Prices(trainer=55e6, spot=15e6, on_demand=55e6)
SEEN = Seen(share=0.7, hazard_per_hour=0.5)
NO_HAZARD = Seen(share=1.0, hazard_per_hour=0.0)


def facts(hours: float, done_hours: float = 0.0, metered: int = 0, nodes=()) -> Facts:
    """Return facts after so many hours of a run of 10 h with two nodes, of which `done_hours` of work are done."""
    left = replace(work(2), done=done_hours * HOUR_MS / 600_000)
    return Facts(
        now_ms=round(hours * HOUR_MS),
        stage=Stage.RUNNING,
        reason="",
        stage_ms=0,
        planned_ms=0,
        nodes=nodes,
        metered=metered,
        work=left,
    )


def wanted(deadline_hours: float | None) -> Wanted:
    return Wanted(
        run="r",
        slots=plan("a", 2).slots,
        limits=NO_LIMITS,
        deadline_ms=None if deadline_hours is None else round(deadline_hours * HOUR_MS),
        allowance_ms=0,
        settle_ms=0,
    )


def spot_node(up_hours: float, ended_hours: float | None, reclaimed: bool = False) -> NodeRecord:
    happened = {"requested": 0, "up": round(up_hours * HOUR_MS)}
    if ended_hours is not None:
        happened["gone"] = round(ended_hours * HOUR_MS)
    return NodeRecord(
        name=f"n{up_hours}",
        slot="spot-0",
        generation=0,
        role="rollout",
        market=Market.SPOT,
        micro_usd_per_hour=1,
        requested_ms=0,
        reserved_micro_usd=0,
        happened=happened,
        reclaimed=reclaimed,
    )


def test_slack_is_the_time_left_with_every_node_at_work():
    assert slack_ms(facts(2, done_hours=1).work, 15 * HOUR_MS, 2 * HOUR_MS) == pytest.approx(4 * HOUR_MS)


def test_the_reserve_holds_the_churn_to_come_and_two_changes_once():
    """10 h to go and half a preemption per node-hour: five changes, and two spare."""
    assert reserve_ms(work(2), 0.5) == pytest.approx((SPARE_CHANGES + 5) * CHANGE_MS)
    assert SPARE_CHANGES == 2


def test_a_run_is_late_once_its_slack_is_the_reserve():
    reserve_hours = SPARE_CHANGES * CHANGE_MS / HOUR_MS
    assert not is_late(facts(1), wanted(11 + reserve_hours + 0.01), NO_HAZARD)
    assert is_late(facts(1), wanted(11 + reserve_hours - 0.01), NO_HAZARD)
    assert is_late(facts(1), wanted(11 + reserve_hours + 0.01), SEEN)
    assert not is_late(facts(1), wanted(None), SEEN)
    exact = slack_ms(facts(1).work, 0, HOUR_MS) - reserve_ms(facts(1).work, 0.0)
    assert is_late(facts(1), replace(wanted(None), deadline_ms=round(-exact)), NO_HAZARD), "equal is late"


def test_spot_is_risked_only_while_the_loss_of_every_node_is_in_time():
    hours = SPARE_CHANGES * CHANGE_MS / HOUR_MS
    assert may_risk_spot(facts(1), wanted(11 + hours + 0.01))
    assert not may_risk_spot(facts(1), wanted(11 + hours - 0.01))


def test_a_controller_that_was_away_buys_by_facts_and_not_to_catch_up():
    """Past the deadline the run is late, whatever was missed meanwhile; the plan's slots bound what is bought."""
    assert is_late(facts(40, done_hours=1), wanted(20), NO_HAZARD)


def test_money_for_waiting_is_one_percent_and_what_spot_has_saved():
    whole = 10 * 3 * 55_000_000
    assert not is_money_used_up(facts(0, metered=whole // 100 - 1), work(2), PRICES)
    assert is_money_used_up(facts(0, metered=whole // 100 + 10), work(2), PRICES)
    half = replace(work(2), done=work(2).iterations / 2)
    assert not is_money_used_up(facts(0, metered=whole // 3), half, PRICES)


def test_an_outage_that_has_lasted_longer_is_expected_to_last_longer():
    assert expected_rest_hours(0.5) < expected_rest_hours(2) < expected_rest_hours(8)


def test_a_dear_trainer_does_not_wait_and_a_cheap_one_does():
    """Two missing nodes of two: waiting idles the trainer. At $55 an hour beside one node it does not pay to wait."""
    idle = work(2)
    assert costs_more_to_wait(idle, 0, 2.0, SEEN, PRICES)
    assert not costs_more_to_wait(idle, 0, 2.0, SEEN, replace(PRICES, trainer=5e6))
    assert not costs_more_to_wait(idle, 0, 0.0, SEEN, replace(PRICES, on_demand=500e6))


def test_waiting_is_dearer_the_longer_the_outage_has_lasted():
    prices = replace(PRICES, on_demand=100e6)
    answers = [costs_more_to_wait(work(2), 1, hours, SEEN, prices) for hours in (0.0, 2.0, 30.0)]
    assert answers == [False, False, True]


def test_a_node_that_makes_no_iteration_cheaper_is_not_bought():
    assert pays_on_demand(work(2), 1, PRICES)
    trainer_does_it = replace(work(2), iteration_ms=[1000, 990, 985])
    assert not pays_on_demand(trainer_does_it, 1, PRICES)
    assert not costs_more_to_wait(trainer_does_it, 1, 1.0, SEEN, PRICES)
    as_much = replace(work(2), iteration_ms=[4000, 2000, 1000])
    assert not pays_on_demand(as_much, 1, replace(PRICES, trainer=0)), "twice the price for twice the iterations"
    done = replace(work(2), done=work(2).iterations)
    assert not costs_more_to_wait(done, 1, 30.0, SEEN, PRICES)


def test_what_a_run_has_seen_moves_share_and_hazard():
    trainer = replace(spot_node(0, None), name="t", role="trainer", market=Market.ON_DEMAND)
    good = Seen.of(facts(10, nodes=(trainer, spot_node(0, None))), 1)
    bad = Seen.of(facts(10, nodes=(trainer, spot_node(0, 1, reclaimed=True))), 1)
    assert good.share == pytest.approx((10 + 0.7 * 6) / 16)
    assert bad.share == pytest.approx((1 + 0.7 * 6) / 16)
    assert bad.hazard_per_hour == pytest.approx((1 + 1.8) / 7)
    assert good.hazard_per_hour < bad.hazard_per_hour


def test_only_spot_nodes_since_the_trainer_came_up_count_as_seen():
    """Of two slots, in 8 h since the trainer: spot for 3 h each, of which a preemption ended one."""
    trainer = replace(spot_node(2, None), name="t", role="trainer", market=Market.ON_DEMAND)
    stand_in = replace(spot_node(1, 9), name="s", market=Market.ON_DEMAND)
    asked = replace(spot_node(1, None), name="a", happened={"requested": 0})
    later = replace(trainer, name="t2", happened={"requested": 0, "up": 9 * HOUR_MS})
    nodes = (later, trainer, stand_in, asked, spot_node(3, 6, reclaimed=True), spot_node(5, 8))
    seen = Seen.of(facts(10, nodes=nodes), 2)
    assert seen.share == pytest.approx((3 + 0.7 * 6) / (8 + 6))
    assert seen.hazard_per_hour == pytest.approx((1 + 1.8) / (6 + 6))


# --- the reason for a stand-in ------------------------------------------------------------------------------

DEAR = replace(PRICES, on_demand=100e6)
"""So dear on demand that the second of two nodes waits for hours."""
ALL_ON_DEMAND = 10 * (55_000_000 + 2 * 100_000_000)
"""Price of the whole run with `DEAR`, in micro-dollars."""


def why(now: Facts, deadline_hours=None, prices=DEAR, out_hours=0.0, price=None, working=1) -> str | None:
    since_ms = now.now_ms - round(out_hours * HOUR_MS)
    return why_stand_in(now, wanted(deadline_hours), prices, working, since_ms, price)


def test_a_late_run_gets_a_stand_in_whatever_it_costs():
    reserve_hours = reserve_ms(work(2), 0.3) / HOUR_MS
    assert why(facts(1), 11 + reserve_hours + 0.01) is None
    assert why(facts(1), 11.5).startswith("behind: with every node at work the run would be 30m early, and preempt")
    assert why(facts(1), 10.5).startswith("behind: with every node at work the run would be 30m late, and preempt")


def test_used_up_money_buys_a_stand_in_only_if_the_stand_in_pays():
    used_up = facts(0, metered=ALL_ON_DEMAND // 100 + 10)
    assert why(facts(0, metered=ALL_ON_DEMAND // 100 - 10)) is None
    assert why(used_up).startswith("the money for waiting is used up")
    cheap_trainer = replace(DEAR, trainer=5e6)
    assert is_money_used_up(used_up, work(2), cheap_trainer)
    assert not pays_on_demand(work(2), 1, cheap_trainer)
    assert why(used_up, prices=cheap_trainer) is None


def test_a_long_outage_or_a_low_price_buys_a_stand_in():
    now = facts(40)
    assert why(now, out_hours=2) is None
    assert why(now, out_hours=-1) is None, "an outage that begins later is none yet"
    assert why(now, out_hours=30) == "no spot for 1d 6h: waiting costs more than it saves"
    assert why(now, out_hours=2, price=SPOT).startswith("no spot for 2h:")


def test_the_time_with_spot_counts_for_every_slot():
    """Spot for 12 h of 12 in one of two slots: half of the time. One slot alone would have had spot all the time."""
    trainer = replace(spot_node(0, None), name="t", role="trainer", market=Market.ON_DEMAND)
    now = facts(12, nodes=(trainer, spot_node(0, None)))
    share = (12 / 2 + 0.7 * 6) / (12 + 6)
    prices = replace(PRICES, on_demand=1.0)
    seen = Seen(share=share, hazard_per_hour=0.0)
    between = [
        cents * 10_000
        for cents in range(1, 40_000)
        if costs_more_to_wait(work(2), 1, 3.0, seen, prices, cents * 10_000)
    ]
    limit = max(between)
    assert why(now, prices=prices, out_hours=3.0, price=limit) is not None
    assert why(now, prices=prices, out_hours=3.0, price=limit + 10_000) is None


def test_the_price_of_an_offer_counts_its_disk_and_address():
    offer = option("a", Market.SPOT, 1_000_000)
    assert offer.placement.side_micro_usd_per_hour > 0
    assert offer.whole_micro_usd_per_hour == 1_000_000 + offer.placement.side_micro_usd_per_hour
