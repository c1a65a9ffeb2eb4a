"""DiffusionNFT: forward-process training on finished images (arXiv 2509.16117).

A row is an (image, noise level) pair. The final latent x0 of a rollout is noised again, x_s = (1 - s) x0 + s e, and the
network learns from it what to do more (high reward) and what to do less (low reward):

    v* = e - x0                             the velocity that leads back to the image
    v+ = (1 - beta) v_old + beta v          towards the trained weights
    v- = (1 + beta) v_old - beta v          away from them, by the same amount
    r  = clip(A / clip, -1, 1) / 2 + 1 / 2  share of the reward, 1 for the best image
    loss = clip / beta (r |x0+ - x0|^2 / w+ + (1 - r) |x0- - x0|^2 / w-)

with x0+ = x_s - s v+, x0- = x_s - s v-, and w the mean absolute error of each, held constant. v_old is the velocity of
the weights that made the rollout (`old_policy.py`). Rollouts need no trajectory and no log-prob, so every sampler will
do; the default is the ODE, as published. The levels of an image and the noise e are functions of (seed, level):
repeated runs are bit-identical.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.algorithm.objective import FinishedGroup, RowLosses, Rows
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm_config import AlgorithmConfig, LevelsConfig
from engine.diffusion.noise import noise_rows
from engine.diffusion.sampler import Plan
from engine.models.adapter import DiTAdapter
from engine.models.load import ReferencePolicy

FIRST_NOISE = 1 << 32
"""Noise number of the noisiest level. Denoising steps use the numbers from 0 up: training noise is never a step's."""

LEVEL_DRAW = FIRST_NOISE - 1
"""Noise number of the draw of an image's levels."""

LEAST_ERROR = 1e-5
"""Lower limit of the adaptive weight, as published."""


