"""Score a video by its frames: the mean score of some evenly spaced frames (`reward.frames`)."""

from collections.abc import Sequence
from math import nan

from torch import Tensor

from engine.protocol.request import Score
from engine.rewards.reward import Reward


class FrameMeans:
    """A reward of images, applied to evenly spaced frames of videos. Reward and metrics are means over the frames."""

    def __init__(self, reward: Reward, frames: int) -> None:
        self._reward, self._frames = reward, frames

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        """Score videos [B, C, F, H, W]. Raises ValueError for images, and for videos with fewer frames."""
        if images.dim() != 5:
            raise ValueError(
                f"reward.frames is {self._frames}, but the model makes images {list(images.shape)}; leave it out"
            )
        every = images[:, :, spaced(images.shape[2], self._frames)].transpose(1, 2).flatten(0, 1)
        repeated = [prompt for prompt in prompts for _ in range(self._frames)]
        scores = self._reward(every, repeated)
        return [_mean(scores[first : first + self._frames]) for first in range(0, len(scores), self._frames)]


def spaced(total: int, count: int) -> list[int]:
    """Return the numbers of `count` of `total` frames: the first, the last and evenly between; 1: the middle frame.

    Raises ValueError if there are not as many.
    """
    if count > total:
        raise ValueError(f"reward.frames is {count}, and a video has {total} frames; use {total} or less")
    if count == 1:
        return [total // 2]
    return [round(number * (total - 1) / (count - 1)) for number in range(count)]


def _mean(scores: Sequence[Score]) -> Score:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    names = dict.fromkeys(name for score in scores for name in score.metrics)
    return Score(
        reward=mean([score.reward for score in scores]),
        # A frame without a score has no metrics, and then the video has none either.
        metrics={name: mean([score.metrics.get(name, nan) for score in scores]) for name in names},
        fault=next((score.fault for score in scores if score.fault), ""),
    )
