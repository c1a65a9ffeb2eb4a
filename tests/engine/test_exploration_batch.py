"""Exploration of one batch: each candidate is issued once, and a counted budget is reproducible after a restart."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert

from engine.exploration.batch import BatchExploration
from engine.protocol.codec import decode_call, encode
from engine.protocol.exploration_order import ExplorationOrder
from engine.protocol.request import Finished, Kind, RequestId, Score

PROMPTS = ("one", "two", "three", "four")


def order(**changes):
    plain = {
        "run": "run",
        "run_seed": 7,
        "lineage": 1,
        "batch": 3,
        "prompts": PROMPTS,
        "keep": 2,
        "most": 12,
        "policy": "bayes",
        "chunk": 2,
        "counted": 24,
        "version": 2,
        "sampler": "plan",
        "steps": 8,
        "shape": 6,
        "dtype": "bfloat16",
        "scorer": "student",
    }
    return ExplorationOrder(**{**plain, **changes})


def reward_of(request):
    """Return a reward; the variance differs between prompts."""
    return (request.seed % 97) / 97 * (1 + PROMPTS.index(request.prompt))


def result(request, reward=None):
    score = Score(reward=reward_of(request) if reward is None else reward, metrics={})
    return Finished(request=request, score=score, trajectory=None)


def all_issued(exploration, *, backwards=False):
    """Return all issued candidates; results come back after each forward pass, in the given order."""
    everything = []
    while requests := exploration.more(1000):
        everything += requests
        results = [result(request) for request in requests]
        exploration.add_results(results[::-1] if backwards else results)
    return everything


@pytest.mark.parametrize("policy", ["uniform", "greedy", "ucb", "bayes"])
def test_a_counted_budget_issues_every_candidate_exactly_once(policy):
    exploration = BatchExploration(order(policy=policy))
    everything = all_issued(exploration)
    assert len(everything) == len(set(everything)) == 24
    assert exploration.open == 0
    assert {request.kind for request in everything} == {Kind.EXPLORE}
    assert {request.batch for request in everything} == {3}


@pytest.mark.parametrize("policy", ["uniform", "bayes"])
def test_a_counted_budget_tries_the_same_seeds_in_any_order_of_results(policy):
    one, other = (BatchExploration(order(policy=policy)) for _ in range(2))
    assert all_issued(one) == all_issued(other, backwards=True)


def test_later_rounds_go_to_prompts_with_the_most_variance():
    everything = all_issued(BatchExploration(order(counted=40)))
    count = {prompt: sum(request.prompt == prompt for request in everything) for prompt in PROMPTS}
    assert count["four"] > count["one"]


def test_a_round_starts_after_all_results_of_the_round_before():
    exploration = BatchExploration(order())
    first = exploration.more(1000)
    exploration.add_results([result(request) for request in first[1:]])
    assert exploration.more(1000) == ()
    exploration.settled(first[0], math.nan)  # its result never comes
    assert exploration.more(1000) != ()


def test_an_idle_time_budget_issues_one_forward_pass_at_a_time():
    exploration = BatchExploration(order(counted=None))
    assert len(exploration.more(1000)) == 6
    assert len(exploration.more(2)) == 2
    assert exploration.more(0) == ()
    assert exploration.open is None


@pytest.mark.slow
@given(st.data())
def test_a_restored_exploration_continues_identically(data):
    """It is restored from its order, its issued and its finished candidates, as after a restart of the coordinator."""
    exploration = BatchExploration(order(counted=data.draw(st.sampled_from([None, 24, 40]))))
    issued, results = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        issued += exploration.more(data.draw(st.integers(0, 10)))
        some = [request for request in issued if request not in results and data.draw(st.booleans())]
        exploration.add_results([result(request) for request in some])
        results += some
    again = BatchExploration(convert(encode(exploration.order), ExplorationOrder))
    again.took(issued)
    again.add_results([result(request) for request in results])
    assert again.pending == exploration.pending == len(issued) - len(results)
    assert again.open == exploration.open
    rest = [request for request in issued if request not in results]
    for one in (exploration, again):
        one.add_results([result(request) for request in rest])
    assert all_issued(again) == all_issued(exploration)


def early_rollout(batch):
    return RequestId(run="run", lineage=1, batch=batch, prompt="one", seed=1, kind=Kind.EARLY)


def test_an_idle_time_budget_with_its_pool_waits_for_the_early_rollouts():
    exploration = BatchExploration(order(counted=None, shape=4, pool=2))
    first, second = exploration.more(1000), exploration.more(1000)
    assert [len(first), len(second)] == [4, 4]
    assert exploration.more(1000) == (), "every prompt has two candidates, finished or under way"
    exploration.add_results([result(request) for request in (*first, *second)])
    exploration.took([early_rollout(2)])
    assert exploration.more(1000) == (), "early rollouts of another batch"
    exploration.took([early_rollout(3)])
    assert len(exploration.more(1000)) == 4


def test_a_candidate_without_a_finite_reward_is_no_part_of_the_pool():
    exploration = BatchExploration(order(counted=None, shape=4, pool=1))
    requests = exploration.more(1000)
    assert exploration.more(1000) == ()
    exploration.settled(requests[0], math.nan)
    assert exploration.more(1), "the prompt needs another"
    exploration.take_back(exploration.more(1000))
    again = BatchExploration(exploration.order)
    again.took(requests)
    assert again.more(1000) == (), "a restarted coordinator waits too"


def test_results_of_another_batch_are_not_counted():
    exploration, other = BatchExploration(order()), BatchExploration(order(batch=9))
    exploration.add_results([result(request) for request in other.more(1000)])
    assert exploration.open == 24


def test_an_invalid_exploration_order_is_refused():
    with pytest.raises(ValueError, match=r"'explore' cannot be read: .*colour"):
        decode_call({"call": "explore", "order": {**encode(order()), "colour": "red"}})
