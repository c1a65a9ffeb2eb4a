"""Advantages: rewards relative to the other images of the same prompt.

There are three ways to scale advantages. `group` divides by the group's own std, and groups can
be trained on arrival. `batch` divides by the std of all rewards of the batch, which must be complete. `ema` divides by
a running average over earlier batches, which allows streaming and still keeps the differences between prompts.

The promise: a group of equal rewards gives exactly 0 and adds nothing to a gradient.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

StdMode = Literal["group", "batch", "ema"]

EPSILON = 1e-4
"""Added to the std, like in Flow-GRPO: bounds the advantages of a group with nearly equal rewards."""


def group_advantages(
    rewards: Tensor, std: StdMode = "group", *, scale: float | None = None, clip: float = 5.0, correction: int = 0
) -> Tensor:
    """Return rewards relative to their group's mean, divided by a std, and clipped.

    rewards  [P, K]  finite, any scale; a row is the group of a prompt
    scale    the divisor in modes `batch` and `ema`: `batch_std` of the whole batch, or `RunningStd.value`.
             `batch` without a scale takes the given rewards as the whole batch;
             `ema` without a scale (no earlier batch exists) divides by the group's own std
    correction  for the group's own std: the divisor is K - correction
    returns  [P, K]  within [-clip, clip]; mean 0 in each row unless clipped; a row of equal rewards gives exactly 0
    """
    rewards = rewards.float()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    own = rewards.std(dim=1, keepdim=True, correction=correction)
    match std:
        case "group":
            divisor = own
        case "batch":
            divisor = torch.full_like(own, batch_std(rewards) if scale is None else scale)
        case "ema":
            divisor = own if scale is None else torch.full_like(own, scale)
    advantages = (centred / (divisor + EPSILON)).clamp(-clip, clip)
    # Compare rewards instead of testing the centred values: rounding of the mean would leave a trace.
    return torch.where(varies(rewards)[:, None], advantages, torch.zeros_like(advantages))


def decoupled(scores: Tensor, weights: Tensor, *, correction: int = 0) -> Tensor:
    """Return the weighted sum of scores, each normalised within the group (GDPO, arXiv 2601.05242, equations 4 and 5).

    scores   [M, K]  any scale; a row is one scorer's scores of the group
    weights  [M]
    returns  [K]  the group's rewards, with mean 0. A scorer with equal scores adds exactly 0; NaN wherever a score is
             not finite

    `group_advantages` of the result is GDPO's last step: with mode `batch` it divides by the std of the batch.
    """
    standardised = group_advantages(scores, "group", clip=math.inf, correction=correction)
    total = (weights.float()[:, None] * standardised).sum(dim=0)
    return torch.where(torch.isfinite(scores).all(), total, torch.full_like(total, math.nan))


def varies(rewards: Tensor) -> Tensor:
    """Return True for groups with different rewards: [P, K] -> bool [P]."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def batch_std(rewards: Tensor) -> float:
    """Return the std of all rewards of a batch around their common mean, like Flow-GRPO's `global_std`."""
    return float(rewards.double().std(correction=0))


@dataclass(frozen=True)
class RunningStd:
    """The averaged batch std of earlier batches. Part of a checkpoint; an aborted batch leaves the value unchanged."""

    value: float | None = None
    decay: float = 0.9

    def after(self, rewards: Tensor) -> "RunningStd":
        """Return the average after another trained batch. rewards: all rewards of the batch, any shape."""
        std = batch_std(rewards)
        value = std if self.value is None else self.decay * self.value + (1.0 - self.decay) * std
        return RunningStd(value, self.decay)
