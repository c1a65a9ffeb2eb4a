"""The trainer's side of exploration: it chooses by stale rewards, checks itself by fresh ones, and restarts alike."""

import json
from types import SimpleNamespace

from msgspec.structs import replace

from engine.algorithm_config import AlgorithmConfig
from engine.config import CandidateBudget, EngineConfig, ExplorationConfig, ProfileConfig
from engine.events import ExplorationRests
from engine.exploration.explorer import Explorer
from engine.noise_schedule import EVEN
from engine.protocol.request import Finished, Kind, Manifest, RequestId, Score, Stream, seed_of
from engine.trainer.exploration import SeedExploration

PROMPTS = tuple(f"prompt {number}" for number in range(8))
PROFILES = (ProfileConfig(name="full"), ProfileConfig(name="fast", dtype="bfloat16", steps=4, scorer="student"))
CONFIG = EngineConfig(
    algorithm=AlgorithmConfig(prompts_per_batch=8, images_per_prompt=4, updates_per_batch=2),
    exploration=ExplorationConfig(budget=CandidateBudget(candidates=128), wait="all", profiles=PROFILES),
)


def explorer(**changes):
    exploration = CONFIG.exploration.model_copy(update=changes)
    return Explorer(CONFIG.model_copy(update={"exploration": exploration}), "run")


def order_of(one, batch):
    return one.order(batch, PROMPTS, lineage=1, version=batch - 1, sampler_of=sampler)


def sampler(steps):
    return json.dumps({"signature": f"plan-{steps}", "steps": steps})


def candidates(order, reward):
    found = []
    for prompt in order.prompts:
        for index in range(16):
            seed = seed_of(0, Stream.TRAIN, order.batch, prompt, index)
            request = RequestId(run="run", lineage=1, batch=order.batch, prompt=prompt, seed=seed, kind=Kind.EXPLORE)
            found.append(Finished(request=request, score=Score(reward=reward(seed), metrics={}), trajectory=None))
    return found


def quality(seed):
    return (seed % 1009) / 1009


