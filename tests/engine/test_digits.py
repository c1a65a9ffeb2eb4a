"""The digits model: its parts, its shipped base and its trained parameters."""

import random

import pytest
import torch
from safetensors import safe_open

from engine.config import ModelConfig
from engine.diffusion.noise import noise_rows
from engine.models.digits import BASE, load_digits, patchify, render, unpatchify
from engine.models.load import ReferencePolicy, load_adapter, trainable
from engine.prompts import held_out_digits
from engine.tasks.pretrain_digits import evaluate, noisy_caption, pretrain, training_words
from engine.tasks.pretraining import save_parts

FULL, LORA = ModelConfig(), ModelConfig(weights="lora", lora_rank=4)


def velocity_of(adapter, seed=0):
    x = noise_rows([seed, seed + 1], 0, adapter.latent_shape())
    return adapter.velocity(x, torch.tensor([0.9, 0.2]), adapter.encode(["1234", "5678"]), 1.0)


def test_unpatching_restores_the_image():
    images = noise_rows([1, 2], 0, (1, 12, 32))
    assert torch.equal(unpatchify(patchify(images)), images)


def test_a_patch_is_a_square_of_neighbouring_pixels():
    image = torch.zeros(1, 1, 12, 32)
    image[0, 0, 4:8, 8:12] = 1.0
    assert patchify(image)[0].sum(dim=1).nonzero().flatten().tolist() == [8 + 2]


def test_a_rendering_is_dark_on_white():
    image = render("1234", random.Random(0))
    assert image.shape == (12, 32)
    assert image.max() == 1.0
    assert image.min() < -0.5


def test_attention_heads_and_tokens_divide_by_four():
    adapter = load_digits()
    assert adapter.latent_shape() == (24, 16)
    assert adapter.encode(["1234"])["text"].shape == (1, 4, 64)
    assert adapter.transformer.config.num_attention_heads == 4
    assert sum(p.numel() for p in adapter.transformer.parameters()) == pytest.approx(1.4e6, rel=0.01)


def test_the_shipped_base_is_small_and_records_how_it_was_trained():
    assert BASE.stat().st_size < 4_000_000
    with safe_open(BASE, "pt") as file:
        facts = file.metadata()
        assert all(file.get_tensor(name).dtype == torch.float16 for name in file.keys())  # noqa: SIM118
    assert facts["steps"] == "1400"
    assert 0.40 < float(facts["exact_match"]) < 0.56


def test_the_shipped_base_writes_about_half_of_the_strings():
    scores = evaluate(load_digits(), held_out_digits()[:64])
    exact = sum(score.metrics["exact_match"] for score in scores) / 64
    assert 0.3 < exact < 0.7


def test_images_are_grey_and_in_range():
    adapter = load_digits()
    images = adapter.decode(5 * noise_rows([1, 2], 0, adapter.latent_shape()))
    assert images.shape == (2, 1, 12, 32)
    assert images.abs().max() <= 1.0


def test_guidance_is_refused_because_there_is_no_unconditional_branch():
    adapter = load_digits()
    x = noise_rows([1], 0, adapter.latent_shape())
    with pytest.raises(ValueError, match="no unconditional branch"):
        adapter.velocity(x, torch.ones(1), adapter.encode(["1234"]), 2.0)


def test_a_prompt_that_is_too_long_is_named_in_the_error():
    with pytest.raises(ValueError, match="'12345' has 5 bytes"):
        load_digits().encode(["12345"])


# --- pre-training


def test_pre_training_uses_no_held_out_string():
    assert not set(training_words(random.Random(0), 5_000)) & set(held_out_digits())


def test_about_one_caption_character_in_seven_is_wrong():
    rng = random.Random(0)
    wrong = sum(a != b for _ in range(500) for a, b in zip("1234", noisy_caption("1234", rng), strict=True))
    assert wrong / 2000 == pytest.approx(0.153, abs=0.03)


def test_pre_training_repeats_bit_for_bit_and_survives_its_file(tmp_path):
    torch.set_num_threads(1)
    first, second = pretrain(2, seed=1), pretrain(2, seed=1)
    for a, b in zip(first.transformer.parameters(), second.transformer.parameters(), strict=True):
        assert torch.equal(a, b)
    save_parts(first.transformer, first.text, tmp_path / "base.safetensors", {"steps": "2"})
    again = load_digits(tmp_path / "base.safetensors")
    torch.testing.assert_close(velocity_of(again), velocity_of(first), atol=0.02, rtol=0.02)


# --- trained parameters


def test_full_weights_train_the_transformer_and_not_the_text_encoder():
    adapter = load_adapter(FULL)
    assert sum(p.numel() for p in trainable(adapter).values()) == pytest.approx(1.4e6, rel=0.01)
    assert not any(p.requires_grad for p in adapter.text.parameters())
    assert not adapter.transformer.training


def test_lora_trains_low_rank_adapters_alone():
    adapter = load_adapter(LORA)
    names = trainable(adapter)
    assert names
    assert all("lora_" in name for name in names)
    assert sum(p.numel() for p in names.values()) < 100_000
    assert not any(module.training for module in adapter.transformer.modules())


def test_lora_starts_as_the_base_and_equal_on_every_node():
    torch.manual_seed(1)
    first = load_adapter(LORA)
    torch.manual_seed(2)
    second = load_adapter(LORA)
    assert list(trainable(first)) == list(trainable(second))
    for a, b in zip(trainable(first).values(), trainable(second).values(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(velocity_of(first), velocity_of(load_adapter(FULL)))


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_the_reference_is_the_model_before_training(config):
    adapter = load_adapter(config)
    before = velocity_of(adapter).detach()
    reference = ReferencePolicy.of(adapter)
    with torch.no_grad():
        for parameter in trainable(adapter).values():
            parameter.add_(0.01)
    after = velocity_of(adapter).detach()
    with reference.active():
        inside = velocity_of(adapter)
    assert torch.equal(inside, before)
    assert not torch.equal(after, before)
    assert torch.equal(velocity_of(adapter).detach(), after)
    assert not inside.requires_grad


@pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])
def test_a_reference_pass_does_not_change_pending_gradients(config):
    def gradients(use_reference):
        adapter = load_adapter(config)
        reference = ReferencePolicy.of(adapter)
        with torch.no_grad():
            for parameter in trainable(adapter).values():
                parameter.add_(0.01)
        loss = velocity_of(adapter).square().mean()
        if use_reference:
            with reference.active():
                velocity_of(adapter)
        loss.backward()
        return {name: p.grad for name, p in trainable(adapter).items() if p.grad is not None}

    quiet, disturbed = gradients(False), gradients(True)
    assert quiet.keys() == disturbed.keys() != set()
    assert all(torch.equal(quiet[name], disturbed[name]) for name in quiet)


def test_a_folder_without_a_diffusers_model_is_named_in_the_error(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path is .* not a diffusers folder of sd3"):
        load_adapter(ModelConfig(name="sd3", path=str(tmp_path)))
