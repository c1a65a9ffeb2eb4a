"""The 20 B Qwen-Image with random weights on one GPU: memory and time of a forward pass and a LoRA step.

The same functions run on the CPU with a model of two narrow layers.
"""

import gc
import time
from typing import cast

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import nn

from engine.config import ModelConfig
from engine.models.half import half_precision
from engine.models.load import freeze_but_trained, recompute_blocks, trainable
from engine.models.qwen_image import QwenImageAdapter
from engine.models.text import EncodedText
from engine.models.weights import get_weights, set_weights
from tests.gpu.device import GIB, describe_device, keep_figures, needs_gpus

PUBLISHED = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
"""`transformer/config.json` of Qwen/Qwen-Image."""

NARROW = PUBLISHED | {
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 4, 4),
}

LORA = ModelConfig(name="qwen-image", path="none", weights="lora", lora_rank=64, lora_alpha=128)

SIDES = {1024: 64, 6400: 160}
"""Height and width of the latent, by image tokens: images of 512 and 1280 pixels."""
TEXT_TOKENS = 256
RUNS = 5


@pytest.fixture(autouse=True)
def free_gpu_memory():
    """Free the GPU memory of a model before the next one is created."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def build(config, device, dtype, latent_side):
    """Return our adapter over a transformer with random weights, created on its device; its text is random too."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            transformer = cast(nn.Module, QwenImageTransformer2DModel(**config))
    finally:
        torch.set_default_dtype(usual)

    def encode(prompts):
        hidden = torch.randn(len(prompts), TEXT_TOKENS, config["joint_attention_dim"], device=device)
        return EncodedText(hidden, torch.ones(len(prompts), TEXT_TOKENS, dtype=torch.bool, device=device))

    return QwenImageAdapter(transformer.eval(), torch.nn.Identity(), encode, (latent_side, latent_side))


