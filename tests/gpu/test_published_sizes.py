"""Models of published sizes with random weights on one 80 GB GPU: seconds and memory of training steps and of rollouts.

Every figure is kept as soon as it is measured, so a run that is cut off keeps what it has. A number of rows that does
not fit is kept as "out of memory". The same functions run on the CPU with narrow models.
"""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from engine.config import ModelConfig
from engine.models.flux import FluxAdapter
from engine.models.half import half_precision
from engine.models.load import freeze_but_trained, recompute_blocks, trainable
from engine.models.sd3 import SD3Adapter
from engine.models.text import EncodedText
from engine.models.wan import WanAdapter
from tests.gpu.device import describe_device, keep_figures, needs_gpus
from tests.gpu.test_qwen_image_20b import LORA, NARROW, PUBLISHED, build, finish, inputs, peak_gib

OUT_OF_MEMORY = "out of memory"
RUNS = 3
LIMIT_S = 12.0
"""A case that has taken this long, with its first slow run, is not run again. It always has one measured run."""
GUIDANCE = 4.0
UNGUIDED_IMAGES = 4  # also measured without guidance: one pass in place of two
FULL = ModelConfig(name="sd3", path="none", weights="full")

LORA_ROWS = {512: (1, 2, 4, 8, 16), 1280: (1, 2, 4)}
ROLLOUT_IMAGES = {512: (1, 4, 8, 16, 32), 1280: (1, 2, 4, 8)}
FORWARD_ROWS = (1, 4)
FEW = {16: (1, 2), 32: (4,)}  # for narrow models


@dataclass(frozen=True)
class Family:
    """A published transformer, its adapter, and the sizes that are measured."""

    transformer: Callable[..., nn.Module]
    adapter: Callable[..., Any]
    text_tokens: int
    latents: dict[str, tuple[int, ...]]
    billions: float
    config: dict[str, Any]
    """What differs from diffusers' default, which is the size of FLUX.1 and of Wan 14 B."""
    narrow: dict[str, Any]
    """What differs from `config` in the model for the CPU."""

    def built(self, device, dtype, *, is_narrow=False):
        """Return the adapter by size, all over one transformer that is created on the device."""
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                transformer = self.transformer(**self.config | (self.narrow if is_narrow else {}))
        finally:
            torch.set_default_dtype(usual)
        transformer, sizes = transformer.eval().to(device), transformer.config

        def encode(prompts):
            shape = (len(prompts), self.text_tokens)
            hidden = torch.randn(*shape, sizes.get("joint_attention_dim", sizes.get("text_dim")), device=device)
            pooled = torch.randn(len(prompts), sizes.get("pooled_projection_dim", 1), device=device)
            return EncodedText(hidden, torch.ones(shape, dtype=torch.bool, device=device), pooled)

        small = {"small": tuple(min(4, side) for side in next(iter(self.latents.values())))}
        latents = small if is_narrow else self.latents
        return {size: self.adapter(transformer, nn.Identity(), encode, latent) for size, latent in latents.items()}


IMAGES = {"512 px": (64, 64), "1024 px": (128, 128)}
VIDEO = {"33 frames of 240 x 416": (9, 30, 52)}

LAYERS = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12}
TEXT = {"joint_attention_dim": 32, "pooled_projection_dim": 16}
FLUX_NARROW = LAYERS | TEXT | {"num_single_layers": 2, "axes_dims_rope": (4, 4, 4)}
SD3_LAYERS = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "qk_norm": "rms_norm"}
SD3_SIZES = SD3_LAYERS | {"pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13))}
SD3_NARROW = LAYERS | TEXT | {"sample_size": 8, "caption_projection_dim": 24, "pos_embed_max_size": 16}
WAN_SMALL = {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}
WAN_NARROW = LAYERS | {"ffn_dim": 32, "freq_dim": 16, "text_dim": 32}

SD3_MEDIUM = Family(SD3Transformer2DModel, SD3Adapter, 333, IMAGES, 2.24, SD3_SIZES, SD3_NARROW)
FAMILIES = {
    "FLUX.1": Family(FluxTransformer2DModel, FluxAdapter, 512, IMAGES, 11.9, {"guidance_embeds": True}, FLUX_NARROW),
    "SD3.5-medium": SD3_MEDIUM,
    "Wan 1.3 B": Family(WanTransformer3DModel, WanAdapter, 512, VIDEO, 1.42, WAN_SMALL, WAN_NARROW),
    "Wan 14 B": Family(WanTransformer3DModel, WanAdapter, 512, VIDEO, 14.3, {}, WAN_NARROW),
}
"""Without its table of positions, SD3.5-medium has 2.24 billion parameters; published are 2.5."""

PRECISIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "fp32": ("highest", nullcontext),
    "fp32 with TF32": ("high", nullcontext),
    "bf16 autocast": ("highest", half_precision),
}
"""Torch's precision of fp32 products, and the context of a forward pass of a transformer with fp32 weights."""


