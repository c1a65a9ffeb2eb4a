"""The kept seeds are those of largest reward variance; the control slice is a random sample of the others."""

from collections import Counter
from itertools import combinations
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.exploration.selection import (
    choose_groups,
    control_slice,
    extremes_subset,
    kept_variance,
    max_variance_subset,
    variance,
)

REWARDS = st.lists(st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(-3, 3)), min_size=1, max_size=10)


@pytest.mark.slow
@given(REWARDS, st.data())
def test_no_other_subset_has_more_variance(rewards, data):
    keep = data.draw(st.integers(1, len(rewards)))
    chosen = max_variance_subset(rewards, keep)
    assert len(set(chosen)) == keep
    assert chosen == tuple(sorted(chosen))
    best = max(variance(subset) for subset in combinations(rewards, keep))
    assert variance([rewards[index] for index in chosen]) == pytest.approx(best, rel=1e-9, abs=1e-9)


@given(REWARDS, st.data())
def test_the_rewards_chosen_do_not_depend_on_the_order_of_the_seeds(rewards, data):
    keep = data.draw(st.integers(1, len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = [rewards[index] for index in order]
    here = sorted(rewards[index] for index in max_variance_subset(rewards, keep))
    there = sorted(shuffled[index] for index in max_variance_subset(shuffled, keep))
    assert here == there


def test_binary_rewards_are_kept_half_and_half():
    assert max_variance_subset([1, 0, 1, 0, 0, 0, 1, 0], 4) == (0, 1, 2, 3)


def test_of_equal_rewards_the_lower_index_is_kept():
    assert max_variance_subset([0.5] * 6, 3) == (0, 1, 2)
    assert max_variance_subset([1.0, 0.0, 0.0, 1.0], 2) == (0, 1)


def test_a_large_common_offset_drowns_no_difference():
    assert max_variance_subset([1e8 + 1, 1e8, 1e8 + 2, 1e8 + 1], 2) == (1, 2)


def test_kept_variance_of_two_extremes():
    assert kept_variance([0.0, 0.4, 0.5, 1.0], 2) == 0.25


@pytest.mark.parametrize("keep", [0, 3])
def test_more_seeds_must_be_explored_than_are_kept(keep):
    with pytest.raises(ValueError, match=f"keep {keep} of 2"):
        max_variance_subset([0.0, 1.0], keep)


def test_a_reward_that_is_not_finite_cannot_be_ranked():
    with pytest.raises(ValueError, match="finite"):
        max_variance_subset([0.0, float("nan")], 1)


CANDIDATES = [(f"prompt {number % 4}", 1000 + number) for number in range(40)]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2**64 - 1)), unique=True, max_size=30),
    st.floats(0, 1),
    st.data(),
)
def test_a_control_slice_depends_on_run_and_batch_alone(unselected, fraction, data):
    chosen = control_slice(unselected, fraction, run_seed=1, batch=2)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(unselected)
    shuffled = data.draw(st.permutations(unselected))
    assert control_slice(shuffled, fraction, run_seed=1, batch=2) == chosen


@pytest.mark.parametrize(
    ("candidates", "fraction", "count"),
    [
        (40, 0.125, 5),
        (36, 0.125, 5),
        (35, 0.125, 4),
        (3, 0.125, 1),
        (1, 0.001, 1),
        (0, 0.5, 0),
        (40, 0, 0),
        (40, 1, 40),
    ],
)
def test_a_control_slice_is_rounded_to_nearest_and_never_empty(candidates, fraction, count):
    assert len(control_slice(CANDIDATES[:candidates], fraction, run_seed=0, batch=0)) == count


def test_every_unselected_seed_is_drawn_equally_often_and_at_every_place():
    batches = 2000
    drawn = [control_slice(CANDIDATES, 0.125, run_seed=7, batch=batch) for batch in range(batches)]
    for share, seen in [
        (5 / 40, Counter(candidate for chosen in drawn for candidate in chosen)),
        (1 / 40, Counter(chosen[0] for chosen in drawn)),
    ]:
        spread = sqrt(batches * share * (1 - share))
        assert all(abs(seen[candidate] - batches * share) < 4.5 * spread for candidate in CANDIDATES)


def test_two_seeds_are_drawn_together_as_often_as_chance_says():
    batches, share = 2000, 5 * 4 / (40 * 39)
    drawn = [control_slice(CANDIDATES, 0.125, run_seed=7, batch=batch) for batch in range(batches)]
    together = sum({CANDIDATES[0], CANDIDATES[4]} <= set(chosen) for chosen in drawn)
    assert abs(together - batches * share) < 4.5 * sqrt(batches * share)


def test_another_run_draws_other_controls():
    assert control_slice(CANDIDATES, 0.125, run_seed=0, batch=3) != control_slice(
        CANDIDATES, 0.125, run_seed=1, batch=3
    )


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_control_slice_is_a_share(fraction):
    with pytest.raises(ValueError, match="share from 0 to 1"):
        control_slice(CANDIDATES, fraction, run_seed=0, batch=0)


def test_extremes_are_as_many_best_as_worst_seeds():
    rewards = [0.0, 1.0, 0.0, 0.0, 0.1, 0.9, 0.0]
    assert extremes_subset(rewards, 4) == (0, 1, 2, 5)
    assert extremes_subset(rewards, 3) == (0, 1, 5)
    assert extremes_subset([1.0] * 5, 4) == (0, 1, 2, 3)


def test_the_rule_decides_which_explored_seeds_are_trained():
    explored = {("a", seed): float(seed == 3) for seed in range(8)} | {("a", 9): 0.5}
    chosen = {
        rule: choose_groups(["a"], explored, run_seed=0, batch=0, keep=4, rule=rule)[0].seeds
        for rule in ("variance", "extremes")
    }
    assert chosen == {"variance": (0, 1, 2, 3), "extremes": (0, 1, 3, 9)}
