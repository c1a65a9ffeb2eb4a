"""Ratios of the modelled_cost benchmark, by hand."""

from math import prod

import pytest

from tests.benchmarks.modelled_cost import (
    LAYOUTS,
    SEEDS,
    Spent,
    geometric_mean,
    interval,
    iterations_of,
    ratios,
    verdict,
    work_of,
)


def test_the_factors_multiply_to_the_ratio_of_the_dollars():
    ours = [Spent(iterations=50, hours=10, usd=100), Spent(iterations=40, hours=9, usd=80)]
    theirs = [Spent(iterations=60, hours=20, usd=150), Spent(iterations=60, hours=15, usd=130)]
    found = ratios(theirs, ours)
    parts = [found[name]["mean"] for name in ("iterations", "seconds", "rate")]
    assert prod(parts) == pytest.approx(found["cost"]["mean"])
    assert found["cost"]["mean"] == pytest.approx((1.5 * 1.625) ** 0.5)
    assert found["time"]["mean"] == pytest.approx((2 * 15 / 9) ** 0.5)


def test_an_interval_of_equal_ratios_is_a_point_and_a_wide_one_is_open():
    assert interval([2.0, 2.0, 2.0]) == pytest.approx({"mean": 2.0, "low": 2.0, "high": 2.0})
    assert verdict(interval([2.0, 2.0, 2.1])) == "cheaper"
    assert verdict(interval([0.5, 2.0, 1.0])) == "open"


def test_the_learning_is_that_of_the_algorithms_benchmark():
    plain, explored = iterations_of("diffusion-nft"), iterations_of("diffusion-nft+stale")
    assert len(plain) == len(explored) == len(SEEDS)
    assert geometric_mean([a / b for a, b in zip(plain, explored, strict=True)]) == pytest.approx(1.15, abs=0.01)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_an_iteration_without_enough_nodes_counts_less(layout):
    """60 iterations without exploration and 50 with it: alone the trainer needs 60."""
    recipe = layout.recipe()
    work = work_of(recipe, layout.spot, 60.0, 50.0)
    alone_s = recipe.prompts * recipe.images_per_prompt * recipe.rollout_gpu_seconds
    assert work.left_ms(0) == pytest.approx(60_000 * (alone_s / layout.ranks + recipe.train_seconds))
    assert list(work.iteration_ms) == sorted(work.iteration_ms, reverse=True)
    if 2 * layout.spot >= layout.ranks:  # fewer spot nodes add little to ranks that all sample
        assert work.iteration_ms[-1] < work.iteration_ms[0] * 50 / 60
