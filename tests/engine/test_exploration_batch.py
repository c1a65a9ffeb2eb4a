"""What the coordinator deals: each candidate once, counted budgets alike every time, and on from wherever it was."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert

from engine.exploration.batch import BatchExploration
from engine.protocol.codec import decode_call, encode
from engine.protocol.exploration_order import ExplorationOrder
from engine.protocol.request import Finished, Kind, Score

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
    """Prompts differ in how much their rewards differ."""
    return (request.seed % 97) / 97 * (1 + PROMPTS.index(request.prompt))


def result(request, reward=None):
    score = Score(reward=reward_of(request) if reward is None else reward, metrics={})
    return Finished(request=request, score=score, trajectory=None)


def dealt(exploration, *, backwards=False):
    """Everything it deals, told after each deal, in one order or the other."""
    everything = []
    while requests := exploration.more(1000):
        everything += requests
        told = [result(request) for request in requests]
        exploration.add_results(told[::-1] if backwards else told)
    return everything


@pytest.mark.parametrize("policy", ["uniform", "greedy", "ucb", "bayes"])
def test_a_counted_budget_is_dealt_to_the_last_candidate_and_each_once(policy):
    exploration = BatchExploration(order(policy=policy))
    everything = dealt(exploration)
    assert len(everything) == len(set(everything)) == 24
    assert exploration.open == 0
    assert {request.kind for request in everything} == {Kind.EXPLORE}
    assert {request.batch for request in everything} == {3}


@pytest.mark.parametrize("policy", ["uniform", "bayes"])
def test_a_counted_budget_tries_the_same_seeds_in_whatever_order_they_come_back(policy):
    one, other = (BatchExploration(order(policy=policy)) for _ in range(2))
    assert dealt(one) == dealt(other, backwards=True)


def test_the_later_rounds_go_where_the_first_found_most():
    everything = dealt(BatchExploration(order(counted=40)))
    count = {prompt: sum(request.prompt == prompt for request in everything) for prompt in PROMPTS}
    assert count["four"] > count["one"]


def test_a_round_is_not_begun_before_the_one_before_it_is_in():
    exploration = BatchExploration(order())
    first = exploration.more(1000)
    exploration.add_results([result(request) for request in first[1:]])
    assert exploration.more(1000) == ()
    exploration.settled(first[0], math.nan)  # it will never come
    assert exploration.more(1000) != ()


def test_idle_time_is_dealt_a_forward_pass_at_a_time_and_no_more_than_fits():
    exploration = BatchExploration(order(counted=None))
    assert len(exploration.more(1000)) == 6
    assert len(exploration.more(2)) == 2
    assert exploration.more(0) == ()
    assert exploration.open is None


@given(st.data())
def test_one_that_is_restored_deals_on_alike(data):
    """From its order, from what was submitted, and from what was finished: as after a coordinator's death."""
    exploration = BatchExploration(order(counted=data.draw(st.sampled_from([None, 24, 40]))))
    asked, told = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        asked += exploration.more(data.draw(st.integers(0, 10)))
        some = [request for request in asked if request not in told and data.draw(st.booleans())]
        exploration.add_results([result(request) for request in some])
        told += some
    again = BatchExploration(convert(encode(exploration.order), ExplorationOrder))
    again.took(asked)
    again.add_results([result(request) for request in told])
    assert again.pending == exploration.pending == len(asked) - len(told)
    assert again.open == exploration.open
    rest = [request for request in asked if request not in told]
    for one in (exploration, again):
        one.add_results([result(request) for request in rest])
    assert dealt(again) == dealt(exploration)


def test_what_another_batch_found_is_not_counted():
    exploration, other = BatchExploration(order()), BatchExploration(order(batch=9))
    exploration.add_results([result(request) for request in other.more(1000)])
    assert exploration.open == 24


def test_an_order_that_is_not_understood_is_refused():
    with pytest.raises(ValueError, match=r"'explore' cannot be read: .*colour"):
        decode_call({"call": "explore", "order": {**encode(order()), "colour": "red"}})
