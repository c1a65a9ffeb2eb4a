"""The weighted sum of several rewards (`reward: [{name, weight}, ...]`).

Each score is a metric under its scorer's name, and a metric of a scorer is `NAME/METRIC`, so a target or a guard may
name any of them. An image without one of the scores has no reward: its sum is NaN, and its group is skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.protocol.request import Score
from engine.rewards.reward import Reward, RewardError


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighted:
    """A reward of a sum, its weight, and its name among the metrics."""

    name: str
    weight: float
    reward: Reward


class WeightedSum:
    """Scores by all rewards, one after another."""

    def __init__(self, parts: Sequence[Weighted]) -> None:
        self._parts = tuple(parts)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        by_part = [part.reward(images, prompts) for part in self._parts]
        for part, scores in zip(self._parts, by_part, strict=True):
            if len(scores) != len(prompts):
                raise RewardError(f"reward {part.name} returned {len(scores)} scores for {len(prompts)} images")
        return [self._sum(scores) for scores in zip(*by_part, strict=True)]

    def _sum(self, scores: Sequence[Score]) -> Score:
        metrics: dict[str, float] = {}
        for part, score in zip(self._parts, scores, strict=True):
            metrics[part.name] = score.reward
            metrics |= {f"{part.name}/{name}": value for name, value in score.metrics.items()}
        # A number plus NaN is NaN: an image without one score has no sum.
        reward = sum(part.weight * score.reward for part, score in zip(self._parts, scores, strict=True))
        faults = (f"{part.name}: {score.fault}" for part, score in zip(self._parts, scores, strict=True) if score.fault)
        return Score(reward=reward, metrics=metrics, fault=next(faults, ""))
