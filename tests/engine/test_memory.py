"""The memory forecast: kept activations, parameters and adapters against the real classes on the meta device."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.config import ModelConfig
from engine.family import PIXELS_PER_TOKEN
from engine.memory import budget
from engine.memory.activations import activations, parameters_of
from engine.memory.architecture import architecture_from, image_tokens, text_tokens
from engine.memory.job import trained_bytes
from engine.memory.published import EMBEDDED, FLUX_1_DEV, QWEN_IMAGE, SD3_5_MEDIUM, WAN_1_3B, PublishedModel
from engine.model_folder import ImageSize
from engine.models import merge, vae
from engine.models.load import load_adapter, trainable
from engine.tally import Tally, Training
from tests.benchmarks import memory as benchmark

LORA, FULL = Training(rank=64), Training(rank=None)
SMALL = ImageSize(height=64, width=96, text_tokens=16)


def narrow(model: PublishedModel, **changes) -> PublishedModel:
    """Return a model with one or two blocks of each kind and few numbers, but with its family's structure."""
    few = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16} | changes
    few |= {name: 2 for name in ("num_single_layers", "num_refiner_layers") if name in model.config}
    few |= {"dual_attention_layers": (0,), "caption_projection_dim": 32} if model.family == "sd3" else {}
    few |= {"axes_dims_rope": (4, 6, 6)} if model.family in ("qwen-image", "flux") else {}
    few |= {"rope_axes_dim": (4, 6, 6)} if model.family == "hunyuan-video" else {}
    few |= {"ffn_dim": 80} if model.family == "wan" else {}
    few |= {"pos_embed_max_size": 16} if model.family == "sd3" else {}
    few |= {"axes_dims_rope": (4, 4, 4, 4)} if model.family == "flux2-klein" else {}
    if model.family == "z-image":
        layers, heads, width = (few.pop(name) for name in ("num_layers", "num_attention_heads", "attention_head_dim"))
        few = {"n_layers": layers, "n_refiner_layers": 2, "n_heads": heads, "n_kv_heads": heads, "dim": heads * width}
        few |= {"axes_dims": (4, 6, 6)}
    if model.family == "sana":
        width = few["num_attention_heads"] * few["attention_head_dim"]
        few |= {"num_cross_attention_heads": 1, "cross_attention_head_dim": width, "cross_attention_dim": width}
    return replace(model, config=dict(model.config) | few, text_encoder_parameters=0, vae_parameters=0)


def test_a_512_px_image_is_1024_tokens_and_a_video_has_a_frame_in_four():
    image, video = QWEN_IMAGE.architecture, WAN_1_3B.architecture
    assert image_tokens(image, ImageSize(height=512, width=512, text_tokens=1)) == 1024
    assert image_tokens(video, ImageSize(height=240, width=416, frames=33, text_tokens=1)) == 9 * 15 * 26
    assert text_tokens("sd3", ImageSize(height=512, width=512, text_tokens=256)) == 333


@pytest.mark.parametrize(("layer", "full", "adapted"), [
    (lambda t: t.linear(10, 8, 4, 4, adapted=True), 10 * 8 * 2, 10 * 8 * 2 + 2 * 10 * 64 * 2),
    (lambda t: t.linear(10, 8, 4, adapted=True, kept_before=True), 0, 10 * 64 * 2),
    (lambda t: t.linear(10, 8, 4), 10 * 8 * 2, 0),
    (lambda t: t.layer_norm(10, 8), 10 * 8 * 2 + 10 * 8, 10 * 8 * 2 + 10 * 8),
    (lambda t: t.scaled(10, 8), 10 * 8 * 2 + 8 * 2, 8 * 2),
    (lambda t: t.gelu(10, 8), 10 * 8 * 2, 10 * 8 * 2),
    (lambda t: t.attention(10, 20, 8, 2), 60 * 8 * 2 + 10 * 2 * 4, 60 * 8 * 2 + 10 * 2 * 4),
])  # fmt: skip
def test_a_layer_keeps_what_its_backward_formula_needs(layer, full, adapted):
    for training, kept in ((FULL, full), (LORA, adapted)):
        tally = Tally(training)
        layer(tally)
        assert tally.kept == kept