@pytest.fixture(autouse=True)
def usual_state():
    """Free the GPU memory of a model before the next one is created, and multiply fp32 in full precision again."""
    yield
    torch.set_float32_matmul_precision("highest")
    release()


def release():
    gc.collect()
    torch.cuda.empty_cache()


def keeper(check):
    """Return a function that writes this check's figures so far."""
    device = describe_device()
    return lambda figures: keep_figures(check, figures, device)


def timed(once, device, rows):
    """Return seconds per row of a call, the median after one slow first call, and the peak of memory."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    while len(seconds) < 2 or (len(seconds) <= RUNS and sum(seconds) < LIMIT_S):
        finish(device)
        begun = time.perf_counter()
        once()
        finish(device)
        seconds.append(time.perf_counter() - begun)
    median = statistics.median(seconds[1:]) / rows
    return {"s_a_row": median, "max_s": max(seconds[1:]), "runs": len(seconds) - 1, "peak_gib": peak_gib(device)}


def timed_if_it_fits(once, device, rows):
    """Return the figures of `timed`, or "out of memory"."""
    try:
        return timed(once, device, rows)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
            raise
        return OUT_OF_MEMORY
    finally:
        release()


def pass_of(adapter, device, rows, guidance):
    """Return a call that computes the velocity of rows without gradient."""
    x, sigma, conditioning = inputs(adapter, device, rows)

    @torch.no_grad()
    def once():
        return adapter.velocity(x, sigma, conditioning, guidance)

    return once


def step_of(adapter, device, rows, guidance, optimiser, precision=nullcontext):
    """Return a call that makes one training step of rows: forward, backward, optimiser."""
    x, sigma, conditioning = inputs(adapter, device, rows)

    def once():
        try:
            with precision():
                velocity = adapter.velocity(x, sigma, conditioning, guidance)
            velocity.square().mean().backward()
            optimiser.step()
        finally:
            optimiser.zero_grad()

    return once


def optimised(adapter, config):
    """Select the trained weights, recompute blocks in the backward pass, and return AdamW."""
    freeze_but_trained(adapter, config)
    recompute_blocks(adapter.transformer)
    return torch.optim.AdamW(trainable(adapter).values(), lr=1e-5)


def resized(adapter, pixels):
    """Return an adapter for images of this height and width over the same transformer."""
    return type(adapter)(adapter.transformer, nn.Identity(), adapter._text, (pixels // 8, pixels // 8))


def lora_figures(adapter, device, rows_by_pixels, keep):
    """Measure training steps of low-rank adapters with guidance, by pixels and rows."""
    optimiser, figures = optimised(adapter, LORA), {}
    for pixels, numbers in rows_by_pixels.items():
        sized, found = resized(adapter, pixels), figures.setdefault(f"{pixels} px", {})
        for rows in numbers:
            found[f"{rows}"] = timed_if_it_fits(step_of(sized, device, rows, GUIDANCE, optimiser), device, rows)
            keep(figures)
    return figures


@contextmanager
def merged(transformer):
    """Add the low-rank adapters to the weights inside the context, which computes without gradient."""
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    with torch.no_grad():
        for layer in layers:
            layer.merge()
        yield
        for layer in layers:
            layer.unmerge()


def rollout_figures(adapter, device, images_by_pixels, keep):
    """Measure passes without gradient, by pixels, by adapters apart or merged, and by images."""
    freeze_but_trained(adapter, LORA)
    figures = {}
    for pixels, numbers in images_by_pixels.items():
        sized, by_way = resized(adapter, pixels), figures.setdefault(f"{pixels} px", {})
        for way, state in {"adapters apart": nullcontext(), "adapters merged": merged(adapter.transformer)}.items():
            found = by_way.setdefault(way, {})
            with state:
                for images, guidance in [*((images, GUIDANCE) for images in numbers), (UNGUIDED_IMAGES, 1.0)]:
                    once = pass_of(sized, device, images, guidance)
                    found[f"{images}, guidance {guidance:g}"] = timed_if_it_fits(once, device, images)
                    keep(figures)
    return figures


def family_figures(adapters, device, keep):
    """Measure forward passes and a training step of low-rank adapters at every size of a family, without guidance."""
    figures: dict[str, Any] = {size: {} for size in adapters}
    for size, rows in product(adapters, FORWARD_ROWS):
        once = pass_of(adapters[size], device, rows, 1.0)
        figures[size][f"forward, {rows}"] = timed_if_it_fits(once, device, rows)
        keep(figures)
    optimiser = optimised(next(iter(adapters.values())), LORA)
    for size, adapter in adapters.items():
        figures[size]["LoRA step, 1"] = timed_if_it_fits(step_of(adapter, device, 1, 1.0, optimiser), device, 1)
        keep(figures)
    return figures


def precision_figures(adapters, device, keep):
    """Measure steps that train all weights in each precision, after each precision's difference from fp32."""
    optimiser = optimised(next(iter(adapters.values())), FULL)
    figures: dict[str, Any] = {size: {name: {} for name in PRECISIONS} for size in adapters}
    for size, adapter in adapters.items():
        once, exact = pass_of(adapter, device, 1, 1.0), None
        for name, (products, forward) in PRECISIONS.items():
            torch.set_float32_matmul_precision(products)
            with forward(adapter.transformer):
                velocity = once()
            exact = velocity if exact is None else exact
            figures[size][name]["largest_difference"] = float((velocity - exact).abs().max())
            figures[size][name]["largest_value"] = float(exact.abs().max())
            keep(figures)
    for (size, adapter), (name, (products, forward)) in product(adapters.items(), PRECISIONS.items()):
        step = step_of(adapter, device, 1, 1.0, optimiser, partial(forward, adapter.transformer))
        torch.set_float32_matmul_precision(products)
        figures[size][name]["step"] = timed_if_it_fits(step, device, 1)
        keep(figures)
    return figures