def unrelated(seed):
    return ((seed // 1009) % 1013) / 1013


def visited(one, batch, fresh, *, control=True):
    """A whole visit: ordered, explored by `quality`, chosen, rolled out afresh; the report of it."""
    order = order_of(one, batch)
    if order is None:
        one.choose(None, PROMPTS, [], batch=batch, gpu_seconds=0.0)
        return None
    groups = one.choose(order, PROMPTS, candidates(order, quality), batch=batch, gpu_seconds=2.0)
    manifest = Manifest(
        run="run", lineage=1, batch=batch, version=batch, sampler="plan-8", groups=groups, minibatches=((0, 1, 2, 3),)
    )
    requests = one.control(manifest)
    results = [Finished(request=r, score=Score(reward=fresh(r.seed), metrics={}), trajectory=None) for r in requests]
    rewards = {(group.prompt, seed): fresh(seed) for group in groups for seed in group.seeds}
    return one.judge(manifest, rewards, results if control else [])


def test_the_control_slice_is_an_eighth_of_what_was_not_chosen_and_nothing_that_was():
    one = explorer()
    order = order_of(one, 1)
    groups = one.choose(order, PROMPTS, candidates(order, quality), batch=1, gpu_seconds=2.0)
    manifest = Manifest(
        run="run", lineage=1, batch=1, version=1, sampler="plan-8", groups=groups, minibatches=((0, 1),)
    )
    requests = one.control(manifest)
    assert len(requests) == round((128 - 32) / 8)
    assert {request.kind for request in requests} == {Kind.CONTROL}
    chosen = {(group.prompt, seed) for group in groups for seed in group.seeds}
    assert not chosen & {(request.prompt, request.seed) for request in requests}
    assert len(set(requests)) == len(requests)


def test_a_ranking_that_holds_is_seen_and_exploration_goes_on():
    one = explorer()
    for batch in range(1, 9):
        report = visited(one, batch, quality)
    assert report.corrected
    assert report.spearman > 0.99
    assert report.realised_gain > 1.5
    assert order_of(one, 9) is not None


def test_a_ranking_that_says_nothing_switches_exploration_off_and_it_is_tried_again():
    one = explorer()
    explored = [visited(one, batch, unrelated) is not None for batch in range(1, 40)]
    assert not all(explored)
    off = explored.index(False)
    assert off >= 3
    assert True in explored[off:]
    assert explored[off : off + 8] == [False] * 8


def test_without_a_control_slice_exploration_is_never_switched_off():
    one = explorer(random_fraction=0.0)
    for batch in range(1, 20):
        report = visited(one, batch, unrelated)
        assert report is not None
        assert not report.corrected


def test_results_of_weights_that_are_too_old_choose_nothing():
    one = explorer()
    order = replace(order_of(one, 5), version=3)
    groups = one.choose(order, PROMPTS, candidates(order, quality), batch=5, gpu_seconds=1.0)
    first = [seed_of(0, Stream.TRAIN, 5, PROMPTS[0], index) for index in range(4)]
    assert list(groups[0].seeds) == first
    assert one.monitor.report().refused_stale == 128


def short_of(one, batch, each=4):
    """Explore a batch with `each` candidates a prompt. Return whether the batch was explored."""
    order = order_of(one, batch)
    found = [] if order is None else candidates(order, quality)
    found = [result for number, result in enumerate(found) if number % 16 < each]
    one.choose(order, PROMPTS, found, batch=batch, gpu_seconds=1.0)
    return order is not None


def test_exploration_rests_where_no_prompt_has_more_candidates_than_it_trains():
    one = explorer(wait="idle")
    explored = [short_of(one, batch) for batch in range(1, 26)]
    assert explored == [True, True, True, *[False] * 10, True, *[False] * 10, True]


def test_exploration_goes_on_once_a_seed_can_be_chosen():
    one = explorer(wait="idle")
    assert [short_of(one, batch, each) for batch, each in enumerate((4, 4, 5, 4, 4, 0, 5), 1)] == [True] * 7
    for batch in (8, 9, 10):
        short_of(one, batch)
    assert not short_of(one, 11)
    assert [short_of(one, batch, each=5) for batch in range(21, 25)] == [True] * 4


def test_the_first_rest_is_told_once():
    one, told, state = explorer(wait="idle"), [], SimpleNamespace(iteration=0, lineage=1)
    seeds = SeedExploration(
        CONFIG,
        one,
        SimpleNamespace(batch=lambda batch: PROMPTS),
        state,
        SimpleNamespace(exploring_seconds=0.0),
        SimpleNamespace(write=told.append),
        EVEN,
    )
    for state.iteration in range(1, 16):
        order = order_of(one, state.iteration)
        found = [] if order is None else candidates(order, quality)[::16]
        seeds.next_manifest("run", order, found, unit=1)
        assert len(told) == (state.iteration >= 3)
    assert told == [ExplorationRests(iteration=3, short_batches=3, trained=4, batches=10)]


def test_batches_without_any_candidate_start_no_rest():
    """No spot node was there: once one comes, exploration begins at once."""
    one = explorer(wait="idle")
    assert all(short_of(one, batch, each=0) for batch in range(1, 9))


def test_a_budget_that_is_waited_for_never_rests():
    one = explorer()
    assert all(short_of(one, batch) for batch in range(1, 9))


def test_a_restarted_trainer_rests_as_long():
    one = explorer(wait="idle")
    for batch in (1, 2, 3):
        short_of(one, batch)
    again = explorer(wait="idle")
    again.restore(json.loads(json.dumps(one.to_dict())))
    assert [short_of(again, batch) for batch in (13, 14)] == [False, True]
    assert not short_of(again, 15), "one more short batch is enough for the next rest"
    old = one.to_dict()
    del old["rest"]
    again.restore(old)
    assert again.rest.until == 0


def test_one_that_was_restored_goes_on_alike():
    one = explorer()
    for batch in range(1, 6):
        visited(one, batch, quality)
    other = explorer()
    other.restore(json.loads(json.dumps(one.to_dict())))
    for batch in range(6, 9):
        assert order_of(other, batch) == order_of(one, batch)
        assert visited(other, batch, quality) == visited(one, batch, quality)
    assert other.to_dict() == one.to_dict()


def test_a_job_with_other_profiles_begins_their_bandit_anew_and_keeps_the_rest():
    one = explorer()
    for batch in range(1, 4):
        visited(one, batch, quality)
    other = explorer(profiles=(ProfileConfig(name="other"),))
    other.restore(json.loads(json.dumps(one.to_dict())))
    assert order_of(other, 4).dtype == "float32"
    assert other.monitor.report() == one.monitor.report()


def test_both_profiles_are_tried_and_their_orders_say_how():
    one = explorer()
    orders = [order_of(one, 1)]
    for batch in range(1, 3):
        visited(one, batch, quality)
        orders.append(order_of(one, batch + 1))
    assert {(order.steps, order.scorer) for order in orders} == {(8, "reward"), (4, "student")}


def test_what_was_learnt_of_a_prompt_is_told_to_its_next_planner():
    one = explorer()
    assert order_of(one, 1).priors == {}
    visited(one, 1, quality)
    assert set(order_of(one, 2).priors) == set(PROMPTS)


def test_no_order_where_too_few_candidates_would_be_tried():
    assert order_of(explorer(budget=CandidateBudget(candidates=32)), 1) is None
    assert order_of(explorer(mode="none"), 1) is None
