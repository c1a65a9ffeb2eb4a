"""Classifier-free guidance as one batch of both branches gives the result of two passes, and the forecast knows it."""

import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.diffusion.sampler import initial
from engine.memory.activations import activations
from engine.memory.budget import denoising_bytes
from engine.memory.job import setting_of, smaller_settings
from engine.memory.published import FLUX_1_DEV, QWEN_IMAGE
from engine.model_folder import ImageSize
from engine.models.load import freeze_but_trained, load_adapter, trainable
from engine.tally import Training
from tests.engine.test_families import FAMILIES, tiny_flux

GUIDED = {name: FAMILIES[name].build for name in ("qwen-image", "sd3", "wan")} | {
    "flux-schnell": lambda: tiny_flux(guidance_embeds=False)
}


def outcome(adapter, guidance):
    """Return the velocity of two rows at different noise levels, its gradients, and the rows of each forward pass."""
    rows = []
    hook = adapter.transformer.register_forward_pre_hook(
        lambda _, __, named: rows.append(len(named["hidden_states"])), with_kwargs=True
    )
    x, sigma = initial([1, 2], adapter.latent_shape()), torch.tensor([0.3, 0.9])
    velocity = adapter.velocity(x, sigma, adapter.encode(["12", "a longer one"]), guidance)
    found = torch.autograd.grad(velocity.square().mean(), list(trainable(adapter).values()), allow_unused=True)
    hook.remove()
    return velocity.detach(), [one for one in found if one is not None], rows


@pytest.mark.parametrize("name", GUIDED)
def test_one_doubled_batch_gives_the_velocity_and_gradients_of_two_passes(name):
    torch.manual_seed(0)
    adapter = GUIDED[name]()
    freeze_but_trained(adapter, ModelConfig(weights="lora", lora_rank=2))
    for parameter in trainable(adapter).values():
        torch.nn.init.normal_(parameter, std=0.1)
    expected, expected_gradients, rows = outcome(adapter, 3.0)
    assert rows == [2, 2]
    adapter.doubles_guidance = True
    velocity, gradients, rows = outcome(adapter, 3.0)
    assert rows == [4]
    assert torch.allclose(velocity, expected, atol=1e-5 * float(expected.abs().max()))
    largest = max(float(one.abs().max()) for one in expected_gradients)
    assert all(
        torch.allclose(one, other, atol=1e-5 * largest)
        for one, other in zip(gradients, expected_gradients, strict=True)
    )
    assert outcome(adapter, 1.0)[2] == [2], "without guidance there is one branch"


def test_a_network_with_guidance_as_an_input_has_one_branch_either_way():
    torch.manual_seed(0)
    adapter = FAMILIES["flux-dev"].build()
    freeze_but_trained(adapter, ModelConfig(weights="lora", lora_rank=2))
    adapter.doubles_guidance = True
    assert outcome(adapter, 3.5)[2] == [2]


@pytest.mark.parametrize(("setting", "doubles"), [("auto", False), ("two", False), ("one", True)])
def test_the_job_chooses_the_passes_and_auto_is_two(setting, doubles):
    assert load_adapter(ModelConfig(guidance_passes=setting)).doubles_guidance is doubles


SIZE = ImageSize(512, 512, text_tokens=512)


def job(**model):
    return EngineConfig(model=ModelConfig(name="qwen-image", path="none", weights="lora", **model))


def test_a_doubled_batch_works_on_twice_the_rows_and_keeps_the_last_block_of_both_branches():
    one, two = setting_of(job(guidance_passes="one")), setting_of(job())
    assert denoising_bytes(QWEN_IMAGE.at(SIZE), one) == 2 * denoising_bytes(QWEN_IMAGE.at(SIZE), two)
    assert denoising_bytes(FLUX_1_DEV.at(SIZE), one) == denoising_bytes(FLUX_1_DEV.at(SIZE), two)

    def row(doubles, is_guided=True):
        return activations(
            QWEN_IMAGE.architecture,
            SIZE,
            Training(rank=16),
            is_checkpointed=True,
            is_guided=is_guided,
            doubles_guidance=doubles,
        )

    assert row(False).kept < row(True).kept < 1.2 * row(False).kept, "with two passes, that of the second alone"
    assert row(True).working == 2 * row(False).working
    assert row(True, is_guided=False) == row(False, is_guided=False)


def test_a_job_that_does_not_fit_is_first_offered_two_passes():
    words, changed = next(smaller_settings(job(guidance_passes="one")))
    assert words == "model.guidance_passes: two"
    assert not changed.model.doubles_guidance
    assert not any("guidance_passes" in words for words, _ in smaller_settings(job()))
