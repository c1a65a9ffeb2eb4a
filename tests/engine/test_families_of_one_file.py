"""The families of engine/families/: each gives its pipeline's images, and each keeps the promises that its traps break.

A family is here as soon as its file is; tests/tiny_pipelines.py gives it a tiny pipeline of the real classes.
"""

import json

import pytest
import torch

from engine.config import EngineConfig, ModelConfig, SamplerConfig
from engine.diffusion.sampler import denoise, evaluation_plan, initial
from engine.entrypoints.sample import draw
from engine.families import FAMILIES
from engine.family import ImageSize
from engine.memory.activations import operations_of, parameters_of
from engine.memory.published import PUBLISHED
from engine.model_folder import FolderError, check_folder
from engine.models.adapter import rows
from engine.models.load import load_adapter, trainable
from engine.models.weights import get_weights, set_weights
from engine.noise_schedule import flux2_shift
from engine.storage.tensor_files import Stored
from engine.tally import Training
from launcher.report.diffusers_files import write_for_diffusers
from tests.tiny_pipelines import CALL_OPTIONS, PIPELINES, EulerAt, published_levels

PROMPTS, SEEDS, STEPS = ["a cat", "two dogs that play chess"], [1, 2], 3


@pytest.fixture(params=FAMILIES.values(), ids=list(FAMILIES), scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def pipeline(family):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = PIPELINES[family.name](1)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    pipeline.save_pretrained(path)
    return path


def model(family, folder, **fields) -> ModelConfig:
    size = {"height": 32, "width": 64, "max_text_tokens": 64}
    return ModelConfig(name=family.name, path=str(folder), **size | fields)


@pytest.fixture(scope="module")
def adapter(family, folder):
    config = model(family, folder)
    check_folder(config, SamplerConfig(shift=1.0), folder)
    return load_adapter(config, dtype=torch.float32)


@pytest.mark.parametrize("published", [False, True], ids=["guidance 1", "published guidance"])
def test_a_family_gives_the_images_of_its_pipeline(family, pipeline, adapter, published):
    guidance = family.guidance if published else 1.0
    noise = initial(SEEDS, adapter.latent_shape())
    plan = evaluation_plan(SamplerConfig(guidance=guidance), STEPS, adapter.schedule)
    ours = adapter.decode(denoise(adapter, plan, adapter.encode(PROMPTS), SEEDS))
    if (levels := published_levels(pipeline, STEPS)) is not None:
        assert plan.sigmas == pytest.approx(levels, abs=1e-6)
        pipeline = type(pipeline)(**pipeline.components | {"scheduler": EulerAt.of(plan.sigmas)})
        pipeline.set_progress_bar_config(disable=True)
    # A copy of the list: a pipeline may write its template into the list that it gets.
    theirs = pipeline(
        prompt=list(PROMPTS), height=32, width=64, num_inference_steps=STEPS, latents=noise.clone(), output_type="pt",
        guidance_scale=guidance - family.guidance_offset, max_sequence_length=64, **CALL_OPTIONS.get(family.name, {}),
    )[0]  # fmt: skip
    assert plan.sigmas == pytest.approx(pipeline.scheduler.sigmas.tolist(), abs=1e-6)
    torch.testing.assert_close(ours, 2.0 * theirs - 1.0, atol=1e-4, rtol=0)
    assert ours.std() > 0.01


def test_a_row_is_the_same_beside_a_longer_prompt_and_another_noise_level(family, adapter):
    x, sigma = initial([1, 2, 3], adapter.latent_shape()), torch.tensor([0.9, 0.5, 0.1])
    conditioning = adapter.encode(["a cat", PROMPTS[1] * 2, "12"])
    with torch.no_grad():
        together = adapter.velocity(x, sigma, conditioning, 2.0)
        for row in torch.arange(3).split(1):
            alone = adapter.velocity(x[row], sigma[row], rows(conditioning, row), 2.0)
            torch.testing.assert_close(together[row], alone, atol=5e-6, rtol=1e-5)


def test_encoding_leaves_the_callers_prompts_as_they_are(adapter):
    prompts = ["a cat", "12"]
    first = adapter.encode(prompts)
    assert prompts == ["a cat", "12"]
    assert torch.equal(adapter.encode(prompts)["hidden"], first["hidden"])


def test_every_target_gets_an_adapter_and_every_adapter_a_gradient(family, folder):
    adapter = load_adapter(model(family, folder, weights="lora", lora_rank=2), dtype=torch.float32)
    trained = trainable(adapter)
    targets = adapter.lora_targets()
    for target in targets:
        assert any(f"{target}.lora_A" in name for name in trained), target
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.1)
    x, sigma = initial([1], adapter.latent_shape()), torch.tensor([0.5])
    adapter.velocity(x, sigma, adapter.encode(["a cat"]), 1.0).square().sum().backward()
    # The text of the last block with two streams goes on into the blocks with one, so no layer is without a gradient.
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in trained.values())