@pytest.mark.parametrize("training", [LORA, FULL], ids=["LoRA", "full"])
@pytest.mark.parametrize("model", benchmark.MEASURED, ids=lambda model: model.family)
def test_parameters_and_adapters_are_those_of_the_diffusers_class(model, training):
    small = narrow(model)
    transformer = benchmark.built(small, small.config, training)
    trained = sum(one.numel() for one in transformer.parameters() if one.requires_grad)
    found = parameters_of(small.architecture, training)
    assert found.transformer + found.adapters == benchmark.counted(transformer)
    assert trained == (found.transformer if training.is_full else found.adapters)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("model", benchmark.MEASURED, ids=lambda model: model.family)
def test_forecast_of_a_row_is_near_what_autograd_keeps(model, is_checkpointed):
    small = narrow(model, num_layers=4, num_attention_heads=32)
    if model.family == "sd3":
        small.config["caption_projection_dim"] = 512
    times = small.architecture.pixels_per_token // PIXELS_PER_TOKEN  # as many tokens for each family
    size = replace(SMALL, height=times * SMALL.height, width=times * SMALL.width)
    transformer = benchmark.built(small, small.config, LORA)
    measured = benchmark.pass_of(small, transformer, size, is_checkpointed) / benchmark.ROWS
    found = activations(small.architecture, size, LORA, is_checkpointed=is_checkpointed, is_guided=True)
    # Tables of positions are not counted, and weigh more beside the few numbers that checkpointing keeps.
    assert found.kept == pytest.approx(measured, rel=0.09 if is_checkpointed else 0.04)


def test_guidance_keeps_two_branches_but_not_where_it_is_an_input():
    def kept(model, is_guided):
        size = ImageSize(height=512, width=512, text_tokens=512)
        return activations(model.architecture, size, LORA, is_checkpointed=False, is_guided=is_guided).kept

    assert kept(QWEN_IMAGE, True) == 2 * kept(QWEN_IMAGE, False)
    assert kept(FLUX_1_DEV, True) == kept(FLUX_1_DEV, False)


def test_published_models_have_their_published_numbers_of_parameters():
    billions = ((QWEN_IMAGE, 20.43), (FLUX_1_DEV, 11.90), (SD3_5_MEDIUM, 2.24), (WAN_1_3B, 1.42))
    for model, expected in billions:
        assert parameters_of(model.architecture, FULL).transformer / 1e9 == pytest.approx(expected, abs=0.01)


def test_constants_are_those_of_the_engine():
    assert (budget.DECODED_AT_ONCE, budget.SPARE_BYTES) == (vae.PIXELS_AT_ONCE, merge.SPARE_BYTES)


def test_a_config_without_a_size_is_refused_by_its_key():
    with pytest.raises(ValueError, match="num_layers: None; a whole number is needed"):
        architecture_from("wan", {"num_attention_heads": 2, "attention_head_dim": 16})


def test_tensors_that_share_memory_count_once_and_parameters_never():
    layer = nn.Linear(8, 8, bias=False, device="meta")
    x = torch.empty(4, 8, device="meta", requires_grad=True)
    assert benchmark.kept_bytes(layer, lambda: layer(x) + layer(x)) == 4 * 8 * 4 + 4 * 8 * 4, "the input and the output"


@pytest.mark.parametrize("name", EMBEDDED)
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_the_trained_bytes_of_a_shipped_model_are_those_of_its_parameters(name, weights):
    config = ModelConfig(name=name, weights=weights, lora_rank=8)
    parameters = trainable(load_adapter(config)).values()
    assert trained_bytes(config, EMBEDDED[name]) == sum(4 * parameter.numel() for parameter in parameters)
