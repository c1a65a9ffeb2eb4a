"""What the engine asks of a reward: pictures and prompts in, one score per picture out."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.rollout.request import Score


class Reward(Protocol):
    """Scores pictures. Depends on picture and prompt alone, so that a repeated rollout scores the same."""

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> Sequence[Score]:
        """pictures [B, C, H, W] in [-1, 1], on the CPU wherever the model is; one Score per picture, in order.

        May run in a thread beside sampling. A user's function may return plain floats instead of Scores.
        """
