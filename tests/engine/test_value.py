"""The expected gain of exploration, against tables worked out by hand and by Monte Carlo."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.exploration.selection import max_variance_subset, variance
from engine.exploration.value import (
    ASSUMED_RHO,
    IterationCost,
    candidates_that_fit,
    expected_exploration,
    iteration_seconds,
    relative_cost,
    selection_gain,
    spot_pays,
    variance_gain,
)

FOUR_GPUS = IterationCost(
    prompts=32,
    images_per_prompt=16,
    reserved_gpus=4,
    rollout_gpu_seconds=107 * 4 / 512,
    candidate_gpu_seconds=107 * 4 / 512,
    train_seconds=253.0,
)
"""512 images in 107 s on 4 GPUs, and 253 s of other work, as verl-omni published it."""


@pytest.mark.parametrize(
    ("tried", "kept", "selection", "gains"),
    [
        (32, 16, 1.86, (1.69, 1.42, 1.21, 1.08)),
        (24, 8, 2.45, (2.17, 1.71, 1.36, 1.13)),
        (96, 24, 2.89, (2.53, 1.93, 1.47, 1.17)),
        (128, 16, 4.02, (3.45, 2.48, 1.75, 1.27)),
    ],
)
def test_gains_equal_those_of_the_table(tried, kept, selection, gains):
    gain = selection_gain(kept / tried)
    assert gain == pytest.approx(selection, abs=0.005)
    found = [variance_gain(rho, gain) for rho in (0.9, 0.7, 0.5, 0.3)]
    assert found == pytest.approx(gains, abs=0.0051)


def test_normal_rewards_gain_what_the_formula_predicts():
    draw = random.Random(3)
    ratios = []
    for _ in range(60):
        stale = [draw.gauss(0, 1) for _ in range(400)]
        kept = [stale[index] for index in max_variance_subset(stale, 100)]
        ratios.append(variance(kept) / variance(stale))
    assert mean(ratios) == pytest.approx(selection_gain(0.25), rel=0.03)


@given(st.floats(1e-9, 1), st.floats(1e-9, 1))
def test_keeping_fewer_seeds_gains_more(one, other):
    assert selection_gain(min(one, other)) >= selection_gain(max(one, other)) * (1 - 1e-9)
    assert selection_gain(one) >= 1


@given(st.floats(-1, 1), st.floats(1, 10))
def test_a_ranking_gains_at_most_what_selection_does(rho, selection):
    assert 1 <= variance_gain(rho, selection) <= selection


@pytest.mark.parametrize("kept_share", [1.0, 1.5, float("inf")])
def test_keeping_all_gains_nothing(kept_share):
    assert selection_gain(kept_share) == 1


@pytest.mark.parametrize("kept_share", [0.0, -0.5, float("nan")])
def test_keeping_none_is_refused(kept_share):
    with pytest.raises(ValueError, match="keep more than none"):
        selection_gain(kept_share)


@pytest.mark.parametrize(
    ("spot", "seconds", "idle", "candidates", "at_69", "at_77"),
    [
        (4, 306, 0.83, 1_211, 1.12, 1.05),
        (8, 289, 0.88, 2_421, 1.30, 1.17),
        (12, 280, 0.90, 3_632, 1.50, 1.31),
    ],
)
def test_spot_beside_four_gpus_equals_the_table(spot, seconds, idle, candidates, at_69, at_77):
    assert iteration_seconds(FOUR_GPUS, spot) == pytest.approx(seconds, abs=0.8)
    assert candidates_that_fit(FOUR_GPUS, spot) == pytest.approx(candidates, abs=1)
    assert relative_cost(FOUR_GPUS, spot, 0.69) == pytest.approx(at_69, abs=0.006)
    assert relative_cost(FOUR_GPUS, spot, 0.77) == pytest.approx(at_77, abs=0.006)
    expected = expected_exploration(FOUR_GPUS, spot, 0.69)
    assert expected.spot_idle_share == pytest.approx(idle, abs=0.005)
    assert expected.candidates_per_prompt == pytest.approx(candidates / 32, abs=1)


def test_an_expectation_names_its_assumption():
    expected = expected_exploration(FOUR_GPUS, 8, 0.69)
    assert (expected.rho, expected.basis) == (ASSUMED_RHO, "assumed")
    assert expected.candidates_per_prompt == 75
    assert expected.selection_gain == pytest.approx(selection_gain(16 / 75))
    assert expected.variance_gain == pytest.approx(1 + 0.49 * (expected.selection_gain - 1))
    assert expected.pays_below == pytest.approx(1 / 1.30, abs=0.005)
    measured = expected_exploration(FOUR_GPUS, 8, 0.69, rho=0.9, basis="measured")
    assert measured.basis == "measured"
    assert measured.variance_gain > expected.variance_gain


@pytest.mark.parametrize(
    "cost",
    [
        replace(FOUR_GPUS, candidate_gpu_seconds=2.0),
        replace(FOUR_GPUS, guard_seconds=150.0),
        replace(FOUR_GPUS, sync_seconds=300.0),
        replace(FOUR_GPUS, max_candidates=512),
    ],
)
def test_no_gain_if_no_more_candidates_fit_than_are_trained(cost):
    expected = expected_exploration(cost, 4, 0.69)
    assert expected.candidates_per_prompt == 0
    assert (expected.selection_gain, expected.variance_gain) == (1, 1)
    assert expected.relative_cost > 1


def test_without_spot_the_expected_gain_is_1():
    expected = expected_exploration(replace(FOUR_GPUS, sync_seconds=5.0), 0, 0.69)
    assert (expected.candidates_per_prompt, expected.spot_idle_share) == (0, None)
    assert (expected.variance_gain, expected.relative_cost) == (1, 1)


def test_new_weights_are_waited_for_only_with_spot():
    slow = replace(FOUR_GPUS, sync_seconds=5.0)
    assert iteration_seconds(slow, 0) == pytest.approx(107 + 253)
    assert iteration_seconds(slow, 4) == pytest.approx(107 / 2 + 253 + 5)
    assert candidates_that_fit(slow, 4) < candidates_that_fit(FOUR_GPUS, 4)


def test_spot_pays_if_enough_iterations_are_saved():
    assert spot_pays(0.7, 1.3)
    assert not spot_pays(0.8, 1.3)


def test_the_launcher_can_import_it_cheaply():
    code = "import sys, engine.exploration.value; print(*sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "engine.exploration.value" in done.stdout.split()
    assert not {"torch", "numpy", "pydantic"} & set(done.stdout.split())
