"""Spells of capacity: shares of time, chances elsewhere, and markets made by them, against the closed form."""

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.decide.launch_history import MoveRules
from launcher.market.hazard import POOLED, STEADY, HazardCurve
from launcher.market.spells import TIE, Spells, chance_elsewhere, share_all_out
from launcher.money import HOUR_MS
from launcher.placement.value import NodeTerms, useful_share
from launcher.replay.generator import describe, generate
from launcher.replay.replay import replay
from launcher.replay.trace import Trace
from tests.launcher.replay.markets import plan, work, zones

ONE_AN_HOUR = HazardCurve(per_hour=(1.0,) * 8)


def test_the_lengths_of_spells_give_the_share_of_time_with_capacity():
    spells = Spells(hazards=ONE_AN_HOUR, uptime=0.25)
    assert (spells.up_hours, spells.out_hours) == pytest.approx((1.0, 3.0))
    assert spells.out_median_hours < spells.out_hours


def test_regions_are_out_less_often_than_their_zones_and_more_often_than_by_chance():
    assert share_all_out([0.5]) == pytest.approx(0.5)
    assert share_all_out([0.5, 0.5]) == pytest.approx(0.5 * (TIE + (1 - TIE) / 2) ** 2 + 0.5 * ((1 - TIE) / 2) ** 2)
    assert share_all_out([0.5, 0.5], tie=0.0) == pytest.approx(0.25)
    assert share_all_out([0.5, 0.5], tie=1.0) == pytest.approx(0.5)
    assert chance_elsewhere(0.5, []) == 0
    assert chance_elsewhere(0.0, [0.5]) == 0


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6))
def test_another_zone_never_makes_an_outage_of_all_likelier(outs):
    assert share_all_out([*outs, 0.5]) <= share_all_out(outs) + 1e-9
    assert 0 <= chance_elsewhere(outs[0], outs[1:]) <= 1


def share(trace: Trace, number: int) -> float:
    return replace(trace, pools=trace.pools[number : number + 1]).share_with_capacity()


def test_a_generated_market_is_its_seed_and_has_the_shares_of_its_spells():
    there = zones("ab", uptime=0.4)
    made = [generate(there, 200, 3, seed) for seed in range(40)]
    assert made[0] == generate(there, 200, 3, 0) != made[1]
    for number in (0, 1):
        assert fmean(share(trace, number) for trace in made) == pytest.approx(0.4, abs=0.06)
    for trace in made:
        for pool in trace.pools:
            assert list(pool.t_ms) == sorted(set(pool.t_ms))
            assert pool.t_ms[0] == 0
            assert set(pool.capacity) <= {0, 3}
    alike = [trace for trace in made if trace.pools[0].t_ms == trace.pools[1].t_ms]
    assert len(alike) / 40 == pytest.approx(TIE**2, abs=0.15)


def test_a_zone_that_is_always_up_is_one_spell():
    (pool,) = generate(zones("a", uptime=1.0, hazards=STEADY), 50, 2, 1).pools
    assert (pool.t_ms, pool.capacity) == ((0,), (2,))


def test_the_rule_of_a_market_is_printed():
    text = describe([*zones("a", uptime=0.4, hazards=ONE_AN_HOUR), *zones("b", uptime=0.5, hazards=ONE_AN_HOUR)])
    assert text == (
        "zones have capacity for 40 to 50 % of the time, for 1 h by their hazards, then none for 1 to 1.5 h on average "
        "(log-normal, sigma 1.55)"
    )


@pytest.mark.long
@pytest.mark.parametrize(("names", "uptime", "factor"), [("a", 0.4, 1.65), ("abc", 0.4, 1.65), ("ab", 0.64, 1.0)])
def test_the_closed_form_agrees_with_replays_of_its_own_markets(names, uptime, factor):
    """The share of time at work of a slot, over 30 starts of the live decisions, without stand-ins."""
    hazards = POOLED.curve.scaled(factor)
    there = zones(names, uptime=uptime, hazards=hazards)
    out = 1 - uptime
    terms = NodeTerms(
        micro_usd_per_hour=1,
        hazards=hazards,
        launch_odds=uptime,
        cold_start_hours=8 / 60,
        horizon_hours=24.0,
        lost_work_hours=0.0,
        first_hour_free=False,
        elsewhere=chance_elsewhere(out, [out] * (len(names) - 1)),
    )
    bought, rules = plan(names, 1), MoveRules(on_demand=False)
    shares = []
    for seed in range(30):
        trace = generate(there, 40, 1, seed)
        shares.append(replay(bought, rules, work(1, 1e6), trace, 0, seed, longest_ms=40 * HOUR_MS).share_at_work)
    assert fmean(shares) == pytest.approx(useful_share(terms), abs=0.08)
