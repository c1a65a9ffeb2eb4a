"""The exploration planner: it issues each candidate once, where kept variance grows most, within the idle time."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.exploration.budget import FIRST_CANDIDATES_PER_GPU, PHASES, candidates_that_fit, seconds_until_trained
from engine.exploration.planner import Planner, _ends, _kept_graded
from engine.exploration.selection import kept_variance

POLICIES = ["uniform", "greedy", "ucb", "bayes"]
INFORMED = ["greedy", "ucb", "bayes"]
REWARD = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf]))
STRICT_REWARD = st.sampled_from([0.0, 1.0])
ALL = 10**6
"""More candidates than any planner here has."""


def planner(prompts=3, **other):
    return Planner([f"p{i}" for i in range(prompts)], **{"keep": 4, "most": 16, "chunk": 2} | other)


def report(planner, issued, reward):
    for prompt, index in issued:
        planner.tell(prompt, index, reward(prompt, index))


def planner_with(rewards, **other):
    """Return a planner that issued the first seeds of each prompt and got these rewards."""
    one = Planner(list(rewards), **{"keep": 4, "most": 32, "chunk": 2} | other)
    for prompt, found in rewards.items():
        for index, reward in enumerate(found):
            one.took(prompt, index)
            one.tell(prompt, index, reward)
    return one


def counts(issued):
    return {prompt: [one for one, _ in issued].count(prompt) for prompt, _ in issued}


# --- every policy and every reward


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(POLICIES),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 9),
    st.integers(1, 5),
    st.one_of(st.lists(REWARD, min_size=1), st.lists(STRICT_REWARD, min_size=1)),
    st.lists(st.integers(1, 12), max_size=12),
    st.randoms(use_true_random=False),
)
def test_every_candidate_is_issued_once(policy, prompts, keep, more, chunk, rewards, counts_asked, order):
    one = planner(prompts, policy=policy, keep=keep, most=keep + more, chunk=chunk)
    all_issued, pending = [], []
    for count in [*counts_asked, ALL]:
        issued = one.ask(count)
        assert len(issued) == min(count, prompts * (keep + more) - len(all_issued))
        all_issued += issued
        pending += issued
        order.shuffle(pending)
        for prompt, index in pending[: len(pending) // 2]:
            one.tell(prompt, index, order.choice(rewards))
        pending = pending[len(pending) // 2 :]
    assert len(set(all_issued)) == len(all_issued)
    for prompt in {prompt for prompt, _ in all_issued}:
        assert [index for name, index in all_issued if name == prompt] == list(range(keep + more))


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(POLICIES),
    st.one_of(st.lists(REWARD, min_size=60, max_size=60), st.lists(STRICT_REWARD, min_size=60, max_size=60)),
    st.lists(st.integers(1, 9), max_size=6),
    st.randoms(use_true_random=False),
)
def test_the_next_candidates_do_not_depend_on_the_order_of_results(policy, rewards, counts_asked, order):
    """A planner with another order of results, or in another process, issues the same candidates."""
    here = planner(policy=policy, seed=3)
    all_issued = []
    for count in counts_asked:
        all_issued += here.ask(count)
    known = order.sample(all_issued, len(all_issued) // 2)
    for number, (prompt, index) in enumerate(sorted(known)):
        here.tell(prompt, index, rewards[number])
    there = planner(policy=policy, seed=3)
    for candidate in order.sample(all_issued, len(all_issued)):
        there.took(*candidate)
    by_number = list(enumerate(sorted(known)))
    for number, (prompt, index) in order.sample(by_number, len(by_number)):
        there.tell(prompt, index, rewards[number])
    assert here.ask(7) == there.ask(7)
    assert here.beliefs() == there.beliefs()
    assert here.ask(ALL) == there.ask(ALL)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_prompt_first_gets_the_kept_number_of_candidates_in_turns(policy):
    one = planner(policy=policy)
    assert one.ask(4) == (("p0", 0), ("p1", 0), ("p2", 0), ("p0", 1))
    assert counts(one.ask(8)) == {"p0": 2, "p1": 3, "p2": 3}


def test_the_uniform_policy_continues_in_turns():
    one = planner(policy="uniform")
    report(one, one.ask(12), lambda prompt, index: float(prompt == "p1" and index))
    assert one.ask(4) == (("p0", 4), ("p1", 4), ("p2", 4), ("p0", 5))


@pytest.mark.parametrize("policy", INFORMED)
def test_a_chunk_goes_to_one_prompt(policy):
    one = planner_with({"full": [0, 1] * 4, "lacks": [0] * 7 + [1], "lacks too": [0] * 7 + [1]}, policy=policy, chunk=3)
    assert one.ask(5) == (*(("lacks", index) for index in (8, 9, 10)), ("lacks too", 8), ("lacks too", 9))


@pytest.mark.parametrize("policy", POLICIES)
def test_without_results_the_budget_is_spread_evenly(policy):
    assert counts(planner(policy=policy).ask(24)) == {"p0": 8, "p1": 8, "p2": 8}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reward", [0.0, 0.7, math.nan])
def test_equal_prompts_get_equal_shares(policy, reward):
    one = planner(policy=policy)
    report(one, one.ask(12), lambda prompt, index: reward)
    assert counts(one.ask(12)) == {"p0": 4, "p1": 4, "p2": 4}


def test_a_candidate_skipped_by_an_earlier_process_is_issued():
    one = planner(policy="uniform")
    for candidate in [("p0", 1), ("p1", 0), ("p1", 1), ("p2", 0), ("p2", 1)]:
        one.took(*candidate)
    assert one.ask(1) == (("p0", 0),)


# --- strict rewards


@pytest.mark.parametrize("policy", INFORMED)
def test_a_saturated_prompt_gets_no_more(policy):
    one = planner_with({"full": [1, 0, 1, 0, 1, 0], "lacks": [0, 0, 0, 0, 0, 1]}, policy=policy)
    assert counts(one.ask(10)) == {"lacks": 10}


@pytest.mark.parametrize("policy", ["ucb", "bayes"])
def test_a_prompt_that_lacks_a_class_is_tried_although_it_never_showed_it(policy):
    one = planner_with({"full": [1, 0, 1, 0, 1, 0], "only ones": [1] * 6}, policy=policy)
    assert counts(one.ask(10)) == {"only ones": 10}


def test_greedy_expects_nothing_of_an_unseen_class():
    one = planner_with({"full": [1, 0, 1, 0, 1, 0], "only ones": [1] * 6}, policy="greedy")
    assert counts(one.ask(8)) == {"full": 4, "only ones": 4}


@pytest.mark.parametrize("policy", ["ucb", "bayes"])
def test_a_hopeless_prompt_is_left_for_one_with_hope(policy):
    one = planner_with({"hopeless": [0] * 24, "young": [0] * 6, "full": [0, 1] * 6}, policy=policy)
    issued = counts(one.ask(8))
    assert issued["young"] > issued.get("hopeless", 0)


@pytest.mark.parametrize("policy", INFORMED)
@pytest.mark.parametrize("found", [[0, 0, 0, 1, 0, 1, 0, 0], [-0.4, 1.2, 0.3, -1.1, 0.8, 0.1, -0.7, 0.5]])
def test_pending_candidates_count_as_expected_draws(policy, found):
    """Of two equal prompts, the one without pending candidates is worth more."""
    one = planner_with({"waits": found, "idle": found}, policy=policy, keep=8)
    for index in range(8, 20):
        one.took("waits", index)
    assert counts(one.ask(6)) == {"idle": 6}


@pytest.mark.parametrize("policy", INFORMED)
def test_strict_rewards_are_detected_or_configured(policy):
    """Two values look strict, so one prompt is saturated. With graded rewards configured, more variance may come."""
    rewards = {"half": [0.2, 0.8] * 4, "mostly": [0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.8]}
    learnt, of_strict = (
        planner_with(rewards, policy=policy).ask(8),
        planner_with(rewards, policy=policy, strict=True).ask(8),
    )
    assert learnt == of_strict
    assert counts(learnt) == {"mostly": 8}
    if policy == "ucb":
        assert counts(planner_with(rewards, policy=policy, strict=False).ask(8))["half"] > 0


# --- graded rewards


@pytest.mark.parametrize("policy", INFORMED)
def test_more_variance_gets_more(policy):
    draw = random.Random(5).gauss
    rewards = {f"{sigma} {i}": [draw(0, sigma) for _ in range(8)] for sigma in (0.3, 1.0) for i in range(8)}
    issued = counts(planner_with(rewards, policy=policy, keep=8).ask(64))
    calm, wild = (sum(issued.get(f"{sigma} {i}", 0) for i in range(8)) for sigma in (0.3, 1.0))
    assert wild > 3 * calm


@pytest.mark.parametrize("policy", ["ucb", "bayes"])
def test_prompts_that_differ_only_by_chance_get_about_the_same(policy):
    draw = random.Random(7).gauss
    one = planner_with({f"p{i}": [draw(0, 1) for _ in range(8)] for i in range(32)}, policy=policy, keep=8)
    issued = counts(one.ask(32 * 8))
    assert len(issued) == 32
    assert max(issued.values()) <= 3 * 8


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.data())
def test_kept_variance_needs_only_the_lowest_and_highest_rewards(rewards, data):
    keep = data.draw(st.integers(1, len(rewards)))
    fast = float(_kept_graded(np.array(_ends(sorted(rewards), keep))))
    assert fast == pytest.approx(kept_variance(rewards, keep), abs=1e-9)


# --- results


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reward_that_is_not_finite_counts_as_tried(policy):
    one = planner_with({"bad": [math.nan, math.inf, -math.inf, math.nan], "good": [0.0, 1.0, 0.0, 1.0]}, policy=policy)
    assert one.kept_variance() == {"bad": 0.0, "good": 0.25}
    assert set(one.beliefs()) == {"good"}
    assert len(one.ask(ALL)) == 2 * 32 - 8


@pytest.mark.parametrize("policy", ["ucb", "bayes"])
def test_a_prompt_with_non_finite_rewards_does_not_use_up_the_budget(policy):
    draw = random.Random(1).random
    one = planner(policy=policy, most=200)
    for _ in range(20):
        report(one, one.ask(6), lambda prompt, index: math.nan if prompt == "p0" else draw())
    assert sum(prompt == "p0" for prompt, _ in one.ask(ALL)) > 200 - 40


def test_the_first_reward_of_a_candidate_counts():
    one = planner()
    one.ask(12)
    one.tell("p0", 0, 1.0)
    one.tell("p0", 0, 9.0)
    one.tell("p0", 1, math.nan)
    one.tell("p0", 1, 9.0)
    assert one.beliefs() == {"p0": {"count": 1.0, "mean": 1.0, "variance": 0.0}}


def test_kept_variance_can_be_read_at_any_time():
    one = planner(1)
    issued = one.ask(6)
    assert one.kept_variance() == {"p0": 0.0}
    for (prompt, index), reward in zip(issued, [0.0, 1.0, 0.5, 0.5, 0.0, 1.0], strict=True):
        one.tell(prompt, index, reward)
    assert one.kept_variance() == {"p0": 0.25}


# --- beliefs


def test_beliefs_are_the_moments_of_the_rewards_and_survive_json():
    one = planner_with({"p": [0.0, 1.0, 1.0, 1.0], "q": []})
    assert json.loads(json.dumps(one.beliefs())) == {"p": {"count": 4, "mean": 0.75, "variance": 0.1875}}


def test_results_of_the_last_visit_count_half():
    last = planner_with({"p": [0.0, 0.0, 1.0, 1.0]}).beliefs()
    now = planner_with({"p": [1.0, 1.0]}, priors=last).beliefs()["p"]
    assert now["count"] == 4
    assert now["mean"] == 0.75
    assert now["variance"] == pytest.approx(np.var([0, 1, 1, 1]))
    assert planner_with({"p": []}, priors=last).beliefs()["p"] == {"count": 2.0, "mean": 0.5, "variance": 0.25}


@pytest.mark.parametrize("policy", ["ucb", "bayes"])
@pytest.mark.parametrize(
    ("last", "now"),
    [
        ({"hopeless": [0] * 24, "promising": [0, 1] * 12}, [0] * 6),
        ({"hopeless": [0.5, 0.51] * 12, "promising": [0.1, 0.9] * 12}, [0.5, 0.45, 0.55, 0.4, 0.6, 0.5]),
    ],
)
def test_the_last_visit_decides_between_two_equal_prompts(policy, last, now):
    rewards = {"hopeless": now, "promising": now, "other": [0, 1] * 6}
    issued = planner_with(rewards, priors=planner_with(last).beliefs(), policy=policy).ask(ALL)
    assert next(prompt for prompt, _ in issued if prompt != "other") == "promising"


# --- errors


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"keep": 0}, "keeps 0 of at most 16"),
        ({"keep": 17}, "keeps 17 of at most 16"),
        ({"chunk": 0}, "chunk is 0"),
        ({"policy": "thompson"}, "use one of uniform, greedy, ucb, bayes"),
    ],
)
def test_invalid_planner_settings_are_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        planner(**wrong)


def test_a_prompt_twice_is_refused():
    with pytest.raises(ValueError, match="twice in this batch"):
        Planner(["p", "p"], keep=2, most=4)


def test_a_result_without_a_request_is_refused():
    one = planner()
    with pytest.raises(ValueError, match=r"candidate 0 of 'p0' was not asked for; call took"):
        one.tell("p0", 0, 1.0)
    with pytest.raises(ValueError, match="'other' is not in this batch"):
        one.took("other", 0)
    with pytest.raises(ValueError, match="indices count from 0"):
        one.took("p0", -1)


def test_a_batch_without_prompts_asks_for_nothing():
    assert Planner([], keep=2, most=4).ask(3) == ()


# --- the budget


@pytest.mark.parametrize(
    ("phases", "elapsed", "seconds"),
    [
        ([10.0], 0.0, 9.5),
        ([10.0], 4.0, 5.5),
        ([10.0], 9.7, 0.0),
        ([10.0], 12.0, 0.0),
        ([1.0], 0.0, 0.9),  # the reserve is at most a tenth of a short phase
        ([8.0, 30.0, 10.0, 12.0, 20.0], 0.0, 9.5),  # a quarter of them is at 10 or below
        ([8.0, 30.0, 10.0, 12.0, 20.0], 11.0, 0.5),  # of 12, 20 and 30 the first
        ([1.0] + [10.0] * PHASES, 0.0, 9.5),
    ],
)
def test_the_expected_training_time_is_that_of_a_short_phase(phases, elapsed, seconds):
    assert seconds_until_trained(phases, elapsed_seconds=elapsed) == pytest.approx(seconds)


def test_the_quantile_and_the_guard_can_be_changed():
    assert seconds_until_trained([8.0, 10.0, 30.0], elapsed_seconds=0, quantile=1.0, guard_seconds=2.0) == 28.0
    with pytest.raises(ValueError, match=r"quantile of training phases is 25"):
        seconds_until_trained([8.0], elapsed_seconds=0, quantile=25)


@pytest.mark.parametrize(
    ("seconds", "gpus", "each", "pending", "fit"),
    [
        (9.0, 4, 2.0, 0, 18),
        (9.0, 4, 2.0, 5, 13),
        (9.0, 4, 2.0, 50, 0),
        (9.0, 2, 2.0, 5, 4),  # half of the GPUs were preempted
        (9.0, 0, 2.0, 0, 0),
        (0.0, 4, 2.0, 0, 0),
        (1.0, 1, 2.0, 0, 0),
    ],
)
def test_idle_gpu_seconds_become_candidates(seconds, gpus, each, pending, fit):
    assert candidates_that_fit(seconds, gpus=gpus, gpu_seconds_per_candidate=each, pending=pending) == fit


@given(st.floats(0.0, 1e3), st.integers(0, 64), st.floats(1e-3, 1e2), st.integers(0, 100))
def test_issued_candidates_fit_into_the_idle_time(seconds, gpus, each, pending):
    fit = candidates_that_fit(seconds, gpus=gpus, gpu_seconds_per_candidate=each, pending=pending)
    assert fit >= 0
    assert fit == 0 or (fit + pending) * each <= seconds * gpus * (1 + 1e-9)


def test_the_first_iteration_gives_every_gpu_a_few_candidates_at_a_time():
    unknown = seconds_until_trained([], elapsed_seconds=3.0)
    assert unknown is None
    assert candidates_that_fit(unknown, gpus=3, gpu_seconds_per_candidate=2.0) == 3 * FIRST_CANDIDATES_PER_GPU
    assert candidates_that_fit(9.0, gpus=3, gpu_seconds_per_candidate=None, pending=20) == 4
    assert candidates_that_fit(unknown, gpus=0, gpu_seconds_per_candidate=None) == 0
    assert candidates_that_fit(0.0, gpus=3, gpu_seconds_per_candidate=None) == 0


def test_a_candidate_takes_time():
    with pytest.raises(ValueError, match="takes 0 GPU-seconds"):
        candidates_that_fit(9.0, gpus=1, gpu_seconds_per_candidate=0)
