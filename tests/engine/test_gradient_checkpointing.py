"""Gradient checkpointing: the same gradients with fewer bytes kept, in training passes only."""

import pytest
import torch

from engine.config import ModelConfig
from engine.models.load import freeze_but_trained, recompute_blocks, trainable
from tests.engine.test_families import FAMILIES

LARGE = {name: family for name, family in FAMILIES.items() if name != "digits-ocr"}


def keep_inputs_of_blocks(transformer, keep):
    """Call `keep` with the inputs of every block, which torch keeps outside the saved tensors."""
    plain = transformer._gradient_checkpointing_func

    def counted(module, *args):
        for value in args:
            if isinstance(value, torch.Tensor):
                keep(value)
        return plain(module, *args)

    transformer.enable_gradient_checkpointing(counted)


def pass_of(family, weights, *, recomputes, keeps=0):
    """Return the gradients of one pass, and the bytes that the pass keeps for its backward pass."""
    torch.manual_seed(0)
    adapter = family.build()
    freeze_but_trained(adapter, ModelConfig(weights=weights, lora_rank=2))
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    if recomputes:
        recompute_blocks(adapter.transformer, keeps=keeps)
        keep_inputs_of_blocks(adapter.transformer, keep)
    parameters = trainable(adapter)
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter, std=0.1)
    weights_at = {p.untyped_storage().data_ptr() for p in adapter.transformer.parameters()}
    x, sigma = torch.randn(2, *adapter.latent_shape()), torch.tensor([0.3, 0.8])
    conditioning = adapter.encode(["12", "34"])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = adapter.velocity(x, sigma, conditioning, family.guidance).square().mean()
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    bytes_kept = sum(size for at, size in kept.items() if at not in weights_at)
    return dict(zip(parameters, found, strict=True)), bytes_kept


@pytest.mark.parametrize("weights", ["full", "lora"])
@pytest.mark.parametrize("name", LARGE)
def test_gradients_are_the_same_bits_and_less_than_half_is_kept(name, weights):
    expected, without = pass_of(LARGE[name], weights, recomputes=False)
    found, kept = pass_of(LARGE[name], weights, recomputes=True)
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in expected.values())
    for parameter, gradient in expected.items():
        assert (gradient is None) == (found[parameter] is None), parameter
        assert gradient is None or torch.equal(found[parameter], gradient), parameter
    assert kept < without / 2


@pytest.mark.parametrize("name", LARGE)
def test_the_last_block_is_kept_and_gives_the_same_bits(name):
    expected, without = pass_of(LARGE[name], "lora", recomputes=False)
    _, fewest = pass_of(LARGE[name], "lora", recomputes=True)
    found, kept = pass_of(LARGE[name], "lora", recomputes=True, keeps=1)
    assert fewest < kept < without
    same = [(found[key], gradient) for key, gradient in expected.items() if gradient is not None]
    assert all(torch.equal(one, other) for one, other in same)


def test_a_pass_without_gradients_runs_every_block_once():
    adapter = FAMILIES["qwen-image"].build()
    recompute_blocks(adapter.transformer)
    runs = []
    adapter.transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    x, sigma = torch.randn(1, *adapter.latent_shape()), torch.tensor([0.5])
    with torch.no_grad():
        adapter.velocity(x, sigma, adapter.encode(["12"]), 1.0)
    assert len(runs) == 1
    adapter.velocity(x, sigma, adapter.encode(["12"]), 1.0).sum().backward()
    assert len(runs) == 1 + 2  # forward, and again for the backward pass


def test_the_last_block_runs_once_in_a_pass_with_gradients():
    """It runs right before the backward pass begins, when its tensors would be made again at once."""
    adapter = FAMILIES["flux-dev"].build()
    recompute_blocks(adapter.transformer)
    runs = []
    for name in ("transformer_blocks", "single_transformer_blocks"):
        for block in getattr(adapter.transformer, name):
            block.register_forward_pre_hook(lambda module, *_: runs.append(type(module).__name__))
    x, sigma = torch.randn(1, *adapter.latent_shape()), torch.tensor([0.5])
    adapter.velocity(x, sigma, adapter.encode(["12"]), 1.0).sum().backward()
    assert runs == ["FluxTransformerBlock", "FluxSingleTransformerBlock", "FluxTransformerBlock"]


def test_of_two_branches_of_guidance_the_last_block_of_the_second_is_kept():
    """That of the first would be one block more in memory while the second branch is computed."""
    adapter = FAMILIES["sd3"].build()
    recompute_blocks(adapter.transformer)
    runs = []
    adapter.transformer.transformer_blocks[-1].register_forward_pre_hook(lambda *_: runs.append(1))
    x, sigma = torch.randn(1, *adapter.latent_shape()), torch.tensor([0.5])
    adapter.velocity(x, sigma, adapter.encode(["12"]), 2.0).sum().backward()
    assert len(runs) == 2 + 1


@pytest.mark.parametrize(
    ("name", "setting", "recomputes"),
    [
        ("digits-ocr", "auto", False),
        ("shapes", "auto", False),
        ("digits-ocr", "on", True),
        ("sd3", "auto", True),
        ("sd3", "off", False),
    ],
)
def test_auto_means_every_model_that_does_not_ship_with_spotrl(name, setting, recomputes):
    path = None if name in ("digits-ocr", "shapes") else "/models/sd3"
    assert ModelConfig(name=name, path=path, checkpointing=setting).recomputes is recomputes
