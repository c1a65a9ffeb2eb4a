"""Images that cannot be scored have no score, and the scorer never gets them."""

import math

import pytest
import torch

from engine.protocol.request import Score
from engine.rewards.reward import RewardError
from engine.rewards.scorable import scores_of, unsound


class Means:
    """Scores by the mean, and keeps what it was given."""

    def __init__(self):
        self.given = []

    def __call__(self, images, prompts):
        self.given.append(list(prompts))
        return [Score(reward=float(image.mean()), metrics={}) for image in images]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_finite_images_reach_the_scorer(value):
    images = torch.zeros(3, 1, 2, 2) + 0.5
    images[1, 0, 1, 1] = value
    means = Means()
    scores = scores_of(means, images, ["a", "b", "c"])
    assert means.given == [["a", "c"]]
    assert [score.reward for score in scores[::2]] == [0.5, 0.5]
    assert math.isnan(scores[1].reward)
    assert "not finite" in scores[1].fault


def test_one_bad_frame_makes_a_video_unscorable():
    videos = torch.zeros(2, 3, 4, 2, 2)
    videos[0, 2, 3, 0, 0] = math.nan
    scores = scores_of(Means(), videos, ["a", "b"])
    assert [math.isnan(score.reward) for score in scores] == [True, False]


def test_a_scorer_is_not_called_for_nothing():
    means = Means()
    scores = scores_of(means, torch.full((2, 1, 2, 2), math.nan), ["a", "b"])
    assert means.given == []
    assert all(math.isnan(score.reward) for score in scores)


def test_a_reason_against_a_score_comes_before_all_others():
    means = Means()
    scores = scores_of(means, torch.zeros(2, 1, 2, 2), ["a", "b"], ["it hangs", ""])
    assert means.given == [["b"]]
    assert (scores[0].fault, scores[1].fault) == ("it hangs", "")


def test_latents_that_are_not_finite_are_named_before_the_image():
    latents = torch.zeros(2, 4)
    latents[1, 0] = math.nan
    assert unsound(torch.zeros(2, 1, 2, 2), latents) == [
        "",
        "the latents of the image are not finite (NaN or infinite)",
    ]


def test_a_wrong_number_of_scores_is_an_error():
    with pytest.raises(RewardError, match="1 scores for 2 images"):
        scores_of(lambda images, prompts: [Score(reward=0.0, metrics={})], torch.zeros(2, 1, 2, 2), ["a", "b"])
