"""The GRPO loss of one denoising step, per row, and the numbers that say whether training is healthy.

Every (picture, step) pair is a training row of its own. Losses are returned unreduced: the transactional update
decides what they are divided by, before the first of them arrives (invariant 4).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossHealth:
    """Of some rows. Ratios are 1 before the first update; if not, rollout and training disagree."""

    ratio_mean: float
    ratio_max: float
    clip_share: float
    """Share of rows whose ratio left the clip range."""


def grpo_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float
) -> tuple[Tensor, LossHealth]:
    """Clipped policy-gradient loss (research notes rl 1.2).

    log_prob, old_log_prob, advantage  [B]  now, at the time of the rollout, and of the row's picture
    returns                            [B]  max(-A ratio, -A clip(ratio)), and its health
    """
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    return loss, _health(ratio.detach(), clip_range)


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """KL divergence of one step's Gaussian from the reference's, the mean over elements as log-probs are.

    Exact, because both have the same std, which is that of the transition. Flow-GRPO's is `flow_grpo_kl_scale` of it.

    mean, reference_mean  [B, *S]
    std                   [B]      0 marks an ODE step: no Gaussian, and 0 is returned
    returns               [B]
    """
    is_random = std > 0
    safe = torch.where(is_random, std, torch.ones_like(std))
    divergence = (mean - reference_mean).square().flatten(1).mean(dim=1) / (2.0 * safe.square())
    return torch.where(is_random, divergence, torch.zeros_like(divergence))


def _health(ratio: Tensor, clip_range: float) -> LossHealth:
    outside = ((ratio - 1.0).abs() > clip_range).float().mean()
    return LossHealth(
        ratio_mean=float(ratio.mean()),
        ratio_max=float(ratio.max()),
        clip_share=float(outside),
    )
