"""The GRPO loss of a denoising step, per row, and its diagnostics.

Every (image, step) pair is a separate training row. Losses are returned unreduced: the transactional update fixes
the divisor before the first loss arrives (invariant 4).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossHealth:
    """Diagnostics of some rows. Ratios are 1 before the first update; otherwise rollout and training disagree."""

    ratio_mean: float
    ratio_max: float
    clip_share: float
    """Share of rows with a ratio outside the clip range."""


def grpo_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float
) -> tuple[Tensor, LossHealth]:
    """Return the clipped policy-gradient loss (research notes rl 1.2).

    log_prob, old_log_prob, advantage  [B]  log-prob now, log-prob at the rollout, advantage of the row's image
    returns                            [B]  max(-A ratio, -A clip(ratio)), and the diagnostics
    """
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    return loss, _health(ratio.detach(), clip_range)


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """Return the KL divergence of a step's Gaussian from the reference's, averaged over elements like log-probs.

    The value is exact, because both Gaussians have the std of the transition. Flow-GRPO's KL term is
    `flow_grpo_kl_scale` times the value.

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
