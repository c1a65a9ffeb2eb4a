"""Define the job file's `algorithm` section. The module does not import torch, like `engine/config.py`."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.strict import BelowOne, Positive, Strict

AlgorithmName = Literal["flow-grpo", "grpo-guard", "diffusion-nft"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The algorithm that `algorithm.name: auto` means, and the reason in one sentence."""

    name: AlgorithmName
    reason: str


def recommended(model: str) -> Recommendation:
    """Return the recommended algorithm for a model. docs/algorithms.md has the measurements."""
    if model == "digits-ocr":
        reason = "on digits-ocr it reached the target in a fifth of the iterations of flow-grpo (10 seeds)"
    else:
        reason = (
            "the published results on SD3.5 need fewer iterations than flow-grpo; spotrl did not measure this model"
        )
    return Recommendation(name="diffusion-nft", reason=reason)


class GrpoGuardConfig(Strict):
    """Settings of `algorithm.name: grpo-guard` (arXiv 2510.22319)."""

    clip_range: Annotated[float, Field(gt=0.0)] = 2e-6
    """Clip range of GRPO-Guard's ratio, in the place of `algorithm.clip_range`. verl-omni publishes 2e-6 for Qwen-Image
    at 512 x 512 pixels. The ratio is nearer to 1 in larger latents: use 2.5e-4 for digits-ocr."""


class DiffusionNftConfig(Strict):
    """Settings of `algorithm.name: diffusion-nft` (arXiv 2509.16117)."""

    beta: Annotated[float, Field(gt=0.0, le=2.0)] = 0.1
    """Share of the trained velocity in the two compared velocities: a small beta moves the weights further for the same
    reward. The paper uses 1, and 0.1 for text in images."""
    old_policy_decay: Literal["none", "gradual", "late"] = "none"
    """Schedule of the weights that make the rollouts: an average that keeps a share of the old weights each batch.
    `none`: share 0, so the newest trained weights make the rollouts. `gradual`: share .001 more each batch, up to .5.
    `late`: share 0 for 75 batches, then .0075 more each batch, up to .999. The paper publishes all three; a larger
    share is slower and steadier."""
    reference_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the mean squared distance from the base model's velocity; 0 computes no distance. The paper uses
    1e-4."""


class AlgorithmConfig(Strict):
    """Training algorithm, with the settings that all algorithms share (docs/algorithms.md)."""

    name: Literal["auto", "flow-grpo", "grpo-guard", "diffusion-nft"] = "flow-grpo"
    """Training algorithm. `auto`: the algorithm that docs/algorithms.md recommends for the model. `flow-grpo`: clipped
    policy gradient of the denoising steps (arXiv 2505.05470). `grpo-guard`: the same with ratios and gradients of equal
    size at every step. `diffusion-nft`: trains on noised final images, without log-probs, and rolls out with the ODE
    unless `sampler.noise_level` says otherwise."""
    grpo_guard: GrpoGuardConfig = GrpoGuardConfig()
    """Settings of grpo-guard."""
    diffusion_nft: DiffusionNftConfig = DiffusionNftConfig()
    """Settings of diffusion-nft."""
    prompts_per_batch: Positive = 12
    """Prompts trained in one iteration. `updates_per_batch` must divide the number."""
    images_per_prompt: int = 4
    """Group size: the number of images of one prompt. Rewards are compared within a group."""
    updates_per_batch: Positive = 2
    """Optimiser steps per batch. Each step trains its own share of the prompts."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-4
    """AdamW's learning rate, constant over the run."""
    stop_without_learning: Positive = 20
    """Batches in a row that teach nothing, after which the run ends as `unhealthy`: all rewards of each group are
    equal, all groups are skipped, or the gradient is 0. A warning comes after three."""
    clip_range: Annotated[float, Field(gt=0.0)] = 1e-3
    """Clip range of the importance ratio of flow-grpo: the loss clips the ratio to 1 - `clip_range` .. 1 +
    `clip_range`."""
    advantage_clip: Annotated[float, Field(gt=0.0)] = 5.0
    """Largest absolute value of an advantage; larger advantages are clipped. diffusion-nft divides by the value too."""
    gradient_clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest norm of the gradient of an optimiser step; larger gradients are scaled down."""
    kl_beta: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL divergence from the base model; 0 computes no divergence. Not for diffusion-nft, which has
    `diffusion_nft.reference_weight`."""
    kl_form: Literal["flow-grpo", "gaussian"] = "flow-grpo"
    """Formula of the KL divergence. `gaussian`: the exact divergence between the two transitions of a step.
    `flow-grpo`: the published form, which multiplies the exact divergence by the step's length in noise levels. With 8
    to 28 steps the published form is 5 to 28 times smaller."""
    adam_betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    """AdamW's decay rates. Flow-GRPO publishes .9 and .999, chosen for longer runs."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's weight decay. Flow-GRPO publishes 1e-4."""
    std: Literal["group", "batch", "ema"] = "group"
    """Divisor of advantages: the standard deviation of the group, of the batch, or of earlier batches."""
    std_correction: Literal[0, 1] = 0
    """Divisor of a group's variance: the group size (0, as Flow-GRPO) or the size minus 1 (1, as DanceGRPO)."""
    ema_decay: BelowOne = 0.7
    """Share of the old average kept each iteration. Evaluation uses the averaged weights."""
    rows_per_forward: Positive = 168
    """Most (image, step) or (image, noise level) pairs in one training forward pass (time-step parallelism, TSP). A
    pass that runs out of memory halves the number for the rest of the run, and its optimiser step starts again."""
    unit: Literal["rows", "auto"] | Positive = "rows"
    """Groups that train together once all of them are complete, in passes of `rows_per_forward` rows. `rows`: as many
    as fit into one pass. A smaller unit is complete earlier, so training begins while more groups are sampled. `auto`:
    the quickest unit by the rates measured in the run, of at most one pass. Two runs may then choose differently, and
    differ by rounding."""
    order: Literal["fixed", "arrival", "exact"] = "fixed"
    """Order of gradient accumulation. `fixed` accumulates by group number, so a repeated run is bit-identical. `exact`
    is bit-identical too, and trains units of groups as they complete: gradients are added in 64-bit fixed point, for
    8 bytes of memory a trained weight. `arrival` differs by rounding."""

    @field_validator("images_per_prompt")
    @classmethod
    def _a_group_compares(cls, value: int) -> int:
        if value < 2:
            raise ValueError(
                f"images_per_prompt is {value}; use 2 or more, "
                "because an image alone in its group always has advantage 0"
            )
        return value

    @model_validator(mode="after")
    def _updates_have_prompts(self) -> Self:
        if self.prompts_per_batch % self.updates_per_batch:
            raise ValueError(
                f"prompts_per_batch is {self.prompts_per_batch}, which updates_per_batch "
                f"({self.updates_per_batch}) does not divide; every update takes whole prompts"
            )
        return self

    @model_validator(mode="after")
    def _settings_are_of_the_algorithm(self) -> Self:
        for name, section in (("grpo-guard", "grpo_guard"), ("diffusion-nft", "diffusion_nft")):
            if self.name != name and getattr(self, section) != type(self).model_fields[section].default:
                raise ValueError(
                    f"algorithm.{section} is set, but algorithm.name is {self.name}; use name: {name}, or leave "
                    f"{section} out"
                )
        if self.name == "diffusion-nft" and self.kl_beta > 0:
            raise ValueError(
                f"kl_beta is {self.kl_beta:g}, but diffusion-nft has no denoising policy to compare; use "
                "diffusion_nft.reference_weight (the paper uses 1e-4), or kl_beta: 0"
            )
        return self
