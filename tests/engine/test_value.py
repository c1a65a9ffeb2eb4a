"""The expected gain of exploration, against tables worked out by hand and by Monte Carlo."""

import random
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.exploration.selection import max_variance_subset, variance
from engine.exploration.value import selection_gain, variance_gain


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


def test_the_launcher_can_import_it_cheaply():
    code = "import sys, engine.exploration.value; print(*sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "engine.exploration.value" in done.stdout.split()
    assert not {"torch", "numpy", "pydantic"} & set(done.stdout.split())
