"""Properties of replays over many markets: more of anything good never makes the expected result worse."""

from random import Random
from statistics import fmean

import pytest

from launcher.decide.launch_history import MoveRules
from launcher.money import HOUR_MS
from launcher.replay.replay import Replayed, replay
from tests.launcher.replay.markets import ON_DEMAND, market, plan, work

MARKETS = 10
NOISE = 1.01
"""Two means of ten replays may differ by one percent by chance."""


def spells(seed: int) -> list[int]:
    """Return capacities of 30 h in spells of some ticks, as recordings have them."""
    random = Random(seed)
    found: list[int] = []
    while len(found) < 6 * 30:
        found += [random.choice([0, 0, 2, 4, 4])] * random.randint(1, 24)
    return found[: 6 * 30]


def results(deadline_hours: float = 16.0, spot: int = 15_000_000, max_total: int | None = None) -> list[Replayed]:
    return [
        replay(
            plan("a", 4, spot=spot, max_total=max_total),
            MoveRules(),
            work(4),
            market({"a": spells(seed)}),
            0,
            seed,
            deadline_ms=round(deadline_hours * HOUR_MS),
        )
        for seed in range(MARKETS)
    ]


def mean_dollars(found: list[Replayed]) -> float:
    return fmean(result.micro_usd for result in found)


@pytest.mark.slow
def test_more_time_never_makes_the_expected_cost_higher():
    costs = [mean_dollars(results(deadline_hours=hours)) for hours in (12.5, 16.0, 22.0)]
    assert costs[1] <= NOISE * costs[0]
    assert costs[2] <= NOISE * costs[1]


@pytest.mark.slow
def test_a_cheaper_zone_never_makes_the_expected_cost_higher():
    cheap, dear = (mean_dollars(results(spot=price)) for price in (8_000_000, 30_000_000))
    assert cheap <= dear


@pytest.mark.slow
def test_more_budget_never_ends_fewer_runs():
    whole = 10 * 5 * ON_DEMAND
    reached = [sum(r.reached for r in results(max_total=whole * percent // 100)) for percent in (40, 80, 120)]
    assert reached == sorted(reached)
    assert reached[-1] == MARKETS


@pytest.mark.slow
def test_every_run_with_a_quarter_more_time_is_in_time():
    """On demand can always be had: 0 misses at 1.25 x ideal."""
    assert all(result.reached for result in results(deadline_hours=12.5))
