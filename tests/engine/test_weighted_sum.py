"""Several rewards: a weighted sum, with every score among the metrics, and no sum without all scores."""

import math

import pytest
import torch

from engine.algorithm.advantages import decoupled
from engine.config import EngineConfig, GuardConfig, TargetConfig
from engine.protocol.request import Score
from engine.reward_config import HttpConfig, RewardConfig, WeightedScorer
from engine.rewards.load import load_reward
from engine.rewards.reward import RewardError
from engine.rewards.weighted_sum import Weighted, WeightedSum
from engine.trainer.updates import BatchUpdates
from tests.engine.test_loop import TINY, build, evaluated, progress

pytestmark = pytest.mark.usefixtures("one_layer")


def bright(images, prompts):
    return [Score(reward=float(image.mean()), metrics={"share": 0.25}) for image in images]


def length(images, prompts):
    return [Score(reward=float(len(prompt)), metrics={}) for prompt in prompts]


def second_fails(images, prompts):
    return [Score(reward=math.nan if number == 1 else 1.0, metrics={}) for number, _ in enumerate(prompts)]


def summed(*parts):
    return WeightedSum([Weighted(name=one.__name__, weight=weight, reward=one) for one, weight in parts])


IMAGES = torch.stack([torch.full((3, 4, 4), value) for value in (0.5, -0.5)])


def test_the_reward_is_the_sum_and_every_score_is_a_metric():
    scores = summed((bright, 2.0), (length, -0.5))(IMAGES, ["abc", "a"])
    assert [score.reward for score in scores] == [2 * 0.5 - 0.5 * 3, 2 * -0.5 - 0.5 * 1]
    assert scores[0].metrics == {"bright": 0.5, "bright/share": 0.25, "length": 3.0}


def test_an_image_without_one_of_the_scores_has_no_reward():
    scores = summed((bright, 1.0), (second_fails, 1.0))(IMAGES, ["a", "b"])
    assert scores[0].reward == 1.5
    assert math.isnan(scores[1].reward)
    assert scores[1].metrics["bright"] == -0.5, "the other score is known"


def test_a_reward_that_returns_a_wrong_count_is_named():
    with pytest.raises(RewardError, match="reward <lambda> returned 1 scores for 2 images"):
        summed((bright, 1.0), (lambda images, prompts: bright(images[:1], prompts), 1.0))(IMAGES, ["a", "b"])


def test_parts_are_loaded_by_name_with_their_weights(tmp_path):
    (tmp_path / "two_of_mine.py").write_text(
        "def one(images, prompts):\n    return [1.0] * len(prompts)\n"
        "def two(images, prompts, metadata):\n    return [2.0 + len(metadata[0])] * len(prompts)\n"
    )
    parts = (WeightedScorer(name="two_of_mine:one", weight=3.0), WeightedScorer(name="two_of_mine:two", label="mine"))
    reward = load_reward(RewardConfig(name="sum", parts=parts), str(tmp_path), {"a": {"count": 1}})
    assert reward(IMAGES[:1], ["a"]) == [Score(reward=6.0, metrics={"one": 1.0, "mine": 3.0})]


def test_a_run_reports_each_score_and_skips_groups_without_a_sum(tmp_path):
    def fails_in_training(images, prompts):
        reward = math.nan if len(prompts) == 2 else 1.0  # evaluations score three images at a time
        return [Score(reward=reward, metrics={}) for _ in prompts]

    job = TINY.model_copy(update={"iterations": 1})
    build(job, tmp_path, reward=summed((bright, 1.0), (fails_in_training, 1.0))).loop.run()
    assert {"bright", "bright/share", "fails_in_training"} <= set(evaluated(tmp_path)[1])
    assert next(iter(progress(tmp_path, "iteration_done"))).health["skipped_groups"] == 2


PARTS = (
    WeightedScorer(name="mine:bright", label="bright"),
    WeightedScorer(name="mine:length", label="length", weight=0.5),
)


