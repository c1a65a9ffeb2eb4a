"""The bandit over exploration profiles finds the best one, follows changes, and is reproducible."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.exploration.profiles import Profile, ProfileBandit, visit_value


def profiles(names: str) -> list[Profile]:
    return [Profile(name=name, dtype="bfloat16", shape=48, steps=8, scorer="reward") for name in names]


EARLY = {"a": 0.4e-3, "b": 0.6e-3, "c": 1.0e-3, "d": 0.7e-3}
LATE = {"a": 1.0e-3, "b": 0.6e-3, "c": 0.4e-3, "d": 0.7e-3}
NOISE = 0.2e-3


def choices(seed: int, *, delay: int) -> list[str]:
    """Return the choices over 60 batches of EARLY and 60 of LATE; each is measured `delay` batches later."""
    bandit, draw = ProfileBandit(profiles("abcd"), run_seed=seed), random.Random(seed + 10**6)
    visits: list[tuple[str, float]] = []
    for batch in range(120):
        name = bandit.choose(batch).name
        visits.append((name, draw.gauss((EARLY if batch < 60 else LATE)[name], NOISE)))
        if batch >= delay:
            bandit.record(*visits[batch - delay])
    return [name for name, _ in visits]


@pytest.mark.parametrize("delay", [0, 2])
def test_the_best_of_four_is_found_in_20_batches_and_a_change_is_followed_in_20(delay):
    runs = [choices(seed, delay=delay) for seed in range(100)]

    def share(name: str, first: int, last: int) -> float:
        return sum(run[first:last].count(name) for run in runs) / (len(runs) * (last - first))

    assert share("c", 20, 60) > 0.7
    assert share("a", 80, 120) > 0.7
    assert share("a", 20, 60) < 0.1


def test_untried_profiles_come_first_and_in_order():
    bandit = ProfileBandit(profiles("abc"), run_seed=0)
    found = []
    for batch in range(3):
        found.append(bandit.choose(batch).name)
        bandit.record(found[-1], 5.0 - batch)
    assert found == ["a", "b", "c"]


def test_a_profile_that_was_never_measured_is_tried_again():
    bandit = ProfileBandit(profiles("abc"), run_seed=0)
    assert [bandit.choose(batch).name for batch in range(5)] == ["a", "b", "c", "a", "b"]
    bandit.record("a", 1.0)
    bandit.record("b", 1.0)
    assert bandit.choose(5).name == "c"


def test_asking_again_for_a_batch_returns_the_same_profile():
    bandit = ProfileBandit(profiles("abc"), run_seed=0)
    assert bandit.choose(0) == bandit.choose(0)
    assert bandit.choose(1).name == "b"


def test_without_any_gain_all_profiles_are_tried():
    bandit = ProfileBandit(profiles("abc"), run_seed=0)
    for batch in range(12):
        bandit.record(bandit.choose(batch).name, 0.0)
    assert {bandit.choose(batch).name for batch in range(12, 15)} == {"a", "b", "c"}


def test_the_unit_of_the_values_changes_no_choice():
    def run(unit: float) -> list[str]:
        bandit, draw = ProfileBandit(profiles("abc"), run_seed=3), random.Random(0)
        found = []
        for batch in range(60):
            found.append(bandit.choose(batch).name)
            bandit.record(found[-1], unit * draw.gauss({"a": 1.0, "b": 1.1, "c": 0.9}[found[-1]], 0.2))
        return found

    assert run(1.0) == run(2.0**-20)


@given(st.integers(0, 2**32), st.lists(st.floats(0, 1), min_size=1, max_size=25), st.integers(0, 25))
def test_a_restored_bandit_makes_the_same_choices(run_seed, values, stop):
    whole = ProfileBandit(profiles("abc"), run_seed=run_seed)
    resumed = ProfileBandit(profiles("abc"), run_seed=run_seed)
    for batch, value in enumerate(values):
        if batch == stop:
            state = json.loads(json.dumps(resumed.to_dict()))
            resumed = ProfileBandit.from_dict(state, profiles("abc"), run_seed=run_seed)
        name = whole.choose(batch).name
        assert resumed.choose(batch).name == name
        whole.record(name, value)
        resumed.record(name, value)
    assert resumed.to_dict() == whole.to_dict()


def test_a_state_of_other_profiles_is_refused():
    state = ProfileBandit(profiles("ab"), run_seed=0).to_dict()
    with pytest.raises(ValueError, match="of the exploration profiles a, b, the job has a, c"):
        ProfileBandit.from_dict(state, profiles("ac"), run_seed=0)


def test_another_run_seed_gives_other_choices():
    def run(run_seed: int) -> list[str]:
        bandit = ProfileBandit(profiles("ab"), run_seed=run_seed)
        found = []
        for batch in range(30):
            found.append(bandit.choose(batch).name)
            bandit.record(found[-1], 1.0)
        return found

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_a_single_profile_is_always_chosen():
    bandit = ProfileBandit(profiles("a"), run_seed=0)
    for batch in range(5):
        assert bandit.choose(batch).name == "a"
        bandit.record("a", float(batch))


@pytest.mark.parametrize(
    ("names", "message"), [("", "0 exploration"), ("abcdefg", "7 exploration"), ("aba", "twice: a")]
)
def test_bad_profiles_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        ProfileBandit(profiles(names), run_seed=0)


@pytest.mark.parametrize("discount", [0.0, 1.1])
def test_a_discount_is_between_0_and_1(discount):
    with pytest.raises(ValueError, match=f"discount is {discount}"):
        ProfileBandit(profiles("a"), run_seed=0, discount=discount)


def test_unmeasured_values_are_not_recorded():
    bandit = ProfileBandit(profiles("ab"), run_seed=0)
    with pytest.raises(ValueError, match="has the value nan"):
        bandit.record("a", float("nan"))
    with pytest.raises(ValueError, match="no exploration profile 'c'"):
        bandit.record("c", 1.0)
    with pytest.raises(ValueError, match="took 0"):
        visit_value(1.5, 0.0)
    assert visit_value(1.5, 250.0) == pytest.approx(0.002)
