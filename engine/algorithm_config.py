"""Define the job file's `algorithm` section. The module does not import torch, like `engine/config.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from engine.strict import BelowOne, Positive, Strict

AlgorithmName = Literal["flow-grpo", "grpo-guard", "flow-dppo", "diffusion-nft", "awm"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmFacts:
    """What sampler, forecasts and launcher must know of an algorithm. Its loss is in `engine/algorithm`, with torch."""

    section: str | None
    """Name of the algorithm's own section in `algorithm`. None: it has none."""
    trains_images: bool
    """True: an image has a training row for each of some noise levels, and every row takes a pass of the old policy.
    Rollouts record the final latent only, and use the ODE and no guidance unless the job says otherwise. The loss
    compares with the weights before the batch, so no group may be early. False: rows are recorded stochastic steps."""


FACTS: Mapping[str, AlgorithmFacts] = {
    "flow-grpo": AlgorithmFacts(section=None, trains_images=False),
    "grpo-guard": AlgorithmFacts(section="grpo_guard", trains_images=False),
    "flow-dppo": AlgorithmFacts(section="flow_dppo", trains_images=False),
    "diffusion-nft": AlgorithmFacts(section="diffusion_nft", trains_images=True),
    "awm": AlgorithmFacts(section="awm", trains_images=True),
}


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


class FlowDppoConfig(Strict):
    """Settings of `algorithm.name: flow-dppo` (arXiv 2606.11025)."""

    kl_limit: Annotated[float, Field(gt=0.0)] = 1e-5
    """Divergence of a step from the weights that made the rollout, above which the step is trained only back towards
    those weights. It takes the place of `algorithm.clip_range`. UniRL and verl-omni publish 1e-5 for SD3.5 and
    Qwen-Image at 512 x 512 pixels."""


class LevelsConfig(Strict):
    """Noise levels at which an image is trained, out of those of a rollout."""

    # `from` is a Python keyword, so the field has another name. Every file and message says `from`.
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    count: Positive | None = None
    """Levels of an image, drawn for each image from `from`. None: all levels of `from`."""
    out_of: Literal["noisier", "all"] = Field(default="noisier", alias="from")
    """Levels to choose from: `noisier` is the noisier half of a rollout's levels, half a level rounded up; `all` is
    every level of a rollout but the image itself."""

    def pool(self, steps: int) -> int:
        """Return the number of levels to choose from, the noisiest first. `steps`: of a rollout."""
        return steps if self.out_of == "all" else (steps + 1) // 2

    def of_image(self, steps: int) -> int:
        """Return the number of levels at which an image is trained. `steps`: of a rollout."""
        return self.pool(steps) if self.count is None else min(self.count, self.pool(steps))


class ImageTrainingConfig(Strict):
    """Settings of every algorithm that trains noised images."""

    levels: LevelsConfig = LevelsConfig()
    """Noise levels at which an image is trained. Training takes a time proportional to their number. Half of the levels
    learn as fast an iteration at first, and drift further from the base model (docs/algorithms.md)."""
    old_policy_decay: Literal["none", "gradual", "late"] = "none"
    """Schedule of the weights that make the rollouts: an average that keeps a share of the old weights after a batch.
    `none`: share 0, so the newest trained weights make the rollouts. `gradual`: share .001 for each optimiser step so
    far, up to .5. `late`: share 0 for 75 optimiser steps, then .0075 more with each step, up to .999. DiffusionNFT
    publishes all three; a larger share is slower and steadier."""
    reference_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the mean squared distance from the base model's velocity; 0 computes no distance. DiffusionNFT uses
    1e-4, AWM 1e-4 to 3e-3."""


class DiffusionNftConfig(ImageTrainingConfig):
    """Settings of `algorithm.name: diffusion-nft` (arXiv 2509.16117)."""

    beta: Annotated[float, Field(gt=0.0, le=2.0)] = 0.1
    """Share of the trained velocity in the two compared velocities: a small beta moves the weights further for the same
    reward. The paper uses 1, and 0.1 for text in images."""


class AwmConfig(ImageTrainingConfig):
    """Settings of `algorithm.name: awm` (arXiv 2509.25050)."""

    weighting: Literal["ghuber", "uniform"] = "ghuber"
    """Log-likelihood of an image at a noise level s, from the mean squared error m of the velocity. `uniform`: -m.
    `ghuber`: -s m^power / power, which the authors train with."""
    power: Annotated[float, Field(gt=0.0, le=1.0)] = 0.25
    """Power of the error with `weighting: ghuber`. The authors use .25."""
    clip_range: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Clip range of the ratio of likelihoods, in the place of `algorithm.clip_range`. The authors use 1."""
    old_weight: Annotated[float, Field(ge=0.0)] = 1.0
    """Weight of the mean squared distance from the old policy's velocity. The authors use 1, with an average of earlier
    weights whose share of old weights grows by .001 an optimiser step, up to .3."""