class DiffusionNft:
    """The objective of DiffusionNFT."""

    records_trajectory = False
    needs_log_probs = False
    neutral: Mapping[str, float] = {
        "velocity_change": 0.0,
        "velocity_change_max": 0.0,
        "positive_loss": 0.0,
        "negative_loss": 0.0,
        "reference_distance": 0.0,
    }

    def __init__(self, config: AlgorithmConfig, old: OldPolicy, reference: ReferencePolicy | None = None) -> None:
        """Create the objective. `reference`: needed if `diffusion_nft.reference_weight` is above 0."""
        self._nft = config.diffusion_nft
        self._clip = config.advantage_clip
        self._old = old
        self._reference = reference if self._nft.reference_weight > 0 else None
        self.trains_equal_rewards = self._reference is not None

    def rows_per_image(self, plan: Plan) -> int:
        return self._nft.levels.of_image(plan.steps)

    def rows(self, group: FinishedGroup, advantages: Tensor, plan: Plan) -> Mapping[str, Tensor]:
        """Return `noised_rows` with r, the share of the reward, `share` [R]."""
        share = reward_share(advantages, self._clip).repeat_interleave(self.rows_per_image(plan))
        return {**noised_rows(group, self._nft.levels, plan), "share": share}

    def constants(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> Mapping[str, Tensor]:
        """Return the velocities [R, *S] of the old policy, `old`, and of the reference, `reference`, if used."""
        return fixed_velocities(self._old, self._reference, adapter, plan, rows)

    def losses(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> RowLosses:
        velocity = adapter.velocity(rows["x"], rows["sigma"], rows.conditioning, plan.guidance)
        positive, negative = nft_losses(velocity, rows["old"], rows["target"], rows["sigma"], self._nft.beta)
        share = rows["share"]
        loss = self._clip / self._nft.beta * (share * positive + (1.0 - share) * negative)
        change = mean_square(velocity.detach() - rows["old"])
        distance = torch.zeros_like(change)
        if "reference" in rows.tensors:
            difference = mean_square(velocity - rows["reference"])
            loss, distance = loss + self._nft.reference_weight * difference, difference.detach()
        return RowLosses(
            loss=loss,
            means={
                "velocity_change": change,
                "positive_loss": positive.detach(),
                "negative_loss": negative.detach(),
                "reference_distance": distance,
            },
            largest={"velocity_change_max": change},
        )


def noised_rows(group: FinishedGroup, levels: LevelsConfig, plan: Plan) -> dict[str, Tensor]:
    """Return a row for every image and each of its noise levels, image by image, the noisiest level first.

    x, target  [R, *S]  x_s and v* of the module docstring
    sigma      [R]
    """
    images = torch.stack([trajectory.x for trajectory in group.trajectories]).float()
    chosen = drawn_levels(group.seeds, levels, plan.steps)
    shape, pool = tuple(images.shape[1:]), levels.pool(plan.steps)
    noise = torch.stack([noise_rows(group.seeds, FIRST_NOISE + k, shape) for k in range(pool)], dim=1)
    noise = noise[torch.arange(len(images))[:, None], chosen].flatten(0, 1)  # [K, pool, *S] -> [R, *S]
    sigma = torch.tensor(plan.sigmas[:-1], dtype=torch.float32)[chosen].flatten()
    clean = images.repeat_interleave(chosen.shape[1], dim=0)
    s = _beside(sigma, clean)
    return {"x": (1.0 - s) * clean + s * noise, "target": noise - clean, "sigma": sigma}


def fixed_velocities(
    old: OldPolicy, reference: ReferencePolicy | None, adapter: DiTAdapter, plan: Plan, rows: Rows
) -> dict[str, Tensor]:
    """Return the velocities [R, *S] of the old policy, `old`, and of the reference, `reference`, if there is one."""
    with old.active():
        velocities = {"old": adapter.velocity(rows["x"], rows["sigma"], rows.conditioning, plan.guidance)}
    if reference is not None:
        with reference.active():
            velocities["reference"] = adapter.velocity(rows["x"], rows["sigma"], rows.conditioning, plan.guidance)
    return velocities


def drawn_levels(seeds: Sequence[int], levels: LevelsConfig, steps: int) -> Tensor:
    """Return the noise levels of each image, as indices into a plan's levels: long [K, L], ascending in each row.

    Where fewer levels are trained than there are to choose from, each image draws its own, without replacement.
    """
    pool, count = levels.pool(steps), levels.of_image(steps)
    if count == pool:
        return torch.arange(pool).expand(len(seeds), pool)
    return noise_rows(seeds, LEVEL_DRAW, (pool,)).argsort(dim=1)[:, :count].sort(dim=1).values


def reward_share(advantages: Tensor, clip: float) -> Tensor:
    """Return r, the advantages as shares from 0 to 1: clip(A / clip, -1, 1) / 2 + 1 / 2. [K] -> [K]."""
    return (advantages / clip).clamp(-1.0, 1.0) / 2.0 + 0.5


def nft_losses(velocity: Tensor, old: Tensor, target: Tensor, sigma: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the losses of v+ and v-, before the shares. The module docstring has the formulas.

    The published form compares predicted images. Here the same numbers come from velocities, because
    x0+ - x0 = s (v* - v+).

    velocity, old, target  [R, *S]  of the trained weights (with gradient), of the old policy, and v*
    sigma                  [R]      noise levels
    returns                [R], [R]
    """
    s = _beside(sigma, velocity)
    step = beta * (velocity - old)
    return _weighted(s * (old + step - target)), _weighted(s * (old - step - target))


def _weighted(error: Tensor) -> Tensor:
    """Return the mean square of each row's error, divided by its mean absolute error: [R, *S] -> [R]."""
    size = error.detach().abs().flatten(1).mean(dim=1).clamp(min=LEAST_ERROR)
    return mean_square(error) / size


def mean_square(values: Tensor) -> Tensor:
    """Return the mean square of each row: [R, *S] -> [R]."""
    return values.square().flatten(1).mean(dim=1)


def _beside(row_values: Tensor, like: Tensor) -> Tensor:
    """Return [R] as [R, 1, ..., 1], with as many dimensions as `like`."""
    return row_values.view((-1,) + (1,) * (like.dim() - 1))
