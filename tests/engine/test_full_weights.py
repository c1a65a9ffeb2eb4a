"""Full weights of a model from a folder: bfloat16 computing with fp32 master weights."""

import pytest
import torch

from engine.config import ModelConfig
from engine.models.load import load_adapter, recompute_blocks, trainable
from tests.tiny_pipelines import make_flux, make_hunyuan_video, make_qwen_image, make_sd3, make_wan

pytestmark = pytest.mark.usefixtures("one_layer")

FOLDERS = {
    "qwen-image": make_qwen_image,
    "sd3": make_sd3,
    "flux": make_flux,
    "wan": make_wan,
    "hunyuan-video": make_hunyuan_video,
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(family, folder, **more):
    torch.manual_seed(0)
    if not folder.exists():
        FOLDERS[family]().save_pretrained(folder)
    size = {"height": 16, "width": 16, "max_text_tokens": 20} | (
        {"frames": 5} if family in ("wan", "hunyuan-video") else {}
    )
    return ModelConfig(name=family, path=str(folder), **size, **more)


def gradients(adapter, dtypes=None):
    """Return the velocity of two rows and the gradients of all weights. `dtypes`: collects outputs of linear layers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, *adapter.latent_shape(), generator=generator)
    hooks = []
    for module in adapter.transformer.modules():
        if dtypes is not None and isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype)))
    velocity = adapter.velocity(x, torch.tensor([0.3, 0.8]), adapter.encode(["a cat", "two dogs"]), 2.0)
    parameters = trainable(adapter)
    found = torch.autograd.grad(velocity.square().mean(), list(parameters.values()), allow_unused=True)
    for hook in hooks:
        hook.remove()
    return velocity.detach(), {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


@pytest.mark.parametrize("family", FOLDERS)
def test_full_weights_are_fp32_and_every_matrix_product_is_bfloat16(tmp_path, family):
    adapter = load_adapter(config_of(family, tmp_path / "model", weights="full"))
    single = load_adapter(config_of(family, tmp_path / "model", weights="full"), dtype=torch.float32)
    dtypes = set()
    velocity, found = gradients(adapter, dtypes)
    expected_velocity, expected = gradients(single)
    assert dtypes == {torch.bfloat16}
    assert {value.dtype for value in (*trainable(adapter).values(), *found.values())} == {torch.float32}
    assert velocity.dtype == torch.float32
    assert expected.keys() == found.keys()
    assert torch.nn.functional.cosine_similarity(velocity, expected_velocity, dim=-1).min() > 0.9
    ours, theirs = (torch.cat([one[name].flatten() for name in expected]) for one in (found, expected))
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.98


def test_a_pass_without_gradients_and_a_recomputed_pass_have_the_same_bits(tmp_path):
    adapter = load_adapter(config_of("sd3", tmp_path / "model", weights="full", checkpointing="off"))
    velocity, kept = gradients(adapter)
    recompute_blocks(adapter.transformer)
    again, recomputed = gradients(adapter)
    assert torch.equal(again, velocity)
    assert all(torch.equal(recomputed[name], value) for name, value in kept.items())
    with torch.no_grad():
        x = torch.randn(2, *adapter.latent_shape(), generator=torch.Generator().manual_seed(1))
        rolled = adapter.velocity(x, torch.tensor([0.3, 0.8]), adapter.encode(["a cat", "two dogs"]), 2.0)
    assert torch.equal(rolled, velocity)


def test_an_update_far_below_the_rounding_of_bfloat16_is_not_lost(tmp_path):
    adapter = load_adapter(config_of("sd3", tmp_path / "model", weights="full"))
    parameters = trainable(adapter)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    optimiser = torch.optim.SGD(parameters.values(), lr=1e-7)
    _, found = gradients(adapter)
    for name, gradient in found.items():
        parameters[name].grad = gradient
    optimiser.step()
    moved = [name for name, value in parameters.items() if not torch.equal(value, before[name])]
    lost = [name for name in moved if torch.equal(parameters[name].bfloat16(), before[name].bfloat16())]
    assert len(moved) > len(before) / 2
    assert lost


def test_shipped_models_and_adapters_compute_as_before(tmp_path):
    shipped, lora = load_adapter(ModelConfig()), load_adapter(config_of("sd3", tmp_path / "model", weights="lora"))
    assert "forward" not in vars(shipped.transformer)
    assert "forward" not in vars(lora.transformer)
