"""Advantage Weighted Matching: the flow-matching loss as a likelihood (arXiv 2509.25050).

A row is an (image, noise level) pair, as with DiffusionNFT: x_s = (1 - s) x0 + s e, and v* = e - x0 is the velocity
that leads back to the image. How well a velocity matches is the log-likelihood of the image, by which the policy
gradient of PPO is computed:

    m(v) = mean (v - v*)^2
    log p(v) = -s (m^power - c) / power      `weighting: ghuber`, with m + 1e-10 for m, and c = 1e-10^power
    log p(v) = -m                            `weighting: uniform`
    ratio = exp(log p(v) - log p(v_old))
    loss = max(-a ratio, -a clip(ratio, 1 - c, 1 + c)) + old_weight mean (v - v_old)^2
    a = A / clip                             the advantage, clipped, from -1 to 1

v_old is the velocity of the weights that made the rollout (`old_policy.py`). The authors hold v near the velocity of an
average of earlier weights instead, whose share of old weights grows slowly from 0; with share 0 both are the same.
Their option `off_policy`, in which that average makes the rollouts too, is `old_policy_decay` here.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from engine.algorithm.diffusion_nft import fixed_velocities, mean_square, noised_rows
from engine.algorithm.flow_grpo import clipped_loss, outside
from engine.algorithm.objective import FinishedGroup, RowLosses, Rows
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm_config import AlgorithmConfig
from engine.diffusion.sampler import Plan
from engine.models.adapter import DiTAdapter
from engine.models.load import ReferencePolicy

LEAST_SQUARE = 1e-10
"""Added to the mean squared error before the power is taken, as published."""


class Awm:
    """The objective of Advantage Weighted Matching."""

    records_trajectory = False
    needs_log_probs = False
    neutral: Mapping[str, float] = {
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
        "clip_share": 0.0,
        "velocity_change": 0.0,
        "velocity_change_max": 0.0,
        "reference_distance": 0.0,
    }

    def __init__(self, config: AlgorithmConfig, old: OldPolicy, reference: ReferencePolicy | None = None) -> None:
        """Create the objective. `reference`: needed if `awm.reference_weight` is above 0."""
        self._awm = config.awm
        self._clip = config.advantage_clip
        self._old = old
        self._reference = reference if self._awm.reference_weight > 0 else None
        self.trains_equal_rewards = self._reference is not None

    def rows_per_image(self, plan: Plan) -> int:
        return self._awm.levels.of_image(plan.steps)

    def rows(self, group: FinishedGroup, advantages: Tensor, plan: Plan) -> Mapping[str, Tensor]:
        """Return `noised_rows` with a, the advantage from -1 to 1, `advantage` [R]."""
        weights = (advantages / self._clip).clamp(-1.0, 1.0).repeat_interleave(self.rows_per_image(plan))
        return {**noised_rows(group, self._awm.levels, plan), "advantage": weights}

    def constants(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> Mapping[str, Tensor]:
        """Return the velocities [R, *S] of the old policy, `old`, and of the reference, `reference`, if used."""
        return fixed_velocities(self._old, self._reference, adapter, plan, rows)

    def losses(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> RowLosses:
        awm = self._awm
        velocity = adapter.velocity(rows["x"], rows["sigma"], rows.conditioning, plan.guidance)
        new, old = (
            matching_log_prob(one, rows["target"], rows["sigma"], awm.weighting, awm.power)
            for one in (velocity, rows["old"])
        )
        ratio = (new - old).exp()
        change = mean_square(velocity - rows["old"])
        loss = clipped_loss(ratio, rows["advantage"], awm.clip_range) + awm.old_weight * change
        ratio, change, distance = ratio.detach(), change.detach(), torch.zeros_like(change)
        if "reference" in rows.tensors:
            difference = mean_square(velocity - rows["reference"])
            loss, distance = loss + awm.reference_weight * difference, difference.detach()
        return RowLosses(
            loss=loss,
            means={
                "ratio_mean": ratio,
                "clip_share": outside(ratio, awm.clip_range),
                "velocity_change": change,
                "reference_distance": distance,
            },
            largest={"ratio_max": ratio, "velocity_change_max": change},
        )


def matching_log_prob(
    velocity: Tensor, target: Tensor, sigma: Tensor, weighting: Literal["ghuber", "uniform"], power: float
) -> Tensor:
    """Return the log-likelihood of each image at its noise level. The module docstring has the formulas.

    velocity, target  [R, *S]  predicted velocity, and v*
    sigma             [R]      noise levels
    returns           [R]
    """
    error = mean_square(velocity - target)
    if weighting == "uniform":
        return -error
    # In double precision, as published: the ratio shows the digits that a power in single precision loses.
    grown: Tensor = (error.double() + LEAST_SQUARE).pow(power) - LEAST_SQUARE**power
    return (-sigma.double() * grown / power).to(error.dtype)
