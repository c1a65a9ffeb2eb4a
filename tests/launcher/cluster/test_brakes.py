"""The budget guard: spend stays within its limits whatever is bought, lost and delayed (invariant 8)."""

from hypothesis import given
from hypothesis import strategies as st

from launcher.decide.budget_guard import may_buy, money_deadline_ms, must_drain, overdraft, reserved, worst_case
from launcher.ledger.billing import interval_micro_usd
from launcher.money import HOUR_MS

DOLLAR = 1_000_000
ROUNDING = 200
"""Micro-dollars: each interval is rounded once, to the nearest."""


def buy(**changes):
    facts = {
        "metered": 0,
        "reserved": 0,
        "worst_case_new": DOLLAR,
        "max_total": 10 * DOLLAR,
        "hourly_now": 2 * DOLLAR,
        "hourly_new": DOLLAR,
        "max_hourly": 3 * DOLLAR,
    }
    return may_buy(**(facts | changes))


def test_a_node_within_both_limits_is_bought():
    assert buy() is None
    assert buy(metered=8 * DOLLAR, reserved=DOLLAR) is None


def test_a_micro_dollar_over_the_limit_is_refused_with_the_numbers():
    refusal = buy(metered=8 * DOLLAR + 1, reserved=DOLLAR)
    assert refusal is not None
    assert "max_total $10.00" in refusal.text
    assert not refusal.for_good  # reserves of other nodes may be released


def test_a_refusal_by_spent_money_is_final():
    refusal = buy(metered=9 * DOLLAR + 1)
    assert refusal is not None
    assert refusal.for_good


def test_the_hourly_limit_counts_running_nodes():
    refusal = buy(hourly_now=2 * DOLLAR + 1)
    assert refusal is not None
    assert "max_hourly $3.00/h" in refusal.text
    assert buy(max_hourly=None, hourly_now=10**12) is None


def test_no_limit_refuses_nothing():
    assert buy(max_total=None, metered=10**15) is None
    assert not must_drain(metered=10**15, reserved=0, max_total=None)
    assert money_deadline_ms(now_ms=5, metered=0, max_total=None, planned_hourly=1) is None


def test_the_worst_case_cost_is_rounded_up():
    assert worst_case(1, 1) == 1
    assert worst_case(DOLLAR, HOUR_MS) == DOLLAR


def test_pending_launches_are_reserved():
    assert reserved(3_600_000, 1000, [5, 7]) == 1000 + 12


@given(rate=st.integers(0, 40 * DOLLAR), spent=st.integers(0, 20 * DOLLAR), now_ms=st.integers(0, 10**12))
def test_a_node_that_ends_itself_at_its_spend_deadline_stays_in_budget(rate, spent, now_ms):
    deadline = money_deadline_ms(now_ms=now_ms, metered=spent, max_total=20 * DOLLAR, planned_hourly=rate)
    if deadline is not None:
        assert spent + interval_micro_usd(now_ms, deadline, rate) <= 20 * DOLLAR + 1


@given(
    max_total=st.integers(100_000, 3 * DOLLAR),
    max_hourly=st.one_of(st.none(), st.integers(0, 60 * DOLLAR)),
    allowance_ms=st.integers(10_000, 600_000),
    history=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0]),  # delay of the next pass, in allowances
            st.lists(st.integers(DOLLAR, 40 * DOLLAR), max_size=3),  # rates of nodes to buy
            st.integers(0, 2),  # number of nodes preempted before the next pass
        ),
        min_size=1,
        max_size=60,
    ),
)
def test_spend_stays_within_the_limit_for_every_history(max_total, max_hourly, allowance_ms, history):
    """Each pass buys what the budget guard allows and may be late; the final stop takes its whole allowance."""
    now_ms, spent = 0, 0
    nodes: list[tuple[int, int]] = []  # (start, rate) of each node

    def metered(at_ms):
        return spent + sum(interval_micro_usd(start, at_ms, rate) for start, rate in nodes)

    for lateness, wanted, lost in history:
        hourly = sum(rate for _, rate in nodes)
        if must_drain(metered=metered(now_ms), reserved=reserved(hourly, allowance_ms), max_total=max_total):
            break
        for rate in wanted:
            refusal = may_buy(
                metered=metered(now_ms),
                reserved=reserved(hourly, allowance_ms),
                worst_case_new=worst_case(rate, allowance_ms),
                max_total=max_total,
                hourly_now=hourly,
                hourly_new=rate,
                max_hourly=max_hourly,
            )
            if refusal is None:
                nodes.append((now_ms, rate))
                hourly += rate
        assert max_hourly is None or hourly <= max_hourly
        now_ms += round(lateness * allowance_ms)
        spent += sum(interval_micro_usd(start, now_ms, rate) for start, rate in nodes[:lost])
        del nodes[:lost]
        assert metered(now_ms) <= max_total + ROUNDING
    overdrawn = overdraft(sum(rate for _, rate in nodes), allowance_ms)
    assert metered(now_ms + allowance_ms) <= max_total + overdrawn + ROUNDING
