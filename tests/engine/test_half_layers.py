"""Adapters and layers beside half-precision weights: their gradients, their bits, and where diffusers' own stay.

The reference is the same model in fp32 with peft's and diffusers' own layers: its weights are the bf16 weights.
"""

from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from peft.tuners.lora.layer import Linear

from engine.config import ModelConfig
from engine.models.half_adapters import HalfAdaptedLinear
from engine.models.half_layers import JointAttention, WanAttention, compute_in_half
from engine.models.load import ReferencePolicy, freeze_but_trained, recompute_blocks, trainable
from engine.models.merge import MergedAdapters
from engine.models.weights import exchanged
from tests.engine.test_families import FAMILIES

LARGE = [name for name in FAMILIES if name != "digits-ocr"]
LORA = ModelConfig(weights="lora", lora_rank=4, lora_alpha=6)

NO_WORSE = 1.25
"""Largest distance from the gradients and velocities in fp32, in that of peft's and diffusers' own layers in bf16.

It comes from the frozen bf16 weights and activations: .008 to .05 of the gradients' norm here, .25 for FLUX.1-dev."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(name, dtype=torch.bfloat16, config=LORA):
    """A tiny family with random adapters. Weights of equal names have equal values in every dtype."""
    torch.manual_seed(0)
    adapter = FAMILIES[name].build()
    in_fp32 = adapter.transformer._keep_in_fp32_modules or ()
    for key, parameter in adapter.transformer.named_parameters():
        rounded = parameter.data.bfloat16()
        parameter.data = rounded.float() if set(in_fp32) & set(key.split(".")) else rounded.to(dtype)
    freeze_but_trained(adapter, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(adapter).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapter


def plain_model(name):
    """The same in bf16, with peft's and diffusers' own layers."""
    with patch("engine.models.load.compute_in_half", lambda _: None):
        return model(name)


def velocity_of(adapter, name, rows=2):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, *adapter.latent_shape(), generator=generator)
    sigma = torch.linspace(0.2, 0.9, rows)
    return adapter.velocity(x, sigma, adapter.encode([str(10 + row) for row in range(rows)]), FAMILIES[name].guidance)


def gradients_of(adapter, name, rows=2):
    parameters = trainable(adapter)
    loss = velocity_of(adapter, name, rows).square().mean()
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def apart(these, those):
    """Distance of two sets of gradients, relative to the norm of the second."""
    difference = sum(float((these[name] - those[name]).square().sum()) for name in those) ** 0.5
    return difference / sum(float(value.square().sum()) for value in those.values()) ** 0.5


@pytest.mark.parametrize("name", LARGE)
def test_gradients_are_as_near_to_fp32_as_those_of_diffusers_and_peft(name):
    adapter = model(name)
    assert any(isinstance(module, HalfAdaptedLinear) for module in adapter.transformer.modules())
    exact = gradients_of(model(name, torch.float32), name)
    found, plain = gradients_of(adapter, name), gradients_of(plain_model(name), name)
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    assert 0 < apart(plain, exact) < (0.3 if name == "flux-dev" else 0.06)
    assert apart(found, exact) < NO_WORSE * apart(plain, exact)


@pytest.mark.parametrize("name", LARGE)
@torch.no_grad()
def test_a_pass_is_as_near_to_fp32_as_that_of_diffusers_and_peft(name):
    exact = velocity_of(model(name, torch.float32), name)
    found, plain = velocity_of(model(name), name), velocity_of(plain_model(name), name)
    assert (found - exact).norm() < NO_WORSE * (plain - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("name", LARGE)
def test_a_pass_with_gradients_has_the_bits_of_one_without(name):
    adapter = model(name)
    with torch.no_grad():
        without = velocity_of(adapter, name)
    assert torch.equal(velocity_of(adapter, name).detach(), without)


@pytest.mark.parametrize("name", LARGE)
def test_recomputed_blocks_give_the_same_gradients_bit_for_bit(name):
    adapter = model(name)
    plain = gradients_of(adapter, name)
    for keeps in (0, 1):
        recompute_blocks(adapter.transformer, keeps=keeps)
        assert all(torch.equal(value, plain[key]) for key, value in gradients_of(adapter, name).items())


@pytest.mark.parametrize("name", ["qwen-image", "wan"])
def test_fp32_models_keep_the_layers_of_diffusers_and_peft(name):
    adapter = model(name, torch.float32)
    modules = list(adapter.transformer.modules())
    assert any(type(module) is Linear for module in modules)
    assert not any(isinstance(module, HalfAdaptedLinear) for module in modules)
    processors = [type(module.processor) for module in modules if hasattr(module, "processor")]
    assert processors
    assert not {JointAttention, WanAttention} & set(processors)


def test_layers_are_replaced_once():
    adapter = model("qwen-image")
    before = velocity_of(adapter, "qwen-image").detach()
    compute_in_half(adapter.transformer)
    assert len(adapter.transformer._forward_pre_hooks) == 1
    assert torch.equal(velocity_of(adapter, "qwen-image").detach(), before)


def test_adapters_that_change_between_a_pass_and_its_backward_pass_are_an_error():
    adapter = model("sd3")
    loss = velocity_of(adapter, "sd3").square().mean()
    with torch.no_grad():
        next(iter(trainable(adapter).values())).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@torch.no_grad()
def test_every_pass_takes_the_values_that_the_adapters_have_then():
    adapter = model("flux-dev")
    first, values = velocity_of(adapter, "flux-dev"), trainable(adapter)
    others = {name: value.detach() + 0.1 for name, value in values.items()}
    with exchanged(values, others):
        second = velocity_of(adapter, "flux-dev")
        for value in others.values():
            value.mul_(0.5)  # in place: neither address nor version of the parameter changes
        third = velocity_of(adapter, "flux-dev")
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert torch.equal(velocity_of(adapter, "flux-dev"), first)


@torch.no_grad()
def test_a_copy_of_a_model_has_adapters_of_its_own():
    adapter = model("wan")
    before = velocity_of(adapter, "wan")
    copied = deepcopy(adapter)
    for value in trainable(copied).values():
        value.mul_(2.0)
    assert not torch.equal(velocity_of(copied, "wan"), before)
    assert torch.equal(velocity_of(adapter, "wan"), before)


@torch.no_grad()
def test_merged_and_switched_off_adapters_are_those_of_peft():
    adapter = model("qwen-image")
    beside = velocity_of(adapter, "qwen-image")
    with ReferencePolicy.of(adapter).active():
        off = velocity_of(adapter, "qwen-image")
    merged = deepcopy(adapter)
    MergedAdapters(merged.transformer).merge()
    moved = (beside - off).norm()
    assert moved > 0
    assert (velocity_of(merged, "qwen-image") - beside).norm() < 0.2 * moved
    assert torch.equal(velocity_of(adapter, "qwen-image"), beside)