def test_normalised_rewards_are_trained_and_the_sum_is_reported(tmp_path, monkeypatch):
    seen, train = [], BatchUpdates.train

    def watched(self, manifest, plan, rollouts):
        health = train(self, manifest, plan, rollouts)
        seen.append((rollouts.trained_rewards(), rollouts.rewards(), rollouts.metrics()))
        return health

    monkeypatch.setattr(BatchUpdates, "train", watched)
    config = RewardConfig(name="sum", combine="advantages", parts=PARTS)
    job = TINY.model_copy(update={"iterations": 2, "reward": config})
    build(job, tmp_path, reward=summed((bright, 1.0), (length, 0.5))).loop.run()
    done = list(progress(tmp_path, "iteration_done"))
    for (trained, sums, metrics), event in zip(seen, done, strict=True):
        bright_scores = torch.tensor(sums) - 0.5 * 4  # each prompt has four digits
        for row, scores in zip(trained, bright_scores, strict=True):
            expected = decoupled(torch.stack([scores, torch.full_like(scores, 4.0)]), torch.tensor([1.0, 0.5]))
            assert row == pytest.approx(expected.tolist(), abs=1e-3)
            assert sum(row) == pytest.approx(0, abs=1e-4)
        assert event.reward_mean == pytest.approx(float(torch.tensor(sums).mean()), abs=1e-6)
        assert event.scores == metrics
        assert event.scores["length"] == 4.0
        assert event.scores["bright"] + 2.0 == pytest.approx(event.reward_mean, abs=1e-6)


def test_a_target_and_a_guard_may_name_a_score_of_a_sum(tmp_path):
    target = TargetConfig(metric="length", value=4.0, evaluations=1, guards=(GuardConfig(metric="bright", max=1.0),))
    job = TINY.model_copy(update={"target": target})
    held = build(job, tmp_path / "held", reward=summed((bright, 1.0), (length, 1.0))).loop.run()
    assert held.reason == "target"
    strict = target.model_copy(update={"guards": (GuardConfig(metric="bright", max=-1.0),)})
    job = TINY.model_copy(update={"target": strict})
    broken = build(job, tmp_path / "broken", reward=summed((bright, 1.0), (length, 1.0))).loop.run()
    assert broken.reason == "iterations"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "ocr", "combine": "advantages"}, "reward.combine is advantages, but reward.name is ocr"),
        ({"name": "sum"}, "with 0 parts; use name: sum for two or more"),
        ({"name": "ocr", "parts": ({"name": "ocr"}, {"name": "shapes"})}, "reward.name is ocr, with 2 parts"),
        ({"name": "sum", "parts": ({"name": "ocr"}, {"name": "ocr"})}, "has ocr twice; give each a label"),
        ({"name": "sum", "parts": ({"name": "ocr"}, {"name": "shapes", "weight": 0.0})}, "shapes with weight 0"),
        ({"name": "sum", "parts": ({"name": "ocr"}, {"name": "sum"})}, "has sum with weight 1; leave it out"),
        ({"name": "sum", "parts": ({"name": "ocr"}, {"name": "shapes", "weight": math.nan})}, "finite number"),
    ],
)
def test_sums_that_make_no_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        RewardConfig.model_validate(fields)


def test_keys_and_kinds_of_images_count_for_every_part():
    http = WeightedScorer(name="http", http=HttpConfig(url="http://a", key="JUDGE_KEY"))
    reward = RewardConfig(name="sum", parts=(WeightedScorer(), http))
    assert reward.key_names == ("JUDGE_KEY",)
    wan = {"model": {"name": "wan", "path": "there"}, "prompts": "prompts.txt", "reward": reward}
    with pytest.raises(ValueError, match=r"reward ocr scores images, not videos; set reward: {name: sum, frames: 3}"):
        EngineConfig.model_validate(wan)


def test_a_sum_names_the_part_without_a_score_and_its_fault():
    def of(fault):
        reward = math.nan if fault else 1.0
        return lambda images, prompts: [Score(reward=reward, metrics={}, fault=fault) for _ in prompts]

    parts = [Weighted(name=name, weight=1.0, reward=of(fault)) for name, fault in (("ocr", ""), ("judge", "HTTP 503"))]
    (score,) = WeightedSum(parts)(torch.zeros(1, 1, 2, 2), ["a"])
    assert score.fault == "judge: HTTP 503"
