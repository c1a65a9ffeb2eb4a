"""Replays: hand-checked dollars, the same bytes for the same seed, and a lower bound that no policy goes below."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import Market
from launcher.decide.actions import Buy
from launcher.decide.launch_history import MoveRules, Tried
from launcher.decide.reconcile import decide
from launcher.market.hazard import COLD_START_MS
from launcher.money import HOUR_MS
from launcher.placement.options import SiteOptions
from launcher.replay.baselines import BASELINES
from launcher.replay.optimum import hull, optimum
from launcher.replay.replay import Replayed, replay
from launcher.replay.trace import Trace
from tests.launcher.replay.markets import ON_DEMAND, SPOT, market, option, plan, work

POLICIES = {"shipped": decide, **BASELINES}
ALWAYS = [4] * 6 * 40
DAY_MS = 24 * HOUR_MS


def run(trace: Trace, zones: str = "a", nodes: int = 2, policy=decide, seed: int = 1, **more) -> Replayed:
    deadline_ms = more.pop("deadline_ms", None)
    return replay(
        plan(zones, nodes, **more), MoveRules(), work(nodes), trace, 0, seed, deadline_ms=deadline_ms, policy=policy
    )


def side(site: SiteOptions, index: int) -> int:
    return site.rollout[index].placement.side_micro_usd_per_hour


def test_a_calm_market_costs_the_work_and_one_start():
    result = run(market({"a": ALWAYS}))
    assert result.reached
    assert (result.preemptions, result.refusals) == (0, 0)
    hours = result.ms / HOUR_MS
    assert 10 < hours < 10 + (COLD_START_MS * 2 + 360_000) / HOUR_MS
    site = plan("a", 2).sites[0]
    full = ON_DEMAND + side(site, 1) + 2 * (SPOT + side(site, 0))
    assert result.micro_usd == pytest.approx(full * hours, rel=0.03)
    assert result.micro_usd < full * hours
    assert result.by_market.keys() == {"trainer", "spot"}


def test_all_on_demand_buys_no_spot():
    result = run(market({"a": ALWAYS}), policy=BASELINES["all-on-demand"])
    assert result.by_market.keys() == {"trainer", "on_demand"}
    assert result.reached


@pytest.mark.parametrize("policy", POLICIES)
def test_a_market_without_spot_is_survived_on_demand(policy):
    result = run(market({"a": [0] * 6 * 40}), policy=POLICIES[policy], deadline_ms=20 * HOUR_MS)
    assert result.reached == (policy != "spot-only")
    assert "spot" not in result.by_market


def test_capacity_that_falls_preempts_nodes_and_the_work_goes_on():
    capacity = [2] * 12 + [0] * 3 + [2] * 6 * 30
    result = run(market({"a": capacity}))
    assert result.preemptions == 2
    assert result.refusals > 0
    assert result.reached


def test_the_same_trace_and_seed_give_the_same_bytes():
    trace = market({"a": [3, 3, 3, 1, 1, 1] * 40, "b": [0, 2, 2, 2, 2] * 48})
    first, second = (run(trace, "ab", 3, seed=5) for _ in range(2))
    assert first == second
    assert run(trace, "ab", 3, seed=6) != first


def test_a_hull_is_concave_and_above_its_points():
    rates = [0.0, 1.0, 1.5, 3.0, 3.0]
    lines = hull(rates)
    for n, rate in enumerate(rates):
        assert min(a + b * n for a, b in lines) >= rate - 1e-9
    assert list(dict.fromkeys(lines)) == [(0.0, 1.0), (3.0, 0.0)]


def test_the_optimum_of_a_calm_market_is_the_work_at_spot_prices():
    nodes = 2
    bought = plan("a", nodes)
    found = optimum(bought.sites, nodes, work(nodes), market({"a": ALWAYS}), 0, 15 * HOUR_MS).micro_usd
    site = bought.sites[0]
    hourly = ON_DEMAND + side(site, 1) + nodes * (SPOT + side(site, 0))
    assert found == pytest.approx(10 * hourly, rel=0.02)


def test_a_deadline_below_the_work_has_no_optimum():
    assert optimum(plan("a", 2).sites, 2, work(2), market({"a": ALWAYS}), 0, 9 * HOUR_MS).micro_usd is None


spells = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=8, max_size=20)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(first=spells, second=spells, seed=st.integers(0, 9))
def test_no_policy_is_cheaper_than_the_optimum(first, second, seed):
    """Each policy that is done by the deadline pays at least the bound of that deadline."""
    zones = {
        zone: ([n for n, times in found for _ in range(times)] * 20)[: 6 * 30]
        for zone, found in (("a", first), ("b", second))
    }
    trace, deadline_ms = market(zones), 16 * HOUR_MS
    bound = optimum(plan("ab", 3).sites, 3, work(3), trace, 0, deadline_ms).micro_usd
    for policy in POLICIES.values():
        result = run(trace, "ab", 3, policy, seed, deadline_ms=deadline_ms)
        if result.reached and result.ms <= deadline_ms:
            assert result.micro_usd >= bound


@pytest.mark.parametrize(("deadline_hours", "takes_dear_spot"), [(40, False), (11.2, True)])
def test_spot_that_costs_as_much_as_on_demand_is_a_stand_in(deadline_hours, takes_dear_spot):
    """Zone a has outages of an hour; zone b always has spot, for $52 an hour instead of $15. The trainer costs $3."""
    trace = market({"a": ([9] * 12 + [0] * 6) * 20, "b": [9] * 360})
    bought, dear = plan("a", 2), option("b", Market.SPOT, 52_000_000)
    (site,), small = bought.sites, option("", Market.ON_DEMAND, 3_000_000)
    slots = (replace(bought.slots[0], placement=small.placement), *bought.slots[1:])
    site = replace(site, trainer=(small,), rollout=(*site.rollout, dear))
    bought = replace(bought, slots=slots, sites=(site,))
    result = replay(bought, MoveRules(), work(2), trace, 0, 1, deadline_ms=round(deadline_hours * HOUR_MS))
    assert result.reached
    assert any(node.zone == dear.placement.zone for node in result.nodes) == takes_dear_spot


def reasons(trace: Trace, deadline_hours: float | None, hours: float = 10.0) -> list[str]:
    """Return why each stand-in of a replay was bought."""
    found: list[str] = []

    def policy(facts, wanted):
        actions = decide(facts, wanted)
        found.extend(action.stand_in for action in actions if isinstance(action, Buy))
        return actions

    deadline_ms = None if deadline_hours is None else round(deadline_hours * HOUR_MS)
    replay(plan("a", 2), MoveRules(), work(2, hours), trace, 0, 1, deadline_ms=deadline_ms, policy=policy)
    return [why for why in found if why]


def test_each_stand_in_says_why_it_was_bought():
    no_spot = market({"a": [0] * 6 * 40})
    assert reasons(market({"a": ALWAYS}), 40.0) == []
    (late, *_) = reasons(no_spot, 10.6)
    assert late == "behind: with every node at work the run would be 34m early, and preemptions may take 1h"
    assert reasons(no_spot, None)[0].startswith("the money for waiting is used up")
    assert reasons(market({"a": [2] * 36 + [0] * 204}), None)[0].startswith("no spot for 1h 20m: waiting costs more")


def test_dear_spot_goes_when_a_cheap_zone_is_back():
    """Zone a has no spot from hour 2 to 5. Zone b always has, for $52: its nodes leave within an hour of the return."""
    trace = market({"a": [9] * 12 + [0] * 18 + [9] * 200, "b": [9] * 230})
    bought, dear = plan("a", 2), option("b", Market.SPOT, 52_000_000)
    (site,) = bought.sites
    bought = replace(bought, sites=(replace(site, rollout=(*site.rollout, dear)),))
    result = replay(bought, MoveRules(), work(2), trace, 0, 1, deadline_ms=round(11.2 * HOUR_MS))
    there = [node for node in result.nodes if node.zone == dear.placement.zone and "up" in node.happened]
    assert there
    assert result.reached
    for node in there:
        assert "released" in node.happened
        assert 5 * HOUR_MS <= node.happened["releasing"] <= 6 * HOUR_MS
    assert result.ms <= 11.2 * HOUR_MS


def test_a_zone_with_long_outages_is_learnt_though_the_plan_prefers_it(monkeypatch):
    """Zone a, the planned one, is up for 20 minutes of 200; b and c are out for 20 minutes of 200, in turn."""
    a, b = [1, 1, *[0] * 18], [*[1] * 18, 0, 0]
    c = b[10:] + b[:10]
    trace = market({"a": a * 12, "b": b * 12, "c": c * 12})

    def at_work() -> Replayed:
        return replay(plan("abc", 1), MoveRules(on_demand=False), work(1, 25.0), trace, 0, 1)

    learnt = at_work()
    monkeypatch.setattr(Tried, "outage_hours", lambda self, option: 1.1)
    ignored = at_work()
    assert learnt.share_at_work > ignored.share_at_work
    assert learnt.refusals < ignored.refusals
    assert learnt.micro_usd < ignored.micro_usd
