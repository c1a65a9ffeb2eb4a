"""The contract of every model family: the same sampler, reward and update drive each of them.

Random weights, a few thousand parameters, real diffusers classes. A family that passes can be post-trained by the
engine, because nothing outside its adapter knows which family it is.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from engine.algorithm.advantages import group_advantages
from engine.algorithm.flow_grpo import clipped_loss, gaussian_kl
from engine.algorithm_config import AlgorithmConfig
from engine.clock import ScaledClock
from engine.config import EngineConfig, EvaluationConfig, ExplorationConfig, ModelConfig, RuntimeConfig, SamplerConfig
from engine.diffusion.sampler import Plan, advance, initial, policy, replay, rollout_plan
from engine.entrypoints.inproc import build_inproc
from engine.models.adapter import DiTAdapter, rows
from engine.models.digits import ByteText, DigitsAdapter, build_transformer
from engine.models.flux import FluxAdapter
from engine.models.hunyuan_video import HunyuanVideoAdapter
from engine.models.load import ReferencePolicy, freeze_but_trained, trainable
from engine.models.qwen_image import QwenImageAdapter
from engine.models.sd3 import SD3Adapter
from engine.models.text import EncodedText, at_norm
from engine.models.wan import WanAdapter
from engine.models.weights import get_weights
from engine.protocol.request import Score

WIDTH, LENGTH = 32, 8
"""Width of the text embedding in every family."""

TINY_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": WIDTH}


# --- tiny families


class TinyText:
    """A random two-layer T5 over bytes: needs no vocabulary file."""

    def __init__(self, pooled: int | None = None) -> None:
        config = T5Config(vocab_size=384, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
        self._model = T5EncoderModel(config).eval().requires_grad_(False)
        self._tokenizer = ByT5Tokenizer()
        self._pooled = pooled

    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        tokens = self._tokenizer(
            list(prompts), padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt"
        )
        hidden = self._model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
        pooled = hidden.mean(dim=1)[:, : self._pooled] if self._pooled else None
        return EncodedText(hidden, tokens.attention_mask.bool(), pooled)


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
    )


def tiny_qwen_image() -> DiTAdapter:
    transformer = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, axes_dims_rope=(4, 6, 6), **TINY_HEADS
    )
    return QwenImageAdapter(transformer, tiny_vae(), TinyText(), (8, 12))


def tiny_sd3() -> DiTAdapter:
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
        **TINY_HEADS,
    )
    return SD3Adapter(transformer, tiny_vae(), TinyText(pooled=16), (8, 12))


def tiny_flux(guidance_embeds: bool = True) -> DiTAdapter:
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=guidance_embeds,
        **TINY_HEADS,
    )
    return FluxAdapter(transformer, tiny_vae(), TinyText(pooled=16), (8, 12))


def tiny_wan() -> DiTAdapter:
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=WIDTH,
        freq_dim=16,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.1, 0.0, 0.0, 0.0],
        latents_std=[1.0, 2.0, 1.0, 1.0],
    )
    return WanAdapter(transformer, vae, TinyText(), (2, 4, 6))


def tiny_hunyuan_video() -> DiTAdapter:
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 3,
        up_block_types=("HunyuanVideoUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=2,
    )
    return HunyuanVideoAdapter(transformer, vae, TinyText(pooled=16), (2, 4, 6))


def tiny_digits() -> DiTAdapter:
    return DigitsAdapter(build_transformer(), ByteText())


@dataclass(frozen=True)
class Family:
    build: Callable[[], DiTAdapter]
    latent: tuple[int, ...]
    images: tuple[int, ...]
    guidance: float


FAMILIES = {
    "digits-ocr": Family(tiny_digits, (24, 16), (1, 12, 32), guidance=1.0),
    "qwen-image": Family(tiny_qwen_image, (24, 16), (3, 16, 24), guidance=2.0),
    "sd3": Family(tiny_sd3, (4, 8, 12), (3, 16, 24), guidance=2.0),
    "flux-dev": Family(tiny_flux, (24, 16), (3, 16, 24), guidance=3.5),
    "flux-schnell": Family(lambda: tiny_flux(guidance_embeds=False), (24, 16), (3, 16, 24), guidance=1.0),
    "wan": Family(tiny_wan, (4, 2, 4, 6), (3, 3, 8, 12), guidance=2.0),
    "hunyuan-video": Family(tiny_hunyuan_video, (4, 2, 4, 6), (3, 5, 8, 12), guidance=6.0),
}

PROMPTS, SEEDS = ["12", "34"], [1, 2]
"""Prompts of two groups with two seeds each."""


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return request.param


# --- one iteration, with the engine's own parts


@dataclass(frozen=True)
class Rollout:
    """Stored transitions of a batch, one row per (image, step), and the finished images."""

    prompts: list[str]
    x: Tensor
    next_x: Tensor
    step: Tensor
    log_prob: Tensor
    images: Tensor


def roll_out(adapter: DiTAdapter, plan: Plan) -> Rollout:
    prompts = [prompt for prompt in PROMPTS for _ in SEEDS]
    seeds = SEEDS * len(PROMPTS)
    conditioning = adapter.encode(prompts)
    x, stored = initial(seeds, adapter.latent_shape()), []
    for step in range(plan.steps):
        next_x, log_prob = advance(adapter, plan, conditioning, seeds, x, step)
        if plan.stochastic[step]:
            stored.append((x, next_x, torch.full((len(x),), step), log_prob))
        x = next_x
    before, after, steps, log_probs = (torch.cat(part) for part in zip(*stored, strict=True))
    return Rollout(prompts * len(plan.trained_steps), before, after, steps, log_probs, adapter.decode(x))


def brightness(images: Tensor) -> Tensor:
    return images.flatten(1).mean(dim=1)


def update(
    adapter: DiTAdapter,
    plan: Plan,
    rollout: Rollout,
    optimiser: torch.optim.Optimizer,
    reference: ReferencePolicy,
) -> tuple[Tensor, Tensor]:
    """Take one optimiser step over a whole rollout, with KL. Return the ratios and the KL per row."""
    rewards = brightness(rollout.images).reshape(len(PROMPTS), len(SEEDS))
    advantage = group_advantages(rewards).flatten().repeat(len(plan.trained_steps))
    conditioning = adapter.encode(rollout.prompts)
    with reference.active():
        reference_mean, _ = policy(adapter, plan, conditioning, rollout.x, rollout.step)
    mean, std = policy(adapter, plan, conditioning, rollout.x, rollout.step)
    log_prob = replay(adapter, plan, conditioning, rollout.x, rollout.next_x, rollout.step)
    ratio = (log_prob - rollout.log_prob).exp()
    loss = clipped_loss(ratio, advantage, clip_range=0.1)
    divergence = gaussian_kl(mean, reference_mean, std)
    optimiser.zero_grad()
    (loss + 0.01 * divergence).mean().backward()
    optimiser.step()
    return ratio.detach(), divergence.detach()


def frozen_weights(adapter: DiTAdapter) -> dict[str, Tensor]:
    """Return all weights that are not trained: the rest of the transformer, the VAE, the text encoder."""
    trained = {id(parameter) for parameter in trainable(adapter).values()}
    modules = {"transformer": adapter.transformer}
    for name in ("_vae", "text"):
        if isinstance(getattr(adapter, name, None), torch.nn.Module):
            modules[name] = getattr(adapter, name)
    return {
        f"{part}.{name}": parameter
        for part, module in modules.items()
        for name, parameter in module.named_parameters()
        if id(parameter) not in trained
    }


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_a_family_is_rolled_out_scored_and_trained(family, weights):
    adapter = family.build()
    freeze_but_trained(adapter, ModelConfig(weights=weights, lora_rank=2))
    plan = rollout_plan(SamplerConfig(steps=4, noise_level=0.7, guidance=family.guidance), run_seed=0, batch=0)
    reference = ReferencePolicy.of(adapter)
    optimiser = torch.optim.AdamW(trainable(adapter).values(), lr=1e-2, weight_decay=0.0)
    trained_before = {name: parameter.detach().clone() for name, parameter in trainable(adapter).items()}
    frozen_before = {name: parameter.clone() for name, parameter in frozen_weights(adapter).items()}

    rollout = roll_out(adapter, plan)
    assert adapter.latent_shape() == family.latent
    assert rollout.x.shape == (4 * 3, *family.latent)
    assert rollout.images.shape == (4, *family.images)
    assert rollout.images.abs().max() <= 1.0
    assert rollout.log_prob.isfinite().all()
    assert brightness(rollout.images).unique().numel() == 4

    first, no_divergence = update(adapter, plan, rollout, optimiser, reference)
    assert (first - 1.0).abs().max() < 1e-4
    assert no_divergence.max() < 1e-8
    second, divergence = update(adapter, plan, rollout, optimiser, reference)
    assert (second - 1.0).abs().max() > 1e-5
    assert divergence.min() > 0

    changed = [name for name, old in trained_before.items() if not torch.equal(old, trainable(adapter)[name])]
    assert len(changed) > len(trained_before) / 2
    assert all(parameter.isfinite().all() for parameter in trainable(adapter).values())
    now = frozen_weights(adapter)
    assert all(torch.equal(old, now[name]) for name, old in frozen_before.items())


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_a_family_goes_through_queue_worker_and_trainer_of_a_whole_run(family, weights, tmp_path):
    """The run takes two optimiser steps with KL to the base; a spot worker makes half of the rollouts."""

    def make_adapter() -> DiTAdapter:
        torch.manual_seed(0)
        adapter = family.build()
        freeze_but_trained(adapter, ModelConfig(weights=weights, lora_rank=2))
        return adapter

    def reward(images: Tensor, prompts: Sequence[str]) -> list[Score]:
        return [Score(reward=float(value), metrics={}) for value in brightness(images)]

    config = EngineConfig(
        iterations=1,
        sampler=SamplerConfig(steps=3, guidance=1.0),
        algorithm=AlgorithmConfig(prompts_per_batch=2, images_per_prompt=2, updates_per_batch=2, kl_beta=0.01),
        exploration=ExplorationConfig(mode="none"),
        evaluation=EvaluationConfig(prompts=2, every=1, steps=2, shape=2),
        runtime=RuntimeConfig(name="inproc", shape=2),
    )
    # The digits base has no unconditional branch, so the config refuses guidance; the tiny families have one.
    config = config.model_copy(update={"sampler": SamplerConfig(steps=3, guidance=family.guidance)})
    clock = ScaledClock(origin_ms=0)
    run = build_inproc(config, tmp_path, run="tiny", clock=clock, reward=reward, workers=1, make_adapter=make_adapter)
    before = get_weights(run.loop.model.parameters)
    finished = run.loop.run()
    assert finished.reason == "iterations", finished.text
    lines = [json.loads(line) for line in (tmp_path / "progress" / "trainer.jsonl").read_text().splitlines()]
    (done,) = [line["event"] for line in lines if line["kind"] == "iteration_done"]
    assert done["health"]["dlogp_before_update"] < 1e-4
    assert done["health"]["skipped_groups"] == 0
    assert done["health"]["gradient_norm"] > 0
    assert get_weights(run.loop.model.parameters) != before
    assert [line["event"]["iteration"] for line in lines if line["kind"] == "evaluated"] == [0, 1]


def test_rows_of_a_batch_are_independent(family):
    adapter = family.build()
    adapter.transformer.eval()
    x, sigma = initial([1, 2, 3], family.latent), torch.tensor([0.9, 0.5, 0.1])
    conditioning = adapter.encode(["12", "34", "5"])
    together = adapter.velocity(x, sigma, conditioning, family.guidance)
    order = torch.tensor([2, 0, 1])
    moved = adapter.velocity(x[order], sigma[order], rows(conditioning, order), family.guidance)
    torch.testing.assert_close(moved, together[order], atol=1e-6, rtol=1e-5)
    assert together.shape == x.shape
    assert together.dtype == torch.float32


def test_conditioning_depends_on_the_prompt_alone(family):
    adapter = family.build()
    alone, together = adapter.encode(["34"]), adapter.encode(["12", "34", "5"])
    for name, value in alone.items():
        torch.testing.assert_close(together[name][1:2], value, atol=1e-6, rtol=1e-5)
        assert together[name].shape[1:] == value.shape[1:]


def test_the_noise_level_reaches_the_network_in_its_own_units(family):
    adapter = family.build()
    seen = []
    adapter.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["timestep"]), with_kwargs=True
    )
    adapter.velocity(initial([1], family.latent), torch.tensor([0.25]), adapter.encode(["12"]), 1.0)
    thousand = isinstance(adapter, SD3Adapter | WanAdapter | HunyuanVideoAdapter)
    assert seen[0].tolist() == [250.0 if thousand else 0.25]


@pytest.mark.parametrize("build", [tiny_sd3, tiny_wan, lambda: tiny_flux(guidance_embeds=False)])
def test_guidance_moves_away_from_the_unconditional_branch(build):
    torch.manual_seed(0)
    adapter = build()
    adapter.transformer.eval()
    x, sigma = initial([1], adapter.latent_shape()), torch.tensor([0.5])
    conditional = adapter.velocity(x, sigma, adapter.encode(["12"]), 1.0)
    unconditional = adapter.velocity(x, sigma, adapter.encode([""]), 1.0)
    guided = adapter.velocity(x, sigma, adapter.encode(["12"]), 2.0)
    assert not torch.allclose(conditional, unconditional)
    torch.testing.assert_close(guided, 2.0 * conditional - unconditional, atol=1e-5, rtol=1e-4)


def test_qwen_images_guidance_keeps_the_norm_of_every_token_and_has_gradients():
    torch.manual_seed(0)
    adapter = tiny_qwen_image()
    adapter.transformer.eval()
    x, sigma = initial([1], adapter.latent_shape()), torch.tensor([0.5])
    conditional = adapter.velocity(x, sigma, adapter.encode(["12"]), 1.0)
    unconditional = adapter.velocity(x, sigma, adapter.encode([""]), 1.0)
    guided = adapter.velocity(x, sigma, adapter.encode(["12"]), 4.0)
    combined = unconditional + 4.0 * (conditional - unconditional)
    scale = conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(guided, scale * combined, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(guided.norm(dim=-1), conditional.norm(dim=-1))
    assert not torch.allclose(guided, combined, atol=1e-4)
    # The derivative along a direction of one weight matrix equals the difference quotient, norms included.
    weight = adapter.transformer.proj_out.weight
    guided[0, 0, 0].backward()
    direction = torch.randn_like(weight)
    slope = float((weight.grad * direction).sum())
    values = []
    for step in (1e-2, -1e-2):
        with torch.no_grad():
            moved = weight + step * direction
            kept, weight.data = weight.data, moved
            values.append(float(adapter.velocity(x, sigma, adapter.encode(["12"]), 4.0)[0, 0, 0]))
            weight.data = kept
    assert slope == pytest.approx((values[0] - values[1]) / 2e-2, rel=1e-2)


def test_a_token_without_velocity_keeps_finite_gradients():
    velocity = torch.zeros(1, 2, 4, requires_grad=True)
    scaled = at_norm(velocity, torch.ones(1, 2, 4))
    scaled.sum().backward()
    assert scaled.isfinite().all()
    assert velocity.grad.isfinite().all()


@pytest.mark.parametrize("build", [tiny_flux, tiny_hunyuan_video])
def test_distilled_guidance_is_an_input_of_the_network(build):
    torch.manual_seed(0)
    adapter = build()
    x, sigma, conditioning = initial([1], adapter.latent_shape()), torch.tensor([0.5]), adapter.encode(["12"])
    assert not torch.allclose(
        adapter.velocity(x, sigma, conditioning, 1.0), adapter.velocity(x, sigma, conditioning, 3.5)
    )


def test_padding_behind_a_short_prompt_is_masked_in_qwen_image():
    torch.manual_seed(0)
    adapter = tiny_qwen_image()
    adapter.transformer.eval()
    x, sigma, conditioning = initial([1], adapter.latent_shape()), torch.tensor([0.5]), adapter.encode(["12"])
    rubbish = torch.where(conditioning["mask"][..., None], conditioning["hidden"], torch.tensor(7.0))
    torch.testing.assert_close(
        adapter.velocity(x, sigma, {**conditioning, "hidden": rubbish}, 1.0),
        adapter.velocity(x, sigma, conditioning, 1.0),
        atol=1e-5,
        rtol=1e-4,
    )


def test_qwen_image_decodes_with_its_own_video_autoencoder():
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    adapter = QwenImageAdapter(tiny_qwen_image().transformer, vae, TinyText(), (8, 12))
    assert adapter.decode(initial([1, 2], adapter.latent_shape())).shape == (2, 3, 16, 24)
