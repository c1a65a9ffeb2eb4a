"""Images of `spotrl sample` equal those of diffusers with the same weights."""

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image

from engine.config import ModelConfig, SamplerConfig
from engine.diffusion.images import as_bytes
from engine.diffusion.sampler import evaluation_plan
from engine.entrypoints.sample import SampleRequest, draw, load_trained, sample, write_image
from engine.models.load import load_adapter, trainable
from engine.models.weights import get_weights
from launcher.report.diffusers_files import write_for_diffusers
from tests.engine.test_export import pipeline_of, shake

PLAN = evaluation_plan(SamplerConfig(), 4)
FULL, LORA = ModelConfig(), ModelConfig(weights="lora", lora_rank=2, lora_alpha=6)


@pytest.fixture(params=[FULL, LORA], ids=["full", "lora"])
def trained(request, tmp_path):
    """Return a model's configuration and its trained weights, far from where they began."""
    torch.manual_seed(0)
    adapter = load_adapter(request.param)
    shake(adapter)
    weights = tmp_path / "ema.safetensors"
    weights.write_bytes(get_weights(trainable(adapter)))
    return request.param, weights


def test_sampled_images_equal_those_of_diffusers_with_the_same_weights(trained, forked_engine):
    model, weights = trained
    written = write_for_diffusers(weights, model)
    theirs = load_adapter(FULL)
    if model.weights == "lora":
        pipeline = pipeline_of("qwen-image", theirs.transformer)
        pipeline.load_lora_weights(written.parent, weight_name=written.name)
        theirs.transformer = pipeline.transformer.eval()
    else:
        theirs.transformer = QwenImageTransformer2DModel.from_pretrained(written).eval()
    ours = draw(load_trained(model, weights, "cpu"), PLAN, "1234", 7)
    torch.testing.assert_close(ours, draw(theirs, PLAN, "1234", 7), atol=1e-5, rtol=0)
    assert float((ours - draw(load_adapter(FULL), PLAN, "1234", 7)).abs().max()) > 1e-2


def test_each_requested_image_is_written_to_its_file(trained, tmp_path):
    model, weights = trained
    wanted = [("12", 3), ("12", 4), ("34", 3)]
    request = SampleRequest.model_validate(
        {
            "model": model.model_dump(),
            "sampler": {},
            "steps": 4,
            "weights": weights,
            "images": [{"prompt": p, "seed": s, "file": tmp_path / "out" / f"{p}-{s}.png"} for p, s in wanted],
        }
    )
    assert [(done.prompt, done.seed) for done in sample(request, "cpu")] == wanted
    adapter = load_trained(model, weights, "cpu")
    for prompt, seed in wanted:
        grey = np.asarray(Image.open(tmp_path / "out" / f"{prompt}-{seed}.png"))[..., 0]
        assert np.array_equal(grey, as_bytes(draw(adapter, PLAN, prompt, seed))[0].numpy())
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_weights_of_another_model_are_refused(tmp_path):
    (tmp_path / "ema.safetensors").write_bytes(get_weights(trainable(load_adapter(LORA))))
    with pytest.raises(KeyError, match="these weights lack"):
        load_trained(FULL, tmp_path / "ema.safetensors", "cpu")


def test_a_video_becomes_an_animated_image_with_all_its_frames(tmp_path):
    video = torch.linspace(-1, 1, 5).view(1, 5, 1, 1).expand(3, 5, 8, 8)
    write_image(video, tmp_path / "clip.png")
    with Image.open(tmp_path / "clip.png") as clip:
        assert clip.n_frames == 5
        clip.seek(4)
        assert clip.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
