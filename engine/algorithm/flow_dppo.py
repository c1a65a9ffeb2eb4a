"""Flow-DPPO: Flow-GRPO with a limit on the divergence in the place of the clip (arXiv 2606.11025).

A clip range of the importance ratio is a noisy bound: the ratio of a step depends on the noise that was drawn. Both
policies of a step are Gaussians of one std, so their divergence is known exactly. With m the mean of the trained
policy, m_old the mean of the policy that made the rollout, and A the advantage:

    D = mean (m - m_old)^2 / (2 std^2)
    loss = 0 if D >= limit and (A > 0 and ratio > 1, or A < 0 and ratio < 1), else -A ratio

A step beyond the limit is therefore trained only if that leads back. As in `grpo_guard.py`, m_old follows from the
recorded latents and the noise e of the step, and so does the ratio:

    log ratio = mean e (m - m_old) / std - D
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.algorithm.flow_grpo import AGREE, kl_term, named
from engine.algorithm.grpo_guard import NoiseObjective
from engine.algorithm.objective import RowLosses, Rows
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm_config import AlgorithmConfig
from engine.diffusion.sampler import Plan, policy
from engine.models.adapter import DiTAdapter
from engine.models.load import ReferencePolicy


class FlowDppo(NoiseObjective):
    """The objective of Flow-DPPO. With `kl_beta` above 0, a KL term holds the weights near `reference`."""

    def __init__(
        self, config: AlgorithmConfig, reference: ReferencePolicy | None = None, own: OldPolicy | None = None
    ) -> None:
        """Create the objective. `own`: computes the means at the rollout again; None: they follow from the noise."""
        super().__init__(config, reference, own)
        self.neutral: Mapping[str, float] = {
            "ratio_mean": 1.0,
            "ratio_max": 1.0,
            "clip_share": 0.0,
            "old_kl": 0.0,
            "old_kl_max": 0.0,
            "kl": 0.0,
            **({} if own is None else AGREE),
        }

    def losses(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> RowLosses:
        mean, std = policy(adapter, plan, rows.conditioning, rows["x"], rows["step"])
        noise, apart = self.noise_of(rows, mean, std)
        loss, ratio, divergence, is_masked = dppo_losses(
            mean, rows["next_x"], std, noise, rows["advantage"], self._config.flow_dppo.kl_limit
        )
        kl = kl_term(self._config, plan, rows, mean, std)
        ratio, divergence = ratio.detach(), divergence.detach()
        return RowLosses(
            loss=loss if kl is None else loss + self._config.kl_beta * kl,
            means={
                "ratio_mean": ratio,
                "clip_share": is_masked.float(),
                "old_kl": divergence,
                "kl": torch.zeros_like(ratio) if kl is None else kl.detach(),
                **named(apart, "_mean"),
            },
            largest={"ratio_max": ratio, "old_kl_max": divergence, **named(apart, "_max")},
        )


def dppo_losses(
    mean: Tensor, next_x: Tensor, std: Tensor, noise: Tensor, advantage: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Flow-DPPO's losses, importance ratios, divergences, and the rows that are masked.

    mean, next_x, noise  [R, *S]  mean of the trained policy (with gradient), the recorded next latent, and the noise
                                  added to the old mean
    std, advantage       [R]
    limit                         divergence from which a row is trained only if that leads back
    returns              [R] each; the last is bool
    """
    moved = (mean - next_x) / std.view((-1,) + (1,) * (mean.dim() - 1)) + noise  # (m - m_old) / std
    divergence = moved.square().flatten(1).mean(dim=1) / 2.0
    ratio = ((noise * moved).flatten(1).mean(dim=1) - divergence).exp()
    leads_away = ((advantage > 0) & (ratio > 1.0)) | ((advantage < 0) & (ratio < 1.0))
    is_masked = (divergence >= limit) & leads_away
    return torch.where(is_masked, torch.zeros_like(ratio), -advantage * ratio), ratio, divergence, is_masked
