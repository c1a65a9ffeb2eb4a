"""The engine's interface to a reward: images and prompts in, a score per image out."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.protocol.request import Score


class Reward(Protocol):
    """Scores images. A score depends on image and prompt alone: a repeated rollout gets an equal score."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Sequence[Score]:
        """Score images [B, C, H, W] in [-1, 1], on the CPU whatever the model's device. Return a Score per image.

        Scores are in the order of the images. May run in a thread beside sampling. A user's function may return plain
        floats instead of Scores.
        """