class AlgorithmConfig(Strict):
    """Training algorithm, with the settings that all algorithms share (docs/algorithms.md)."""

    name: Literal["auto", "flow-grpo", "grpo-guard", "flow-dppo", "diffusion-nft", "awm"] = "flow-grpo"
    """Training algorithm. `auto`: the algorithm that docs/algorithms.md recommends for the model. `flow-grpo`: clipped
    policy gradient of the denoising steps (arXiv 2505.05470). `grpo-guard`: the same with ratios and gradients of equal
    size at every step. `flow-dppo`: the same with a limit on the divergence in the place of the clip. `diffusion-nft`:
    trains on noised final images, without log-probs, and rolls out with the ODE and without guidance unless
    `sampler.noise_level` and `sampler.guidance` say otherwise. `awm`: the same with likelihoods weighted by the
    advantage."""
    grpo_guard: GrpoGuardConfig = GrpoGuardConfig()
    """Settings of grpo-guard."""
    flow_dppo: FlowDppoConfig = FlowDppoConfig()
    """Settings of flow-dppo."""
    diffusion_nft: DiffusionNftConfig = DiffusionNftConfig()
    """Settings of diffusion-nft."""
    awm: AwmConfig = AwmConfig()
    """Settings of awm."""
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
    """Largest absolute value of an advantage; larger advantages are clipped. diffusion-nft and awm divide by the value
    too. With diffusion-nft a smaller value also lets the weights move further from the old policy."""
    gradient_clip: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest norm of the gradient of an optimiser step; larger gradients are scaled down."""
    kl_beta: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the KL divergence from the base model; 0 computes no divergence. Not for diffusion-nft and awm, which
    have `reference_weight`."""
    kl_form: Literal["flow-grpo", "gaussian"] = "flow-grpo"
    """Formula of the KL divergence. `gaussian`: the exact divergence between the two transitions of a step.
    `flow-grpo`: the published form, which multiplies the exact divergence by the step's length in noise levels. With 8
    to 28 steps the published form is 5 to 28 times smaller."""
    adam_betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    """AdamW's decay rates. Flow-GRPO publishes .9 and .999, chosen for longer runs."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's weight decay. Flow-GRPO publishes 1e-4."""
    std: Literal["group", "batch", "ema"] = "group"
    """Divisor of advantages: the standard deviation of the group, of the batch, or of earlier batches. `batch` is the
    global std that DiffusionNFT and AWM publish; no group trains before all rewards of the batch are known. `group` is
    what Flow-Factory uses for DiffusionNFT."""
    std_correction: Literal[0, 1] = 0
    """Divisor of a group's variance: the group size (0, as Flow-GRPO) or the size minus 1 (1, as DanceGRPO)."""
    ema_decay: BelowOne = 0.7
    """Largest share of the old average kept each iteration; iteration n keeps (1 + n) / (10 + n) at most, as flow_grpo
    and DiffusionNFT publish. Evaluation uses the averaged weights."""
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
        for name, facts in FACTS.items():
            section = facts.section
            if section is None or self.name == name:
                continue
            if getattr(self, section) != type(self).model_fields[section].default:
                raise ValueError(
                    f"algorithm.{section} is set, but algorithm.name is {self.name}; use name: {name}, or leave "
                    f"{section} out"
                )
        if self.image_training is not None and self.kl_beta > 0:
            raise ValueError(
                f"kl_beta is {self.kl_beta:g}, but {self.name} has no denoising policy to compare; use "
                f"{FACTS[self.name].section}.reference_weight (DiffusionNFT uses 1e-4), or kl_beta: 0"
            )
        return self

    @property
    def image_training(self) -> ImageTrainingConfig | None:
        """Return the settings of an algorithm that trains noised images. None: the algorithm trains steps, or is auto.

        `EngineConfig` replaces `auto` by the recommended algorithm.
        """
        if self.name == "auto" or not FACTS[self.name].trains_images:
            return None
        settings = getattr(self, FACTS[self.name].section or "")
        assert isinstance(settings, ImageTrainingConfig)
        return settings

    @property
    def keeps_reference(self) -> bool:
        """Return True if the loss has a term that holds the weights near the base model."""
        trained = self.image_training
        return self.kl_beta > 0 or (trained is not None and trained.reference_weight > 0)
