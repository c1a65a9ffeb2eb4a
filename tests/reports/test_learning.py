"""A run that cannot learn says so, ends as unhealthy, and is never finished."""

import math
from dataclasses import replace

import pytest

from engine.events import LEARNS_NOTHING_AFTER, UNLEARNED
from engine.protocol.request import Score
from tests.engine.test_loop import TINY, build, one_thread, progress

__all__ = ["one_thread"]  # a fixture

PLAIN = TINY.model_copy(
    update={
        "exploration": TINY.exploration.model_copy(update={"mode": "none"}),
        "evaluation": TINY.evaluation.model_copy(update={"every": 99}),
    }
)


def job(*, iterations, limit=20, **algorithm):
    update = {"stop_without_learning": limit} | algorithm
    return PLAIN.model_copy(update={"iterations": iterations, "algorithm": PLAIN.algorithm.model_copy(update=update)})


def equal(pictures, prompts):
    return [Score(reward=0.25, metrics={}) for _ in prompts]


def warned(folder):
    return [event.text for event in progress(folder, "warned")]


@pytest.mark.parametrize("iterations", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_whose_rewards_never_vary_is_not_finished(tmp_path, iterations):
    finished = build(job(iterations=iterations), tmp_path, reward=equal).loop.run()
    assert (finished.reason, finished.iteration) == ("unhealthy", iterations)
    assert "no batch of this run changed the weights: the rewards of each group are equal (mean 0.250)" in finished.text
    assert len(warned(tmp_path)) == (iterations >= LEARNS_NOTHING_AFTER)


def test_a_run_warns_after_three_batches_and_ends_at_its_limit(tmp_path):
    finished = build(job(iterations=9, limit=4), tmp_path, reward=equal).loop.run()
    assert (finished.reason, finished.iteration) == ("unhealthy", 4)
    assert [done.health[UNLEARNED] for done in progress(tmp_path, "iteration_done")] == [1, 2, 3, 4]
    (text,) = warned(tmp_path)
    assert text.startswith("batch 2: 3 batches in a row taught nothing: the rewards of each group are equal")
    assert "algorithm.stop_without_learning" in text


def test_rewards_of_a_constant_number_for_each_prompt_are_equal_too(tmp_path):
    def by_prompt(pictures, prompts):
        return [Score(reward=float(len(set(prompt))), metrics={}) for prompt in prompts]

    assert build(job(iterations=1), tmp_path, reward=by_prompt).loop.run().reason == "unhealthy"


def test_a_run_without_a_gradient_says_so(tmp_path):
    made = build(job(iterations=1), tmp_path, reward=lambda pictures, _: scores(pictures))
    losses = made.loop.model.trainer.objective.losses

    def without_gradient(*given):
        found = losses(*given)
        return replace(found, loss=found.loss * 0.0)

    made.loop.model.trainer.objective.losses = without_gradient
    finished = made.loop.run()
    assert finished.reason == "unhealthy"
    assert "the gradient of the trained weights is 0" in finished.text


def scores(pictures):
    return [Score(reward=float(picture.mean()), metrics={}) for picture in pictures]


def test_a_run_whose_groups_are_all_skipped_is_unhealthy(tmp_path):
    """Two groups: fewer than end a run at once."""
    finished = build(
        job(iterations=1), tmp_path, reward=lambda _, prompts: [Score(reward=math.nan, metrics={})] * len(prompts)
    ).loop.run()
    assert finished.reason == "unhealthy"
    assert "every group was skipped" in finished.text


@pytest.mark.slow
def test_a_run_that_learned_once_is_finished_with_a_warning(tmp_path):
    def first_batch_only(pictures, prompts):
        return equal(pictures, prompts) if progress(tmp_path, "iteration_done") else scores(pictures)

    finished = build(job(iterations=4), tmp_path, reward=first_batch_only).loop.run()
    assert finished.reason == "iterations"
    assert [text.split(":")[0] for text in warned(tmp_path)] == ["batch 3"]


@pytest.mark.slow
def test_the_count_goes_on_after_a_restart(tmp_path):
    first = build(job(iterations=3, limit=5), tmp_path, reward=equal)
    first.loop.begin()
    for _ in range(2):
        first.loop.run_iteration()
    first.loop.reporter.close()
    finished = build(job(iterations=9, limit=5), tmp_path, reward=equal).loop.run()
    assert (finished.reason, finished.iteration) == ("unhealthy", 5)
