"""The kept seeds are those of largest reward variance."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.exploration.selection import kept_variance, max_variance_subset, variance

REWARDS = st.lists(st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(-3, 3)), min_size=1, max_size=10)


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
