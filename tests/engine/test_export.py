"""Exported weights load in diffusers without a warning and give the same images."""

import logging
from inspect import signature
from typing import Any

import pytest
import torch
from diffusers import (
    FluxPipeline,
    HunyuanVideoPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
)
from diffusers.loaders import lora_base
from diffusers.utils import logging as diffusers_logging
from safetensors.torch import load_file

from engine.config import ModelConfig
from engine.diffusion.sampler import initial
from engine.models.adapter import DiTAdapter
from engine.models.export import export
from engine.models.load import freeze_but_trained, load_adapter, trainable
from engine.models.weights import get_weights
from launcher.exit_codes import Failure
from launcher.report.diffusers_files import LORA_FILE, write_for_diffusers
from tests.engine.test_families import FAMILIES

PIPELINES = {
    "qwen-image": QwenImagePipeline,
    "sd3": StableDiffusion3Pipeline,
    "flux-dev": FluxPipeline,
    "wan": WanPipeline,
    "hunyuan-video": HunyuanVideoPipeline,
}


def pipeline_of(name: str, transformer: torch.nn.Module) -> Any:
    """Return a pipeline with only a transformer, which is enough to load adapters."""
    needed = [part.name for part in signature(PIPELINES[name]).parameters.values() if part.default is part.empty]
    return PIPELINES[name](**{**dict.fromkeys(needed), "transformer": transformer})


@pytest.fixture
def warned(caplog):
    """Return the warnings of diffusers, without the one that every SD3 adapter without text encoders causes."""
    diffusers_logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    yield lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith(("diffusers", "peft"))
        and "found with the prefix='text_encoder" not in record.getMessage()
    ]
    diffusers_logging.disable_propagation()


def velocity(adapter: DiTAdapter) -> torch.Tensor:
    with torch.no_grad():
        x = initial([1, 2], adapter.latent_shape())
        return adapter.velocity(x, torch.tensor([0.5, 0.25]), adapter.encode(["12", "34"]), 1.0)


def shake(adapter: DiTAdapter) -> None:
    """Change the trained parameters from their start values."""
    with torch.no_grad():
        for parameter in trainable(adapter).values():
            parameter += 0.05 * torch.randn_like(parameter)


@pytest.mark.parametrize("name", PIPELINES)
def test_low_rank_adapters_load_without_a_warning_and_have_their_effect(name, tmp_path, warned, monkeypatch):
    torch.manual_seed(0)
    adapter = FAMILIES[name].build()
    adapter.transformer.save_pretrained(tmp_path / "base")
    freeze_but_trained(adapter, ModelConfig(weights="lora", lora_rank=2, lora_alpha=6))
    before = velocity(adapter)
    shake(adapter)
    (tmp_path / "ema.safetensors").write_bytes(get_weights(trainable(adapter)))
    model = ModelConfig(weights="lora", lora_rank=2, lora_alpha=6)
    assert write_for_diffusers(tmp_path / "ema.safetensors", model) == tmp_path / LORA_FILE

    trained = velocity(adapter)
    tensors = load_file(tmp_path / LORA_FILE)
    monkeypatch.setattr(lora_base, "HF_HUB_OFFLINE", True)
    for source, options in ((tmp_path, {"weight_name": LORA_FILE}), (tensors, {})):
        pipeline = pipeline_of(name, type(adapter.transformer).from_pretrained(tmp_path / "base"))
        pipeline.load_lora_weights(source, **options)
        adapter.transformer = pipeline.transformer.eval()
        torch.testing.assert_close(velocity(adapter), trained, atol=1e-5, rtol=0)
    assert not [name for name in tensors if "alpha" in name], "loaders without a scale take 1"
    assert float((trained - before).abs().max()) > 1e-3
    assert warned() == []


def test_full_weights_load_without_a_warning_and_give_the_same_images(tmp_path, warned, forked_engine):
    adapter = load_adapter(ModelConfig())
    shake(adapter)
    (tmp_path / "ema.safetensors").write_bytes(get_weights(trainable(adapter)))
    folder = write_for_diffusers(tmp_path / "ema.safetensors", ModelConfig())
    assert folder == tmp_path / "transformer"
    trained = velocity(adapter)
    adapter.transformer = QwenImageTransformer2DModel.from_pretrained(folder).eval()
    torch.testing.assert_close(velocity(adapter), trained, atol=1e-5, rtol=0)
    assert warned() == []


def test_a_failed_export_leaves_nothing_and_a_killed_export_is_redone(tmp_path, forked_engine):
    weights = tmp_path / "ema.safetensors"
    weights.write_bytes(get_weights(trainable(FAMILIES["sd3"].build())))
    (tmp_path / "transformer.part").mkdir()
    (tmp_path / "transformer.part" / "half").write_text("")
    with pytest.raises(Failure, match="these weights lack"):
        write_for_diffusers(weights, ModelConfig())
    assert list(tmp_path.iterdir()) == [weights]


def test_weights_of_another_model_are_refused(tmp_path):
    (tmp_path / "ema.safetensors").write_bytes(get_weights(trainable(FAMILIES["sd3"].build())))
    with pytest.raises(KeyError, match="these weights lack"):
        export(ModelConfig(), tmp_path / "ema.safetensors", tmp_path / "transformer")
