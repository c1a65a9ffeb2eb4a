"""Figures of the exploration benchmark, checked by hand, and its control that switches exploration off."""

import math
from dataclasses import replace

import pytest

from engine.exploration.ranking import LEAST_CONTROLS
from tests.benchmarks.arms import Cell, Settings
from tests.benchmarks.exploration import controls_of_a_batch, exact_at, new_seeds_alone, ratio_interval
from tests.benchmarks.record_rewards import REWARDS, read_rewards
from tests.benchmarks.switch_off import KEPT_SHARE, watched

CELL = Cell(
    arm="plain-wide",
    seed=6,
    curve={0: 0.4, 6: 0.6, 12: 0.9},
    wall_seconds=[1.0, 2.0, 2.0],
    training_seconds=[1.0, 1.0, 1.0],
    cpu_seconds={"trainer": 1.0},
    stall_seconds=[0.0, 0.0],
    exploration_inside=None,
    ranking={},
    explored=[0, 0, 0],
    manifests={},
    load1=0.0,
)


@pytest.mark.parametrize(("iterations", "exact"), [(0, 0.4), (6, 0.6), (9, 0.75), (10, 0.8), (12, 0.9)])
def test_exact_match_is_interpolated_between_two_evaluations(iterations, exact):
    assert exact_at(CELL, iterations) == pytest.approx(exact)


def test_added_seeds_are_reported_without_the_first_seeds():
    def cells(*exact):
        return {seed: replace(CELL, seed=seed, curve={0: 0.4, 18: value}) for seed, value in enumerate(exact, 11)}

    more = {"plain-6x8": cells(0.6, 0.7), "plain-12x4": cells(0.9, 0.9), "stale": cells(0.8, 0.8)}
    found = new_seeds_alone(more, "plain-6x8")
    assert found["seeds"] == [11, 12]
    assert found["plain"] == "plain-6x8"  # chosen by the first seeds, although another arm is better on these
    assert found["paired_difference"]["mean"] == pytest.approx(0.15)
    assert new_seeds_alone({name: {} for name in more}, "plain-6x8") is None


def test_a_ratio_has_a_confidence_interval():
    found = ratio_interval([1.0, 2.0, 4.0])
    assert found["mean"] == pytest.approx(2.0)
    reach = 4.302653 * math.log(2) / math.sqrt(3)  # Student's quantile with 2 degrees of freedom
    assert found["low"] == pytest.approx(2 * math.exp(-reach), rel=1e-5)
    assert found["high"] == pytest.approx(2 * math.exp(reach), rel=1e-5)


def test_a_batch_has_enough_controls_for_a_verdict():
    assert controls_of_a_batch() == LEAST_CONTROLS


@pytest.mark.parametrize(
    ("kind", "controls", "stops"), [("noise", 3, True), ("noise", 2, False), ("ranking", 3, False)]
)
def test_exploration_stops_when_three_controls_show_a_ranking_of_noise(kind, controls, stops):
    rewards = read_rewards(REWARDS / "digits-ocr.csv")["graded"]
    run = watched(rewards, controls=controls, kept_share=KEPT_SHARE[kind], seed=0, settings=Settings())
    assert (run.stopped_after is not None) is stops