def test_trained_adapters_give_the_images_of_spotrl_sample_in_diffusers(family, folder, tmp_path):
    config = model(family, folder, weights="lora", lora_rank=2, lora_alpha=6)
    adapter = load_adapter(config, dtype=torch.float32)
    before = adapter.decode(denoise(adapter, evaluation_plan(SamplerConfig(), 2), adapter.encode(["a cat"]), [7]))
    with torch.no_grad():
        for parameter in trainable(adapter).values():
            parameter += 0.05 * torch.randn_like(parameter)
    weights = tmp_path / "ema.safetensors"
    weights.write_bytes(get_weights(trainable(adapter)))
    written = write_for_diffusers(weights, config)
    plan = evaluation_plan(SamplerConfig(guidance=family.guidance), 2, adapter.schedule)
    sampled = load_adapter(config, dtype=torch.float32)
    set_weights(trainable(sampled), Stored.of_path(weights))
    ours = draw(sampled, plan, "a cat", 7)
    theirs = type(PIPELINES[family.name]()).from_pretrained(folder, local_files_only=True)
    theirs.set_progress_bar_config(disable=True)
    if published_levels(theirs, 2) is not None:
        theirs.scheduler = EulerAt.of(plan.sigmas)
    theirs.load_lora_weights(tmp_path, weight_name=written.name)
    images = theirs(
        prompt=["a cat"], height=32, width=64, num_inference_steps=2, latents=initial([7], adapter.latent_shape()),
        output_type="pt", guidance_scale=family.guidance - family.guidance_offset, max_sequence_length=64,
        **CALL_OPTIONS.get(family.name, {}),
    )[0]  # fmt: skip
    torch.testing.assert_close(ours[None], 2.0 * images - 1.0, atol=1e-5, rtol=0)
    assert float((ours - before).abs().max()) > 1e-3


def test_a_distilled_model_takes_no_guidance(tmp_path):
    path = tmp_path / "klein"  # the name of the test's own folder has the word, and a name counts too
    PIPELINES["flux2-klein"](1, is_distilled=True).save_pretrained(path)
    config = model(FAMILIES["flux2-klein"], path)
    with pytest.raises(FolderError, match=r"is distilled: it takes no guidance; set sampler\.guidance: 1"):
        check_folder(config, SamplerConfig(guidance=4.0), path)
    check_folder(config, SamplerConfig(guidance=1.0), path)
    index = json.loads((path / "model_index.json").read_text())
    (path / "model_index.json").write_text(json.dumps(index | {"is_distilled": False}))
    check_folder(config, SamplerConfig(guidance=4.0), path)


def test_the_shift_of_flux_2_depends_on_the_steps():
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    for tokens in (256, 1024, 4300, 4301, 16384):
        for steps in (4, 10, 50, 200):
            expected = torch.tensor(compute_empirical_mu(tokens, steps), dtype=torch.float64).exp()
            assert flux2_shift(tokens, steps) == pytest.approx(float(expected), rel=1e-9)
    assert flux2_shift(1024, 4) > 1.3 * flux2_shift(1024, 50)


def test_a_pass_of_klein_is_half_a_pass_of_qwen_image_and_needs_no_second():
    by_name = {published.name: published.architecture for published in PUBLISHED}
    klein = by_name["FLUX.2-klein-4B"]
    assert parameters_of(klein, Training(rank=None)).transformer == 3_875_544_576
    assert operations_of(klein, ImageSize(512, 512)) == pytest.approx(10.2e12, rel=0.01)
    assert 4 * operations_of(klein, ImageSize(512, 512)) < operations_of(by_name["Qwen-Image"], ImageSize(512, 512)) * 2


def test_workers_share_the_sequence_of_families_with_a_plan_alone():
    for family in FAMILIES.values():
        job = {
            "model": {"name": family.name, "path": "there"},
            "reward": {"name": "module:function"},
            "runtime": {"sp_degree": 2},
        }
        if family.shares_sequence:
            EngineConfig.model_validate(job)
            continue
        with pytest.raises(ValueError, match="workers cannot share the sequence of"):
            EngineConfig.model_validate(job)
