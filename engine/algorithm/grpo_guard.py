"""GRPO-Guard: Flow-GRPO with ratios and gradients of equal size at every step (arXiv 2510.22319).

Flow-GRPO's ratio drifts below 1, and its spread grows towards the image, so the clip range fits no step. GRPO-Guard
removes the drift and the scale. With m the mean of the trained policy, m_old the mean of the policy that made the
rollout, and e the noise of the step:

    ratio = exp(((log p - log p_old) + mean (m - m_old)^2 / (2 std^2)) std) = exp(mean e (m - m_old))

because next_x = m_old + std e. The noise is a function of (seed, step), so m_old follows from the recorded latents:
m_old = next_x - std e. Nothing more is stored or sent than with Flow-GRPO. With workers that merge adapters
(`models/merge.py`), the trainer computes m_old with the weights that made the rollout, and e = (next_x - m_old) / std.

The loss of a step is then divided by the length of the step, because the gradient of m is proportional to the length.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.algorithm.flow_grpo import (
    AGREE,
    clipped_loss,
    kl_term,
    named,
    old_mean,
    outside,
    own_means,
    reference_means,
    step_rows,
)
from engine.algorithm.objective import FinishedGroup, RowLosses, Rows
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm_config import AlgorithmConfig
from engine.diffusion.noise import noise_rows
from engine.diffusion.sampler import Plan, policy, step_coefficients
from engine.models.adapter import DiTAdapter
from engine.models.load import ReferencePolicy


class NoiseObjective:
    """What objectives share that know the old policy's mean from the noise of a step. Their losses differ."""

    records_trajectory = True
    needs_log_probs = False

    def __init__(
        self, config: AlgorithmConfig, reference: ReferencePolicy | None = None, own: OldPolicy | None = None
    ) -> None:
        """Create the objective. `own`: computes the means at the rollout again; None: they follow from the noise."""
        self._config = config
        self._own = own
        self._reference = reference
        self.trains_equal_rewards = config.kl_beta > 0

    def rows_per_image(self, plan: Plan) -> int:
        return len(plan.trained_steps)

    def rows(self, group: FinishedGroup, advantages: Tensor, plan: Plan) -> Mapping[str, Tensor]:
        """Return `step_rows` with the noise of each step, `noise` [R, *S]."""
        shape = tuple(group.trajectories[0].x.shape)
        by_step = [noise_rows(group.seeds, step + 1, shape) for step in plan.trained_steps]
        return {**step_rows(group, advantages, plan), "noise": torch.stack(by_step, dim=1).flatten(0, 1)}

    def constants(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> Mapping[str, Tensor]:
        """Return the means of the reference policy and of the old policy, each [R, *S] and only if needed."""
        means = reference_means(self._config, self._reference, adapter, plan, rows)
        return {**means, **own_means(self._own, adapter, plan, rows)}

    def noise_of(self, rows: Rows, mean: Tensor, std: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the noise that was added to the old policy's mean, and named figures [R] of how far workers differ.

        mean  [R, *S]  of the trained policy      std  [R]
        """
        if self._own is None:
            return rows["noise"], {}
        noise = (rows["next_x"] - old_mean(rows, mean)) / std.view((-1,) + (1,) * (mean.dim() - 1))
        # Log-probs of one step differ by their squares only.
        squares = noise.square() - rows["noise"].square()
        return noise, {"worker_dlogp_abs": (squares / 2.0).flatten(1).mean(dim=1).abs()}


class GrpoGuard(NoiseObjective):
    """The objective of GRPO-Guard. With `kl_beta` above 0, a KL term holds the weights near `reference`."""

    def __init__(
        self, config: AlgorithmConfig, reference: ReferencePolicy | None = None, own: OldPolicy | None = None
    ) -> None:
        """See `NoiseObjective`."""
        super().__init__(config, reference, own)
        agree = {} if own is None else AGREE
        self.neutral: Mapping[str, float] = {"ratio_mean": 1.0, "ratio_max": 1.0, "clip_share": 0.0, "kl": 0.0, **agree}
        self._clip_range = config.grpo_guard.clip_range

    def losses(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> RowLosses:
        mean, std = policy(adapter, plan, rows.conditioning, rows["x"], rows["step"])
        noise, apart = self.noise_of(rows, mean, std)
        ratio = normalised_ratio(mean, rows["next_x"], std, noise)
        weight = torch.tensor(step_weights(plan), device=mean.device)[rows["step"]]
        loss = weight * clipped_loss(ratio, rows["advantage"], self._clip_range)
        kl = kl_term(self._config, plan, rows, mean, std)
        ratio = ratio.detach()
        return RowLosses(
            loss=loss if kl is None else loss + self._config.kl_beta * kl,
            means={
                "ratio_mean": ratio,
                "clip_share": outside(ratio, self._clip_range),
                "kl": torch.zeros_like(ratio) if kl is None else kl.detach(),
                **named(apart, "_mean"),
            },
            largest={"ratio_max": ratio, **named(apart, "_max")},
        )


def normalised_ratio(mean: Tensor, next_x: Tensor, std: Tensor, noise: Tensor) -> Tensor:
    """Return GRPO-Guard's importance ratio (equation 8 of the paper, with the means written out; see above).

    mean, next_x, noise  [R, *S]  mean of the trained policy, the recorded next latent, and the noise added to the old
                                  mean
    std                  [R]      of the step
    returns              [R]      1 for the weights that made the rollout, up to rounding
    """
    old_mean = next_x - std.view((-1,) + (1,) * (mean.dim() - 1)) * noise
    return (noise * (mean - old_mean)).flatten(1).mean(dim=1).exp()


def step_weights(plan: Plan) -> list[float]:
    """Return the loss weight of every step, 0 for an ODE step.

    flow-sde: 1 / |dt|, the published weight (equation 12 of the paper). Other samplers: 1 / |b|, where b is the factor
    of the velocity in the step's mean, which equalises gradients in the same way. For flow-sde, both differ by the
    constant 1 + noise_level^2 / 2, but at the first step.
    """
    weights = []
    for step, is_random in enumerate(plan.stochastic):
        length = plan.sigmas[step] - plan.sigmas[step + 1]
        factor = length if plan.name == "flow-sde" else abs(step_coefficients(plan, step)[1])
        weights.append(1.0 / factor if is_random else 0.0)
    return weights
