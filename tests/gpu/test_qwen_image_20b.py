"""The 20 B Qwen-Image on one GPU, with random weights: does a forward pass and a LoRA step fit, and what do they take?

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
from engine.models.load import freeze_but_trained, trainable
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
"""Height and width of the latent, by picture tokens: pictures of 512 and 1280 pixels."""
TEXT_TOKENS = 256
RUNS = 5


@pytest.fixture(autouse=True)
def room():
    """Nothing of one model is left on the GPU when the next is made."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def build(config, device, dtype, latent_side):
    """Our adapter over a transformer with random weights, made where it will be; its text is random too."""
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


def inputs(adapter, device, pictures=1):
    x = torch.randn(pictures, *adapter.latent_shape(), device=device)
    return x, torch.full((pictures,), 0.5, device=device), adapter.encode(["a shop sign"] * pictures)


@torch.no_grad()
def forward_seconds(adapter, device, runs, pictures=1):
    """Of passes of so many pictures, the slow first one left out."""
    x, sigma, conditioning = inputs(adapter, device, pictures)
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
    """Of steps on one picture: forward, backward through recomputed blocks, AdamW on rank-64 adapters."""
    freeze_but_trained(adapter, LORA)
    adapter.transformer.enable_gradient_checkpointing()
    adapter.transformer.train()
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


def seconds_of_a_picture(adapter, device, pictures, runs):
    """Median of passes, shared among their pictures, by how many a pass has."""
    return {number: sorted(forward_seconds(adapter, device, runs, number))[runs // 2] / number for number in pictures}


def adapter_figures(adapter, device, pictures, runs):
    """What low-rank adapters cost: in a forward pass, as it is and in `half_precision`; and to send and load them."""
    figures = {"without": seconds_of_a_picture(adapter, device, pictures, runs)}
    freeze_but_trained(adapter, LORA)
    figures["with"] = seconds_of_a_picture(adapter, device, pictures, runs)
    with half_precision(adapter.transformer):
        figures["with, half precision"] = seconds_of_a_picture(adapter, device, pictures, runs)
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


def test_a_narrow_model_passes_and_steps_through_what_the_large_one_is_measured_with():
    adapter = build(NARROW, "cpu", torch.bfloat16, 8)
    assert adapter.latent_shape() == (16, 64)
    assert len(forward_seconds(adapter, "cpu", 1)) == 1
    assert len(lora_seconds(adapter, "cpu", 1)) == 1


def test_a_narrow_model_is_asked_what_adapters_cost_as_the_large_one_is():
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
@pytest.mark.parametrize(("tokens", "pictures"), [(1024, (1, 4, 16)), (6400, (1, 4))])
def test_what_low_rank_adapters_cost_20b_on_one_gpu(tokens, pictures):
    figures = adapter_figures(build(PUBLISHED, "cuda", torch.bfloat16, SIDES[tokens]), "cuda", pictures, RUNS)
    without, with_them = figures["s_a_picture"]["without"], figures["s_a_picture"]["with"]
    assert all(without[number] < with_them[number] for number in pictures)
    keep_figures(f"20 B forward with LoRA, rank 64, bf16, {tokens} tokens", figures, describe_device())