def test_the_published_configurations_have_their_published_numbers_of_parameters():
    for name, family in FAMILIES.items():
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in family.transformer(**family.config).parameters())
        assert count / 1e9 == pytest.approx(family.billions, abs=0.06), name


@pytest.mark.slow
def test_a_narrow_model_runs_the_steps_and_rollouts_of_the_large_one(monkeypatch):
    monkeypatch.setattr("tests.gpu.test_published_sizes.RUNS", 1)
    kept = []
    adapter = build(NARROW, "cpu", torch.bfloat16, 2)
    figures = lora_figures(adapter, "cpu", FEW, lambda found: kept.append(str(found)))
    assert {size: list(found) for size, found in figures.items()} == {"16 px": ["1", "2"], "32 px": ["4"]}
    assert len(set(kept)) == 3, "every figure is kept at once"
    figures = rollout_figures(build(NARROW, "cpu", torch.bfloat16, 2), "cpu", FEW, kept.append)
    assert list(figures["16 px"]) == ["adapters apart", "adapters merged"]
    assert list(figures["32 px"]["adapters merged"]) == ["4, guidance 4", "4, guidance 1"]


@torch.no_grad()
def test_merged_adapters_give_the_velocity_of_adapters_apart():
    adapter = build(NARROW, "cpu", torch.float32, 4)
    freeze_but_trained(adapter, LORA)
    before = pass_of(adapter, "cpu", 1, GUIDANCE)
    plain = before()
    for parameter in trainable(adapter).values():
        parameter.add_(0.01)
    apart = before()
    with merged(adapter.transformer):
        together = before()
    assert not torch.allclose(plain, apart, rtol=1e-3, atol=1e-3)
    assert torch.allclose(together, apart, rtol=1e-3, atol=1e-3)
    assert torch.allclose(before(), apart, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_narrow_families_run_the_measurements_of_the_large_ones(name):
    figures = family_figures(FAMILIES[name].built("cpu", torch.bfloat16, is_narrow=True), "cpu", lambda found: None)
    assert list(figures["small"]) == ["forward, 1", "forward, 4", "LoRA step, 1"]


@pytest.mark.slow
def test_a_narrow_model_runs_the_steps_of_each_precision():
    adapters = SD3_MEDIUM.built("cpu", torch.float32, is_narrow=True)
    figures = precision_figures(adapters, "cpu", lambda found: None)["small"]
    assert 0 < figures["bf16 autocast"]["largest_difference"] < 0.05 * figures["fp32"]["largest_value"]
    assert all("s_a_row" in found["step"] for found in figures.values())


def test_a_case_that_does_not_fit_is_kept_as_out_of_memory():
    assert timed_if_it_fits(Mock(side_effect=torch.OutOfMemoryError), "cpu", 1) == OUT_OF_MEMORY


def on_gpu(test):
    """Mark a check of an 80 GB GPU. A warning there does not fail it, since that would lose figures."""
    return pytest.mark.gpu(needs_gpus(1, gib=75)(pytest.mark.timeout(600)(pytest.mark.filterwarnings("default")(test))))


@on_gpu
def test_lora_steps_of_20b_with_guidance_are_measured():
    keep = keeper("20 B LoRA step, rank 64, guidance 4, checkpointing")
    lora_figures(build(PUBLISHED, "cuda", torch.bfloat16, 64), "cuda", LORA_ROWS, keep)


@on_gpu
def test_rollout_passes_of_20b_are_measured():
    adapter = build(PUBLISHED, "cuda", torch.bfloat16, 64)
    rollout_figures(adapter, "cuda", ROLLOUT_IMAGES, keeper("20 B rollout passes"))


@on_gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_passes_and_lora_steps_of_a_family_are_measured(name):
    keep = keeper(f"{name} forward and LoRA step, rank 64, bf16")
    family_figures(FAMILIES[name].built("cuda", torch.bfloat16), "cuda", keep)


@on_gpu
def test_steps_of_all_weights_are_measured_in_each_precision():
    keep = keeper("SD3.5-medium, all weights trained")
    precision_figures(SD3_MEDIUM.built("cuda", torch.float32), "cuda", keep)
