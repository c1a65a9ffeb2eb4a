"""Model folders: weights load without a network, and give the images of diffusers' own pipelines.

Each family is saved as a tiny random diffusers folder. Its pipeline samples an image, and so do our adapter and ODE
sampler from the same latent: timesteps, packing, positions, guidance and decoding must all agree.
"""

import json
import shutil

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from engine.config import ModelConfig, SamplerConfig
from engine.diffusion.noise import noise_rows
from engine.diffusion.sampler import evaluation_plan, transition
from engine.model_folder import check_folder
from engine.models.load import load_adapter, trainable
from engine.noise_schedule import ScheduleError
from tests.tiny_pipelines import make_flux, make_hunyuan_video, make_qwen_image, make_sd3, make_wan, make_wan_2_2

STEPS = 3
PROMPTS = ["a cat", "two dogs"]


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def loaded(name, path, **size):
    """Return the adapter of a folder in fp32, for images of 16 x 16. The folder passes the check before a plan."""
    model = ModelConfig(name=name, path=str(path), **{"height": 16, "width": 16} | size)
    check_folder(model, SamplerConfig(shift=1.0), path)
    return load_adapter(model, dtype=torch.float32)


def images_of_a_run(adapter, guidance, latents):
    """Return images as an evaluation of a run samples them, from these latents and at the folder's noise levels."""
    plan = evaluation_plan(SamplerConfig(guidance=guidance), STEPS, adapter.schedule)
    conditioning, x = adapter.encode(PROMPTS), latents
    for step in range(plan.steps):
        rows = torch.full((len(x),), step)
        with torch.no_grad():
            velocity = adapter.velocity(x, torch.tensor(plan.sigmas)[rows], conditioning, guidance)
        x, _ = transition(plan, x, velocity, rows)
    return adapter.decode(x)


CALL = {"num_inference_steps": STEPS, "output_type": "pt", "prompt": PROMPTS, "height": 16, "width": 16}


def image_of(pipeline, latents, **arguments):
    """Return the pipeline's images in [-1, 1]."""
    pipeline.set_progress_bar_config(disable=True)
    return 2.0 * pipeline(**CALL | {"latents": latents} | arguments)[0].float() - 1.0


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_sd3_gives_the_images_of_its_diffusers_pipeline(tmp_path):
    pipeline = make_sd3()
    pipeline.save_pretrained(tmp_path)
    adapter = loaded("sd3", tmp_path)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    same(images_of_a_run(adapter, 4.5, latents), image_of(pipeline, latents, guidance_scale=4.5))


def test_flux_gives_the_images_of_its_diffusers_pipeline(tmp_path):
    pipeline = make_flux()
    pipeline.save_pretrained(tmp_path)
    adapter = loaded("flux", tmp_path, max_text_tokens=20)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    same(
        images_of_a_run(adapter, 3.5, latents), image_of(pipeline, latents, guidance_scale=3.5, max_sequence_length=20)
    )


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_qwen_image_gives_the_images_of_its_diffusers_pipeline(tmp_path, guidance):
    pipeline = make_qwen_image()
    pipeline.save_pretrained(tmp_path)
    adapter = loaded("qwen-image", tmp_path)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    negative = {"negative_prompt": [" ", " "]} if guidance > 1 else {}
    theirs = image_of(pipeline, latents, true_cfg_scale=guidance, **negative)
    same(images_of_a_run(adapter, guidance, latents), theirs)


def test_wan_gives_the_images_of_its_pipeline_with_flow_match_euler(tmp_path):
    pipeline = make_wan()
    pipeline.save_pretrained(tmp_path)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    adapter = loaded("wan", tmp_path, frames=5)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    theirs = image_of(pipeline, latents, num_frames=5, guidance_scale=5.0)
    # The pipeline puts frames before channels.
    same(images_of_a_run(adapter, 5.0, latents).transpose(1, 2), theirs)


def test_wan_2_2_ti2v_gives_the_videos_of_its_pipeline_with_flow_match_euler(tmp_path):
    pipeline = make_wan_2_2()
    pipeline.save_pretrained(tmp_path)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    adapter = loaded("wan", tmp_path, frames=5, height=64, width=96)
    assert adapter.latent_shape() == (8, 2, 4, 6)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    theirs = image_of(pipeline, latents, num_frames=5, guidance_scale=5.0, height=64, width=96)
    same(images_of_a_run(adapter, 5.0, latents).transpose(1, 2), theirs)


def test_hunyuan_video_gives_the_videos_of_its_diffusers_pipeline(tmp_path):
    pipeline = make_hunyuan_video()
    pipeline.save_pretrained(tmp_path)
    adapter = loaded("hunyuan-video", tmp_path, frames=5)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    theirs = image_of(pipeline, latents, num_frames=5, guidance_scale=6.0)
    same(images_of_a_run(adapter, 6.0, latents).transpose(1, 2), theirs)
    texts = adapter.encode(PROMPTS)
    assert not torch.equal(*texts["hidden"])
    assert texts["mask"].sum(dim=1).tolist() != [0, 0]


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_a_model_is_loaded_from_the_job_file_and_trained_in_fp32(tmp_path, weights):
    make_sd3().save_pretrained(tmp_path)
    adapter = load_adapter(ModelConfig(name="sd3", path=str(tmp_path), height=16, width=16, weights=weights))
    assert {parameter.dtype for parameter in trainable(adapter).values()} == {torch.float32}
    x = noise_rows([1], 0, adapter.latent_shape())
    velocity = adapter.velocity(x, torch.tensor([0.5]), adapter.encode(["a cat"]), 1.0)
    assert velocity.dtype == torch.float32
    assert velocity.isfinite().all()


def test_a_folder_without_a_scheduler_loads_for_a_job_with_a_shift_of_its_own(tmp_path):
    make_flux().save_pretrained(tmp_path)
    shutil.rmtree(tmp_path / "scheduler")
    adapter = loaded("flux", tmp_path)
    assert evaluation_plan(SamplerConfig(shift=3.0), 2, adapter.schedule).sigmas == (1.0, 0.75, 0.0)
    with pytest.raises(ScheduleError, match=r"has no scheduler/scheduler_config\.json"):
        evaluation_plan(SamplerConfig(), 2, adapter.schedule)


def test_wan_with_two_transformers_is_refused(tmp_path):
    pipeline = make_wan()
    pipeline.register_modules(transformer_2=pipeline.transformer)
    pipeline.save_pretrained(tmp_path)
    assert "transformer_2" in json.loads((tmp_path / "model_index.json").read_text())
    with pytest.raises(ValueError, match="two transformers"):
        loaded("wan", tmp_path)
