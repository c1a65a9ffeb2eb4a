"""The engine's interface to a reward: images and prompts in, a score per image out.

A worker calls a `Reward`. A scorer that needs metadata of the prompts is a `MetadataReward`, and `MetadataOfPrompts`
makes a `Reward` of it: the metadata of a prompt is known before the run begins, so requests carry the prompt alone.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from engine.prompt_set import NO_METADATA, Metadata
from engine.protocol.request import Score


class RewardError(ValueError):
    """The job's reward cannot be used. The message gives the reason."""


class Reward(Protocol):
    """Scores images. A score depends on image and prompt alone: a repeated rollout gets an equal score."""

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Sequence[Score]:
        """Score images [B, C, H, W] in [-1, 1], on the CPU whatever the model's device. Return a Score per image.

        Scores are in the order of the images. An image that cannot be scored gets the reward NaN, and the trainer skips
        its group. May run in a thread beside sampling.
        """


class MetadataReward(Protocol):
    """Scores images with the metadata of their prompts (engine/prompt_set.py)."""

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Sequence[Score]:
        """Score images like `Reward`. `metadata`: of each prompt, empty for a prompt without metadata."""


class MetadataOfPrompts:
    """A reward that finds the metadata of each prompt by the prompt's words."""

    def __init__(self, reward: MetadataReward, metadata: Mapping[str, Metadata]) -> None:
        self._reward, self._metadata = reward, metadata

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Sequence[Score]:
        return self._reward.score(images, prompts, [self._metadata.get(prompt, NO_METADATA) for prompt in prompts])
