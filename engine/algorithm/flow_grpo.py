"""Flow-GRPO: the clipped policy gradient of denoising steps (arXiv 2505.05470).

A row is an (image, step) pair. The importance ratio compares the log-prob of the recorded step under the trained
weights with the log-prob at the rollout.

Workers that merge adapters (`models/merge.py`) compute with rounded weights, and a rounding of 1e-3 in a log-prob is as
large as the clip range. The log-probs at the rollout are then the trainer's own, of the weights that made the rollout,
and the worker's are only compared with them. Of early groups, those are the weights one version before.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.algorithm.health import EARLY
from engine.algorithm.objective import FinishedGroup, RowLosses, Rows
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm_config import AlgorithmConfig
from engine.diffusion.sampler import Plan, flow_grpo_kl_scale, log_prob, policy
from engine.models.adapter import DiTAdapter
from engine.models.load import ReferencePolicy


class FlowGrpo:
    """The objective of Flow-GRPO. With `kl_beta` above 0, a KL term holds the weights near `reference`."""

    records_trajectory = True

    def __init__(
        self, config: AlgorithmConfig, reference: ReferencePolicy | None = None, own: OldPolicy | None = None
    ) -> None:
        """Create the objective. `own`: computes the log-probs at the rollout again; None: the worker's are used."""
        self._config = config
        self._reference = reference
        self._own = own
        self.needs_log_probs = own is None
        self.neutral: Mapping[str, float] = {
            "ratio_mean": 1.0,
            "ratio_max": 1.0,
            "clip_share": 0.0,
            "kl": 0.0,
            "dlogp_abs_mean": 0.0,
            **({} if own is None else AGREE),
        }
        self.trains_equal_rewards = config.kl_beta > 0

    def rows_per_image(self, plan: Plan) -> int:
        return len(plan.trained_steps)

    def rows(self, group: FinishedGroup, advantages: Tensor, plan: Plan) -> Mapping[str, Tensor]:
        """Return `step_rows` with the log-probs at the rollout, `old` [R]."""
        old = torch.cat([trajectory.log_probs for trajectory in group.trajectories])
        return {**step_rows(group, advantages, plan), "old": old}

    def constants(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> Mapping[str, Tensor]:
        """Return the means of the reference policy and of the old policy, each [R, *S] and only if needed."""
        means = reference_means(self._config, self._reference, adapter, plan, rows)
        return {**means, **own_means(self._own, adapter, plan, rows)}

    def losses(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> RowLosses:
        mean, std = policy(adapter, plan, rows.conditioning, rows["x"], rows["step"])
        new, old = log_prob(rows["next_x"], mean, std), rows["old"]
        apart = {}
        if self._own is not None:
            old = log_prob(rows["next_x"], old_mean(rows, mean), std)
            apart = {"worker_dlogp_abs": (rows["old"] - old).abs()}
        ratio = (new - old).exp()
        loss = clipped_loss(ratio, rows["advantage"], self._config.clip_range)
        kl = kl_term(self._config, plan, rows, mean, std)
        ratio = ratio.detach()
        return RowLosses(
            loss=loss if kl is None else loss + self._config.kl_beta * kl,
            means={
                "ratio_mean": ratio,
                "clip_share": outside(ratio, self._config.clip_range),
                "kl": torch.zeros_like(ratio) if kl is None else kl.detach(),
                "dlogp_abs_mean": (new.detach() - old).abs(),
                **named(apart, "_mean"),
            },
            largest={"ratio_max": ratio, **named(apart, "_max")},
        )


def step_rows(group: FinishedGroup, advantages: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Return the recorded steps of a group: x and next_x [R, *S], step and advantage [R], image by image."""
    steps = torch.tensor(plan.trained_steps)
    return {
        "x": torch.cat([trajectory.latents[:-1] for trajectory in group.trajectories]),
        "next_x": torch.cat([trajectory.latents[1:] for trajectory in group.trajectories]),
        "step": steps.repeat(len(group.trajectories)),
        "advantage": advantages.repeat_interleave(len(steps)),
    }


def clipped_loss(ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """Return the clipped surrogate loss, max(-A ratio, -A clip(ratio, 1 - c, 1 + c)).

    ratio, advantage  [R]
    returns           [R]
    """
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def outside(ratio: Tensor, clip_range: float) -> Tensor:
    """Return 1 for rows with a ratio outside the clip range, else 0: [R] -> [R]."""
    return ((ratio - 1.0).abs() > clip_range).float()


def reference_means(
    config: AlgorithmConfig, reference: ReferencePolicy | None, adapter: DiTAdapter, plan: Plan, rows: Rows
) -> dict[str, Tensor]:
    """Return the means of the reference policy, or nothing if the loss has no KL term."""
    if config.kl_beta == 0 or reference is None:
        return {}
    with reference.active():
        mean, _ = policy(adapter, plan, rows.conditioning, rows["x"], rows["step"])
    return {"reference": mean}


AGREE = {"worker_dlogp_abs_mean": 0.0, "worker_dlogp_abs_max": 0.0}
"""Distance of the workers' log-probs from the trainer's, with workers that merge adapters."""


def own_means(own: OldPolicy | None, adapter: DiTAdapter, plan: Plan, rows: Rows) -> dict[str, Tensor]:
    """Return the means of the weights that made each rollout, as the trainer computes them.

    Rows of early groups were made by the weights one version before those of the others.

    own      [R, *S]
    has_own  [R]      False: these weights are still the trained ones, so the pass with gradients has the row's mean

    Returns nothing without `own`, or if no row needs a mean.
    """
    if own is None:
        return {}
    early = rows.tensors.get(EARLY, torch.zeros_like(rows["step"], dtype=torch.bool))
    means, has_own = None, torch.zeros_like(early)
    for whose, weights, differs in (
        (~early, own.active, own.differs),
        (early, own.before_active, own.differs or own.before is not None),
    ):
        some = whose.nonzero().squeeze(1)
        if not differs or not len(some):
            continue
        part = rows.at(some)
        with weights():
            mean, _ = policy(adapter, plan, part.conditioning, part["x"], part["step"])
        means = mean.new_zeros((len(rows), *mean.shape[1:])) if means is None else means
        means[some], has_own[some] = mean, True
    return {} if means is None else {"own": means, "has_own": has_own}


def old_mean(rows: Rows, mean: Tensor) -> Tensor:
    """Return the mean of the weights that made each rollout [R, *S]. `mean`: of the trained weights."""
    if "own" not in rows.tensors:
        return mean.detach()
    return torch.where(rows["has_own"].view((-1,) + (1,) * (mean.dim() - 1)), rows["own"], mean.detach())


def named(figures: Mapping[str, Tensor], end: str) -> dict[str, Tensor]:
    """Return the figures with longer names."""
    return {f"{name}{end}": value for name, value in figures.items()}


def kl_term(config: AlgorithmConfig, plan: Plan, rows: Rows, mean: Tensor, std: Tensor) -> Tensor | None:
    """Return the KL divergence from the reference [R] in the form of `config.kl_form`, or None without a reference."""
    if "reference" not in rows.tensors:
        return None
    kl = gaussian_kl(mean, rows["reference"], std)
    return kl * flow_grpo_kl_scale(plan, rows["step"]) if config.kl_form == "flow-grpo" else kl


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
