"""Accounting: every split of a run's cost adds up to the same total, to the micro-dollar, for every history."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from launcher.ledger.accounting import (
    Charge,
    Usage,
    cost_until,
    interval_micro_usd,
    phases_of,
    phases_of_charge,
    run_costs,
    share_out,
)
from launcher.ledger.models import BillingInterval, NodeEvent
from tests.launcher.made_ledger import HOUR_MS, MINUTE_MS, START_MS, a_long_run, a_run, a_session

# --- arithmetic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "rate", "micro_usd"),
    [
        (3_600_000, 1_000_000, 1_000_000),
        (0, 1_000_000, 0),
        (1_800_000, 1, 1),  # half a micro-dollar rounds up
        (1_799_999, 1, 0),
        (1, 3_600_000, 1),
    ],
)
def test_the_cost_of_an_interval_is_rounded_once_half_up(ms, rate, micro_usd):
    assert interval_micro_usd(1000, 1000 + ms, rate) == micro_usd


def test_an_interval_that_ends_before_it_starts_is_refused():
    with pytest.raises(ValueError, match="cannot end"):
        interval_micro_usd(2, 1, 1)


def test_the_rest_goes_to_the_largest_remainders_and_ties_go_by_name():
    assert share_out(10, {"b": 1, "a": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}
    assert share_out(5, {"x": 3, "y": 1}) == {"x": 4, "y": 1}  # 3.75 and 1.25


def test_without_weights_everything_goes_to_the_named_key():
    assert share_out(7, {"a": 0}, otherwise="cold_start") == {"a": 0, "cold_start": 7}
    assert share_out(7, {}) == {"idle": 7}


@given(st.integers(0, 10**15), st.dictionaries(st.text(max_size=4), st.integers(0, 10**12), max_size=8))
def test_shares_sum_exactly_and_none_is_a_whole_unit_off(total, weights):
    shares = share_out(total, weights)
    assert sum(shares.values()) == total
    whole = sum(weights.values())
    if whole:
        assert all(abs(shares[key] * whole - total * weight) < whole for key, weight in weights.items())


def test_unreported_time_is_idle_and_excess_usage_is_scaled_down():
    assert phases_of(100, {"rollout": 60, "sync": 10}) == {"rollout": 60, "sync": 10, "idle": 30}
    assert phases_of(100, {"rollout": 150, "sync": 50}) == {"rollout": 75, "sync": 25, "idle": 0}
    assert phases_of(100, {"rollout": 60, "idle": 20}) == {"rollout": 60, "idle": 40}


# --- one charge ---------------------------------------------------------------------------------------


def a_charge(start: int, end: int) -> Charge:
    return Charge(start_ms=start, end_ms=end, micro_usd_per_hour=1, micro_usd=0, closed=True)


def test_a_cold_start_lasts_until_the_node_is_seen_or_ends():
    assert phases_of_charge(a_charge(0, 100), 30, []) == {"cold_start": 30, "idle": 70}
    assert phases_of_charge(a_charge(0, 100), None, []) == {"cold_start": 100}
    assert phases_of_charge(a_charge(0, 100), 400, []) == {"cold_start": 100}


def test_the_last_window_may_end_after_the_node_did():
    window = Usage(lineage=1, from_ms=80, to_ms=120, phase_ms={"rollout": 15})
    assert phases_of_charge(a_charge(0, 100), 0, [window]) == {"rollout": 15, "idle": 85}


def test_work_that_began_before_its_window_counts_up_to_the_billed_time():
    window = Usage(lineage=1, from_ms=80, to_ms=100, phase_ms={"training": 60})
    assert phases_of_charge(a_charge(0, 100), 0, [window]) == {"training": 60, "idle": 40}
    assert phases_of_charge(a_charge(0, 100), 70, [window]) == {"cold_start": 70, "training": 30}


def test_a_window_outside_the_charge_is_not_of_it():
    window = Usage(lineage=1, from_ms=100, to_ms=120, phase_ms={"rollout": 20})
    assert phases_of_charge(a_charge(0, 100), 0, [window]) == {"idle": 100}


def test_a_time_claimed_by_two_lineages_belongs_to_the_newest():
    old = Usage(lineage=1, from_ms=0, to_ms=60, phase_ms={"rollout": 60})
    new = Usage(lineage=2, from_ms=40, to_ms=100, phase_ms={"training": 60})
    assert phases_of_charge(a_charge(0, 100), 0, [old, new, new]) == {"training": 60, "rollout": 40}


# --- whole histories ----------------------------------------------------------------------------------

PHASES = st.dictionaries(
    st.sampled_from(["rollout", "exploration", "training", "evaluation", "sync", "idle", "lost"]),
    st.integers(0, 10**7),
    max_size=4,
)
MOMENT = st.integers(0, 10 * HOUR_MS)
SPAN = st.tuples(MOMENT, MOMENT).map(sorted)


@st.composite
def histories(draw):
    """Draw histories: nodes billed in intervals, still running or never up, and the usage that the engine reports."""
    nodes = []
    for number in range(draw(st.integers(0, 5))):
        moments = sorted(draw(st.lists(MOMENT, max_size=6, unique=True)))
        nodes.append(
            {
                "slot": draw(st.sampled_from(["trainer", "spot-0", "spot-1"])),
                "generation": number,
                "market": draw(st.sampled_from(["spot", "on_demand"])),
                "rate": draw(st.integers(0, 50_000_000)),
                "moments": moments,
                "seen": draw(st.none() | MOMENT),
                "usages": draw(st.lists(st.tuples(SPAN, PHASES, st.integers(1, 3)), max_size=4)),
            }
        )
    return nodes


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), MOMENT, MOMENT)
def test_every_split_of_a_random_history_adds_up_to_the_total(history, now, earlier):
    with a_session() as session:
        made = a_run(session)
        billed = 0
        for fact in history:
            node = made.node(
                fact["slot"],
                fact["generation"],
                market=fact["market"],
                rate=fact["rate"],
                on_demand=50_000_000,
                seen=fact["seen"],
            )
            moments = fact["moments"]
            for start, end in zip(moments[::2], moments[1::2], strict=False):
                made.bill(node, start, end)
                billed += interval_micro_usd(start, end, fact["rate"])
            if len(moments) % 2:  # the last start has no end: still running
                session.add(NodeEvent(node_id=node.id, at_ms=START_MS + moments[-1], kind="up"))
                billed += interval_micro_usd(moments[-1], max(now, moments[-1]), fact["rate"])
            for (start, end), phase_ms, lineage in fact["usages"]:
                made.used(node, start, end, lineage, **phase_ms)
        costs = run_costs(session, made.run, START_MS + now)
        splits = [costs.by_role, costs.by_market, costs.by_node, costs.by_phase]
        assert [sum(split.values()) for split in splits] == [billed] * 4
        assert costs.total == billed
        for node in costs.nodes:
            assert sum(node.phase_ms.values()) == node.ms
            assert sum(node.phase_micro_usd.values()) == node.micro_usd
        first, last = sorted([earlier, now])
        assert 0 <= costs.until(START_MS + first) <= costs.until(START_MS + last) <= billed
        assert costs.until(START_MS + 10 * HOUR_MS) == billed


def test_a_running_node_is_billed_until_now_and_an_ended_one_until_its_end():
    with a_session() as session:
        made = a_run(session)
        made.node("trainer", market="on_demand", rate=9_000_000, up=0, seen=HOUR_MS // 2)
        made.node("spot-0", rate=3_600_000, up=0, end=HOUR_MS)
        costs = run_costs(session, made.run, START_MS + 2 * HOUR_MS)
    assert costs.by_role == {"trainer": 18_000_000, "rollout": 3_600_000}
    assert costs.by_market == {"on_demand": 18_000_000, "spot": 3_600_000}
    assert costs.by_phase == {"cold_start": 4_500_000 + 3_600_000, "idle": 13_500_000}


def test_a_node_seen_to_end_is_charged_until_then_before_its_bill():
    with a_session() as session:
        made = a_run(session)
        node = made.node("spot-0", rate=3_600_000, up=0)
        session.add(NodeEvent(node_id=node.id, at_ms=START_MS + HOUR_MS, kind="gone"))
        assert run_costs(session, made.run, START_MS + 9 * HOUR_MS).total == 3_600_000


def test_a_bill_of_zero_length_counts_as_cold_start():
    with a_session() as session:
        made = a_run(session)
        node = made.node("spot-0", up=0, end=0)
        session.flush()
        session.execute(update(BillingInterval).where(BillingInterval.node_id == node.id).values(micro_usd=60_000))
        assert run_costs(session, made.run, START_MS).by_phase == {"cold_start": 60_000}


def test_spent_until_a_moment_counts_the_part_of_each_charge_before_it():
    with a_session() as session:
        made = a_run(session)
        made.node("spot-0", rate=3_600_000, up=0, end=HOUR_MS)
        made.node("spot-1", rate=7_200_000, up=HOUR_MS // 2)
        assert cost_until(session, made.run, START_MS - 1) == 0
        assert cost_until(session, made.run, START_MS + HOUR_MS // 2) == 1_800_000
        assert cost_until(session, made.run, START_MS + HOUR_MS) == 3_600_000 + 3_600_000


def test_another_runs_nodes_and_usage_do_not_count():
    with a_session() as session:
        a_run(session, "other").node("spot-0", up=0, end=HOUR_MS)
        assert run_costs(session, a_run(session).run, START_MS + HOUR_MS).total == 0


def test_a_long_run_costs_the_sum_of_its_nodes():
    with a_session() as session:
        costs = run_costs(session, a_long_run(session), START_MS + 240 * MINUTE_MS)
    assert costs.by_node["digits-ocr-trainer-g1"] == 4 * 804_800
    assert costs.by_node["digits-ocr-spot-1-g2"] == 22_333  # 5 minutes of 268,000 an hour
