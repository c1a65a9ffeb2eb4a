"""Videos are scored by evenly spaced frames, or whole by a user's function."""

import math

import pytest
import torch

from engine.config import EngineConfig
from engine.protocol.request import Score
from engine.rewards.frames import FrameMeans, spaced
from engine.rewards.load import load_reward

WAN = {"model": {"name": "wan", "path": "there"}, "prompts": "prompts.txt"}


def brightness(images, prompts):
    assert images.dim() == 4
    assert len(images) == len(prompts)
    return [Score(reward=float(one.mean()), metrics={"share": float(one.mean() > 3)}) for one in images]


@pytest.mark.parametrize(("total", "count", "frames"), [
    (33, 3, [0, 16, 32]), (33, 1, [16]), (9, 2, [0, 8]), (5, 5, [0, 1, 2, 3, 4]), (33, 4, [0, 11, 21, 32]),
])  # fmt: skip
def test_frames_are_evenly_spaced_from_the_first_to_the_last(total, count, frames):
    assert spaced(total, count) == frames


def test_the_score_of_a_video_is_the_mean_of_its_frames():
    """Frame f of video v is everywhere 10 v + f."""
    frames = torch.arange(5.0).view(1, 1, 5, 1, 1)
    videos = (10 * torch.arange(2.0).view(2, 1, 1, 1, 1) + frames).expand(2, 3, 5, 4, 6)
    scores = FrameMeans(brightness, 3)(videos, ["a", "b"])
    assert [score.reward for score in scores] == [2.0, 12.0]
    assert [score.metrics["share"] for score in scores] == [pytest.approx(1 / 3), 1.0]


def test_a_video_with_an_unscored_frame_is_unscored():
    def scorer(images, prompts):
        return [Score(reward=math.nan, metrics={}), *brightness(images[1:], prompts[1:])]

    unscored, scored = FrameMeans(scorer, 2)(torch.zeros(2, 3, 5, 4, 6), ["a", "b"])
    assert math.isnan(unscored.reward)
    assert math.isnan(unscored.metrics["share"])
    assert (scored.reward, scored.metrics) == (0.0, {"share": 0.0})


def test_images_and_too_short_videos_are_refused():
    with pytest.raises(ValueError, match="the model makes images"):
        FrameMeans(brightness, 3)(torch.zeros(2, 3, 4, 6), ["a", "b"])
    with pytest.raises(ValueError, match="is 3, and a video has 2 frames"):
        FrameMeans(brightness, 3)(torch.zeros(1, 3, 2, 4, 6), ["a"])


def test_a_users_function_gets_the_whole_video_without_frames(tmp_path):
    (tmp_path / "video_score.py").write_text(
        "def score(videos, prompts):\n    return [float(v.dim()) for v in videos]\n"
    )
    whole = EngineConfig.model_validate(WAN | {"reward": {"name": "video_score:score"}})
    by_frame = EngineConfig.model_validate(WAN | {"reward": {"name": "video_score:score", "frames": 2}})
    videos = torch.zeros(1, 3, 5, 4, 6)
    assert load_reward(whole.reward, str(tmp_path))(videos, ["a"])[0].reward == 4.0, "[C, F, H, W]"
    assert load_reward(by_frame.reward, str(tmp_path))(videos, ["a"])[0].reward == 3.0, "[C, H, W]"


@pytest.mark.parametrize(("job", "words"), [
    (WAN, "reward ocr scores images, not videos; set reward: {name: ocr, frames: 3}"),
    (WAN | {"model": {"name": "sd3", "path": "there"}, "reward": {"name": "ocr", "frames": 3}}, "leave frames out"),
])  # fmt: skip
def test_a_reward_that_cannot_score_the_model_is_refused(job, words):
    with pytest.raises(ValueError) as error:
        EngineConfig.model_validate(job)
    assert words in str(error.value)


def test_a_video_has_the_fault_of_its_first_frame_without_a_score():
    found = iter([Score(reward=1.0, metrics={}), Score(reward=math.nan, metrics={}, fault="HTTP 503")])
    (score,) = FrameMeans(lambda images, prompts: [next(found) for _ in prompts], 2)(torch.zeros(1, 1, 2, 2, 2), ["a"])
    assert score.fault == "HTTP 503"
