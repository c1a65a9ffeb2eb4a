"""Bugs put in on purpose: each replay check passes on the shipped policy and fails with its bug."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.events import Market
from launcher.decide import launch_history, placing, reconcile, waiting
from launcher.decide.facts import Facts, Stage
from launcher.decide.launch_history import MoveRules
from launcher.decide.reconcile import decide
from launcher.money import HOUR_MS
from launcher.placement.price_of_waiting import CHANGE_MS
from launcher.replay.baselines import all_on_demand
from launcher.replay.replay import Policy, Replayed, replay
from launcher.replay.trace import Trace
from tests.launcher.replay.markets import TICK_MS, market, plan, work

NODES = 6


def run(capacity: list[int], deadline_hours: float, hours: float = 10.0, policy: Policy = decide) -> Replayed:
    return run_on(market({"a": capacity}), deadline_hours, hours, policy)


def run_on(trace: Trace, deadline_hours: float, hours: float, policy: Policy) -> Replayed:
    deadline_ms = round(deadline_hours * HOUR_MS)
    bought = plan("a", NODES)
    return replay(bought, MoveRules(), work(NODES, hours), trace, 0, 1, deadline_ms=deadline_ms, policy=policy)


def on_demand_hours(result: Replayed) -> float:
    """Return the node-hours of stand-ins."""
    steady = [n for n in result.nodes if n.role == "rollout" and n.market is Market.ON_DEMAND and "up" in n.happened]
    return sum((result.ms if n.ended_ms is None else n.ended_ms) - n.happened["up"] for n in steady) / HOUR_MS


def first_stand_in_ms(result: Replayed) -> int:
    return min(n.requested_ms for n in result.nodes if n.role == "rollout" and n.market is Market.ON_DEMAND)


# --- the checks ---------------------------------------------------------------------------------------------------


def stand_ins_are_given_back() -> bool:
    """Spot is gone for three hours of a tight run, then there for the rest."""
    result = run([6] * 6 + [0] * 18 + [6] * 120, 12.0)
    assert on_demand_hours(result) > 0
    return on_demand_hours(result) < NODES * 4


def a_burst_is_one_refusal() -> bool:
    """In a short outage, nodes are refused at once and stand-ins come, late as it is. Spot is asked again soon."""
    end_ms = 13 * TICK_MS
    result = run([6] * 12 + [0] + [6] * 120, 11.1)
    assert on_demand_hours(result) > 0
    again = [n.requested_ms for n in result.nodes if n.market is Market.SPOT and n.requested_ms > end_ms]
    return min(again) <= end_ms + 10 * 60_000


def a_hazard_is_learnt() -> bool:
    """Every node is preempted twice an hour: after some hours the run has seen it."""
    result = run(([6, 6, 0] * 100), 24.0)
    seen = waiting.Seen.of(facts_at_the_end(result), NODES)
    return seen.hazard_per_hour > 0.8


def waiting_ends() -> bool:
    """There is never any spot: the run buys, and costs no more than 2 % above all on demand."""
    result = run([0] * 150, 20.0)
    whole = run([0] * 150, 20.0, policy=all_on_demand).micro_usd
    return result.reached and result.micro_usd <= 1.02 * whole


def the_deadline_is_met() -> bool:
    """Spot for six of ten hours, then none: what was saved would pay for waiting, and the deadline does not."""
    result = run([6] * 36 + [0] * 100, 12.5)
    return result.reached and result.ms <= 12.5 * HOUR_MS


def the_margin_is_taken_once() -> bool:
    """In an outage the first stand-in is bought when the slack is the reserve, and not an hour before.

    Four hours of ten are done at the outage; .3 preemptions an hour at most: two changes, and two for churn.
    """
    result = run([6] * 24 + [0] * 100, 16.0)
    done_ms, begin_ms = 4 * HOUR_MS, 24 * TICK_MS
    slack_ms = 16 * HOUR_MS - (10 * HOUR_MS - done_ms) - first_stand_in_ms(result)
    assert first_stand_in_ms(result) > begin_ms
    return slack_ms < 5 * CHANGE_MS


def no_policy_knows_the_future(policy_on: Callable[[Trace], Policy] = lambda trace: decide) -> bool:
    """Two markets are alike for three hours: until their notices differ, the runs are alike."""
    alike, notice_ms = 18, 120_000
    one = market({"a": [6] * 6 + [2] * 12 + [6] * 120})
    other = market({"a": [6] * 6 + [2] * 12 + [0] * 120})
    before = alike * TICK_MS - notice_ms
    requests = [
        [
            (n.name, n.market, n.requested_ms)
            for n in run_on(trace, 14.0, 10.0, policy_on(trace)).nodes
            if n.requested_ms < before
        ]
        for trace in (one, other)
    ]
    return requests[0] == requests[1]


def facts_at_the_end(result: Replayed) -> Facts:
    return Facts(
        now_ms=result.ms, stage=Stage.RUNNING, reason="", stage_ms=0, planned_ms=0, nodes=result.nodes, metered=0
    )


CHECKS = [
    stand_ins_are_given_back,
    a_burst_is_one_refusal,
    a_hazard_is_learnt,
    waiting_ends,
    the_deadline_is_met,
    the_margin_is_taken_once,
    no_policy_knows_the_future,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_shipped_policy_passes(check):
    assert check()


# --- the bugs -----------------------------------------------------------------------------------------------------


def test_a_stand_in_that_is_never_given_back_is_found(monkeypatch):
    monkeypatch.setattr(reconcile, "nodes_to_release", lambda *_: [])
    assert not stand_ins_are_given_back()


def test_a_burst_counted_as_refusals_in_a_row_is_found(monkeypatch):
    monkeypatch.setattr(launch_history, "bursts", lambda spans, _: len(list(spans)))
    assert not a_burst_is_one_refusal()


def test_a_hazard_of_zero_that_cannot_be_unlearnt_is_found(monkeypatch):
    monkeypatch.setattr(waiting, "PRIOR_HAZARD", 0.0)
    monkeypatch.setattr(waiting, "PRIOR_HAZARD_HOURS", 1e9)
    assert not a_hazard_is_learnt()


def test_waiting_for_ever_is_found(monkeypatch):
    monkeypatch.setattr(placing, "why_stand_in", lambda *_: None)
    assert not waiting_ends()


def test_an_ignored_deadline_is_found(monkeypatch):
    monkeypatch.setattr(waiting, "is_late", lambda *_: False)
    assert not the_deadline_is_met()


def test_a_margin_taken_twice_is_found(monkeypatch):
    once = waiting.reserve_ms
    monkeypatch.setattr(waiting, "reserve_ms", lambda *of: 2 * once(*of))
    assert not the_margin_is_taken_once()


def test_reading_the_future_is_found():
    def knowing(trace: Trace) -> Policy:
        spot_returns = trace.pools[0].capacity_at(20 * TICK_MS) > 0

        def policy(facts, wanted):
            return decide(facts, wanted) if spot_returns else reconcile.decide(late(facts), wanted)

        return policy

    def late(facts):
        return replace(facts, metered=10**12)

    assert not no_policy_knows_the_future(knowing)