def finish(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def peak_gib(device):
    return torch.cuda.max_memory_allocated() / GIB if torch.device(device).type == "cuda" else 0.0


def inputs(adapter, device, images=1):
    x = torch.randn(images, *adapter.latent_shape(), device=device)
    return x, torch.full((images,), 0.5, device=device), adapter.encode(["a shop sign"] * images)


@torch.no_grad()
def forward_seconds(adapter, device, runs, images=1):
    """Return the seconds of forward passes with this many images, without the slow first one."""
    x, sigma, conditioning = inputs(adapter, device, images)
    seconds = []
    for _ in range(runs + 1):
        finish(device)
        begun = time.perf_counter()
        velocity = adapter.velocity(x, sigma, conditioning, 1.0)
        finish(device)
        seconds.append(time.perf_counter() - begun)
    assert velocity.shape == x.shape
    assert bool(velocity.isfinite().all())
    return seconds[1:]


def lora_seconds(adapter, device, runs):
    """Return the seconds of steps on one image: forward, backward with recomputed blocks, AdamW on rank-64 adapters."""
    freeze_but_trained(adapter, LORA)
    recompute_blocks(adapter.transformer)
    trained = trainable(adapter)
    optimiser = torch.optim.AdamW(trained.values(), lr=1e-4)
    x, sigma, conditioning = inputs(adapter, device)
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    seconds = []
    for _ in range(runs + 1):
        finish(device)
        begun = time.perf_counter()
        adapter.velocity(x, sigma, conditioning, 1.0).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        finish(device)
        seconds.append(time.perf_counter() - begun)
    assert all(bool(parameter.isfinite().all()) for parameter in trained.values())
    assert any(not torch.equal(parameter, before[name]) for name, parameter in trained.items())
    return seconds[1:]


def seconds_per_image(adapter, device, images, runs):
    """Return the median seconds per image, by the number of images in a pass."""
    return {number: sorted(forward_seconds(adapter, device, runs, number))[runs // 2] / number for number in images}


def adapter_figures(adapter, device, images, runs):
    """Measure low-rank adapters: in a forward pass, also in `half_precision`, and when they are sent and loaded."""
    figures = {"without": seconds_per_image(adapter, device, images, runs)}
    freeze_but_trained(adapter, LORA)
    figures["with"] = seconds_per_image(adapter, device, images, runs)
    with half_precision(adapter.transformer):
        figures["with, half precision"] = seconds_per_image(adapter, device, images, runs)
    trained, seconds = trainable(adapter), []
    for _ in range(runs):
        begun = time.perf_counter()
        sent = get_weights(trained)
        between = time.perf_counter()
        set_weights(trained, sent)
        finish(device)
        seconds.append((between - begun, time.perf_counter() - between))
    medians = [sorted(some)[runs // 2] for some in zip(*seconds, strict=True)]
    return {"s_a_picture": figures, "bytes": len(sent), "get_s": medians[0], "set_s": medians[1], "runs": runs}


def test_the_published_configuration_has_20_billion_parameters():
    with torch.device("meta"):
        transformer = cast(nn.Module, QwenImageTransformer2DModel(**PUBLISHED))
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert 20e9 < count < 21e9


def test_a_narrow_model_runs_the_measurements_of_the_large_one():
    adapter = build(NARROW, "cpu", torch.bfloat16, 8)
    assert adapter.latent_shape() == (16, 64)
    assert len(forward_seconds(adapter, "cpu", 1)) == 1
    assert len(lora_seconds(adapter, "cpu", 1)) == 1


def test_a_narrow_model_runs_the_adapter_measurements_of_the_large_one():
    figures = adapter_figures(build(NARROW, "cpu", torch.bfloat16, 8), "cpu", (1, 2), 1)
    assert {way: list(seconds) for way, seconds in figures["s_a_picture"].items()} == {
        way: [1, 2] for way in ("without", "with", "with, half precision")
    }
    assert figures["bytes"] > 0


@pytest.mark.gpu
@needs_gpus(1, gib=60)
@pytest.mark.parametrize("tokens", SIDES)
def test_a_forward_pass_of_20b_fits_on_one_gpu(tokens):
    torch.cuda.reset_peak_memory_stats()
    adapter = build(PUBLISHED, "cuda", torch.bfloat16, SIDES[tokens])
    assert adapter.latent_shape()[0] == tokens
    seconds = sorted(forward_seconds(adapter, "cuda", RUNS))
    figures = {"median_s": seconds[RUNS // 2], "max_s": seconds[-1], "runs": RUNS, "peak_gib": peak_gib("cuda")}
    keep_figures(f"20 B forward, bf16, {tokens} tokens", figures, describe_device())


@pytest.mark.gpu
@needs_gpus(1, gib=75)
@pytest.mark.parametrize("tokens", SIDES)
def test_a_lora_step_of_20b_fits_on_one_gpu(tokens):
    torch.cuda.reset_peak_memory_stats()
    adapter = build(PUBLISHED, "cuda", torch.bfloat16, SIDES[tokens])
    seconds = sorted(lora_seconds(adapter, "cuda", RUNS))
    figures = {"median_s": seconds[RUNS // 2], "max_s": seconds[-1], "runs": RUNS, "peak_gib": peak_gib("cuda")}
    keep_figures(f"20 B LoRA step, rank 64, bf16, {tokens} tokens", figures, describe_device())


@pytest.mark.gpu
@needs_gpus(1, gib=60)
@pytest.mark.parametrize(("tokens", "images"), [(1024, (1, 4, 16)), (6400, (1, 4))])
def test_low_rank_adapters_of_20b_on_one_gpu_are_measured(tokens, images):
    figures = adapter_figures(build(PUBLISHED, "cuda", torch.bfloat16, SIDES[tokens]), "cuda", images, RUNS)
    without, with_them = figures["s_a_picture"]["without"], figures["s_a_picture"]["with"]
    assert all(without[number] < with_them[number] for number in images)
    keep_figures(f"20 B forward with LoRA, rank 64, bf16, {tokens} tokens", figures, describe_device())
