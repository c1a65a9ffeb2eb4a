"""Sizes and noise levels of a model folder, read without loading a weight."""

import pytest

from engine.config import GUIDANCE, EngineConfig, ModelConfig, RewardConfig, SamplerConfig
from engine.model_folder import FAMILIES, FolderError, ImageSize, check_folder, model_folder
from tests.model_folders import write_model

OWN = RewardConfig(name="module:function")  # the built-in rewards score images


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes a folder of a family, as published."""
    return lambda family, **changes: write_model(tmp_path, family, **changes)


def of(name, folder, **size):
    return model_folder(ModelConfig(name=name, path=str(folder), **size), folder)


@pytest.mark.parametrize(
    ("family", "latent", "tokens", "text"),
    [
        ("qwen-image", (1, 64, 64), 1024, 512),
        ("flux", (1, 64, 64), 1024, 512),
        ("sd3", (1, 64, 64), 1024, 256),
        ("wan", (9, 30, 52), 9 * 15 * 26, 512),
        ("hunyuan-video", (9, 40, 64), 9 * 20 * 32, 256),
    ],
)
def test_a_job_without_sizes_gets_the_familys(folder, family, latent, tokens, text):
    found = of(family, folder(family))
    assert (found.latent, found.tokens, found.size.text_tokens) == (latent, tokens, text)


def test_the_jobs_size_decides_latent_and_tokens(folder):
    found = of("wan", folder("wan"), height=480, width=832, frames=81, max_text_tokens=226)
    assert found.size == ImageSize(480, 832, 81, 226)
    assert found.latent == (21, 60, 104)
    assert found.tokens == 21 * 30 * 52


@pytest.mark.parametrize(
    ("family", "size", "field", "words"),
    [
        ("qwen-image", {"height": 500}, "model.height", "is 500, .* multiples of 16 .VAE 8 x patch 2.; use 496 or 512"),
        ("flux", {"width": 1000}, "model.width", "is 1000, .*; use 992 or 1008"),
        ("flux", {"width": 8}, "model.width", "is 8, .*; use 16$"),
        ("sd3", {"height": 6160}, "model.height", "positions for 6144 pixels; use 6144 or less"),
        ("wan", {"frames": 32}, "model.frames", r"is 32, .* 4 n \+ 1 frames; use 29 or 33"),
    ],
)
def test_a_size_that_the_model_cannot_make_names_the_nearest_ones(folder, family, size, field, words):
    with pytest.raises(FolderError, match=words) as error:
        of(family, folder(family), **size)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("size", "words"),
    [({"height": 64}, "model.height is 64"), ({"max_text_tokens": 9, "frames": 1}, "frames is 1.*frames, max_text")],
)
def test_a_shipped_model_has_one_size(size, words):
    with pytest.raises(ValueError, match=f"{words}.*digits-ocr has one size|{words}"):
        ModelConfig(**size)


def test_an_image_model_has_no_frames():
    with pytest.raises(ValueError, match=r"model.frames is 5, but flux makes images; .* use wan or hunyuan-video"):
        ModelConfig(name="flux", path="there", frames=5)


def test_a_missing_or_broken_file_is_named(folder, tmp_path):
    with pytest.raises(FolderError, match=r"no model_index\.json.*; download the model"):
        of("flux", tmp_path)
    (folder("flux") / "vae" / "config.json").write_text("[]")
    with pytest.raises(FolderError, match=r"vae/config\.json holds no JSON object"):
        of("flux", tmp_path)
    (tmp_path / "vae" / "config.json").unlink()
    with pytest.raises(FolderError, match=r"vae/config\.json cannot be read.*; give the whole diffusers folder"):
        of("flux", tmp_path)


def test_auto_without_a_scheduler_is_refused_and_a_number_is_not(folder):
    there = folder("sd3", scheduler=None)
    model = ModelConfig(name="sd3", path=str(there))
    with pytest.raises(FolderError, match=r"sampler\.shift is auto, and .* has no scheduler") as error:
        check_folder(model, SamplerConfig(), there)
    assert error.value.field == "sampler.shift"
    assert "give a number" in error.value.remedy
    check_folder(model, SamplerConfig(shift=3.0), there)
    check_folder(ModelConfig(), SamplerConfig(), there)  # a shipped model reads no folder


def test_flux_without_a_guidance_input_is_refused_with_guidance(folder):
    there = folder("flux", transformer={"guidance_embeds": False})
    model = ModelConfig(name="flux", path=str(there))
    with pytest.raises(FolderError, match=r"sampler\.guidance is 3\.5, .*schnell.*; use 1") as error:
        check_folder(model, EngineConfig(model=model).sampler, there)
    assert error.value.field == "sampler.guidance"
    check_folder(model, SamplerConfig(guidance=1.0), there)


def test_the_default_guidance_is_the_published_one():
    assert EngineConfig().sampler.guidance == 1.0
    for name in FAMILIES:
        model = ModelConfig(name=name, path="there")
        assert EngineConfig(model=model, reward=OWN).sampler.guidance == GUIDANCE[name]
        assert EngineConfig(model=model, reward=OWN, sampler=SamplerConfig(guidance=1.0)).sampler.guidance == 1.0


def test_every_model_that_does_not_ship_is_a_family():
    names = set(ModelConfig.model_fields["name"].annotation.__args__)
    assert names == {"digits-ocr", "shapes", *FAMILIES}
