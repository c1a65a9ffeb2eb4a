"""Advantages: how much better each picture did than the others of its prompt.

Three ways to scale them (research notes rl 1.2). `group` divides by the group's own std, so that groups can be trained
as they arrive; `batch` by the std of all rewards of the batch, which must be complete; `ema` by a running average
over earlier batches, which streams and still leaves the differences between prompts alone.

The promise: a group whose rewards are all equal gives exactly 0, so it adds nothing to a gradient.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

StdMode = Literal["group", "batch", "ema"]

EPSILON = 1e-4
"""Added to the std, as Flow-GRPO does: a group of nearly equal rewards is not blown up without bound."""


def group_advantages(
    rewards: Tensor, std: StdMode = "group", *, scale: float | None = None, clip: float = 5.0, correction: int = 0
) -> Tensor:
    """Rewards relative to the mean of their own group, divided by a std, and clipped.

    rewards  [P, K]  finite, any scale; a row is the group of one prompt
    scale    what to divide by in modes `batch` and `ema`: `batch_std` of the whole batch, or `RunningStd.value`.
             `batch` without it takes the rewards given here as the whole batch;
             `ema` without it (there is no earlier batch yet) divides by the group's own std
    correction  of the group's own std: it is divided by K - correction
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
    # By comparison and not by the mean, whose rounding would leave a trace.
    return torch.where(varies(rewards)[:, None], advantages, torch.zeros_like(advantages))


def varies(rewards: Tensor) -> Tensor:
    """Which groups have anything to compare: [P, K] -> bool [P]."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def batch_std(rewards: Tensor) -> float:
    """Std of all rewards of a batch around their common mean, as Flow-GRPO's `global_std`."""
    return float(rewards.double().std(correction=0))


@dataclass(frozen=True)
class RunningStd:
    """The batch std of earlier batches, averaged; part of a checkpoint, and unchanged by an aborted batch."""

    value: float | None = None
    decay: float = 0.9

    def after(self, rewards: Tensor) -> "RunningStd":
        """With one more trained batch. rewards: all of it, any shape."""
        seen = batch_std(rewards)
        value = seen if self.value is None else self.decay * self.value + (1.0 - self.decay) * seen
        return RunningStd(value, self.decay)
