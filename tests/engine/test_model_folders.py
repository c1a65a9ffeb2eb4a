"""Model folders: weights load without a network, and give the images of diffusers' own pipelines.

Each family is saved as a tiny random diffusers folder. Its pipeline samples an image, and so do our adapter and ODE
sampler from the same latent: timesteps, packing, positions, guidance and decoding must all agree.
"""

import json

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from engine.config import ModelConfig
from engine.diffusion.noise import noise_rows
from engine.diffusion.sampler import Plan, transition
from engine.models.flux import load_flux
from engine.models.load import load_adapter, trainable
from engine.models.qwen_image import load_qwen_image
from engine.models.sd3 import load_sd3
from engine.models.wan import load_wan

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
WIDTH = 32
STEPS = 3
PROMPTS = ["a cat", "two dogs"]


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def vae(shift=0.1):
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        shift_factor=shift,
        scaling_factor=1.5,
    )


VIDEO_VAE = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
    "latents_mean": [0.1, 0.2, 0.0, 0.0],
    "latents_std": [1.0, 2.0, 1.0, 0.5],
}


def clip(model, projection=8):
    config = CLIPTextConfig(
        vocab_size=384,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=projection,
        eos_token_id=1,
        pad_token_id=0,
    )
    return model(config).eval()


def tokenizer(length=77):
    return ByT5Tokenizer(model_max_length=length)


T5 = {"vocab_size": 384, "d_model": WIDTH, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def make_sd3():
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            joint_attention_dim=WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=16,
            pos_embed_max_size=16,
            **HEADS,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(),
        text_encoder=clip(CLIPTextModelWithProjection),
        tokenizer=tokenizer(),
        text_encoder_2=clip(CLIPTextModelWithProjection),
        tokenizer_2=tokenizer(),
        text_encoder_3=T5EncoderModel(T5Config(**T5)).eval(),
        tokenizer_3=tokenizer(),
    )


def make_flux():
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=True,
            **HEADS,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(),
        text_encoder=clip(CLIPTextModel),
        tokenizer=tokenizer(),
        text_encoder_2=T5EncoderModel(T5Config(**T5)).eval(),
        tokenizer_2=tokenizer(),
    )


def make_wan():
    return WanPipeline(
        transformer=WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=WIDTH,
            freq_dim=16,
            ffn_dim=48,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKLWan(**VIDEO_VAE, scale_factor_spatial=2, scale_factor_temporal=2),
        text_encoder=UMT5EncoderModel(UMT5Config(**T5)).eval(),
        tokenizer=tokenizer(),
    )


def make_qwen_image():
    text = {
        "vocab_size": 384,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
            **HEADS,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKLQwenImage(**VIDEO_VAE),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=tokenizer(2048),
    )


def ode_images(adapter, sigmas, guidance, latents):
    """Return images of our Euler sampler at the scheduler's noise levels, from the pipeline's latents."""
    plan = Plan("ode", tuple(sigmas), (False,) * (len(sigmas) - 1), 0.0, guidance, "of the pipeline")
    conditioning, x = adapter.encode(PROMPTS), latents
    for step in range(plan.steps):
        rows = torch.full((len(x),), step)
        with torch.no_grad():
            velocity = adapter.velocity(x, torch.tensor(plan.sigmas)[rows], conditioning, guidance)
        x, _ = transition(plan, x, velocity, rows)
    return adapter.decode(x)


CALL = {"num_inference_steps": STEPS, "output_type": "pt", "prompt": PROMPTS}


def image_of(pipeline, **arguments):
    """Return the pipeline's image in [-1, 1], and the noise levels it used."""
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(**CALL, **arguments)[0]
    return 2.0 * images.float() - 1.0, pipeline.scheduler.sigmas.tolist()


def test_sd3_gives_the_images_of_its_diffusers_pipeline(tmp_path):
    pipeline = make_sd3()
    pipeline.save_pretrained(tmp_path)
    adapter = load_sd3(tmp_path, image_size=16, t5_length=20, dtype=torch.float32)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    theirs, sigmas = image_of(
        pipeline, height=16, width=16, latents=latents, guidance_scale=2.0, max_sequence_length=20
    )
    torch.testing.assert_close(ode_images(adapter, sigmas, 2.0, latents), theirs, atol=1e-4, rtol=0)


def test_flux_gives_the_images_of_its_diffusers_pipeline(tmp_path):
    pipeline = make_flux()
    pipeline.save_pretrained(tmp_path)
    adapter = load_flux(tmp_path, image_size=16, text_length=20, dtype=torch.float32)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    theirs, sigmas = image_of(
        pipeline, height=16, width=16, latents=latents, guidance_scale=3.5, max_sequence_length=20
    )
    torch.testing.assert_close(ode_images(adapter, sigmas, 3.5, latents), theirs, atol=1e-4, rtol=0)


def test_qwen_image_gives_the_images_of_its_pipeline_without_guidance(tmp_path):
    pipeline = make_qwen_image()
    pipeline.save_pretrained(tmp_path)
    adapter = load_qwen_image(tmp_path, image_size=16, text_length=300, dtype=torch.float32)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    theirs, sigmas = image_of(pipeline, height=16, width=16, latents=latents, true_cfg_scale=1.0)
    torch.testing.assert_close(ode_images(adapter, sigmas, 1.0, latents), theirs, atol=1e-4, rtol=0)


def test_wan_gives_the_images_of_its_diffusers_pipeline(tmp_path):
    pipeline = make_wan()
    pipeline.save_pretrained(tmp_path)
    adapter = load_wan(tmp_path, video_size=(5, 16, 16), text_length=20, dtype=torch.float32)
    latents = noise_rows([1, 2], 0, adapter.latent_shape())
    theirs, sigmas = image_of(
        pipeline, height=16, width=16, num_frames=5, latents=latents, guidance_scale=2.0, max_sequence_length=20
    )
    # The pipeline puts frames before channels.
    ours = ode_images(adapter, sigmas, 2.0, latents).transpose(1, 2)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("weights", ["full", "lora"])
def test_a_model_is_loaded_from_the_job_file_and_trained_in_fp32(tmp_path, weights):
    make_sd3().save_pretrained(tmp_path)
    adapter = load_adapter(ModelConfig(name="sd3", path=str(tmp_path), weights=weights))
    assert {parameter.dtype for parameter in trainable(adapter).values()} == {torch.float32}
    x = noise_rows([1], 0, adapter.latent_shape())[..., :16, :16]
    velocity = adapter.velocity(x, torch.tensor([0.5]), adapter.encode(["a cat"]), 1.0)
    assert velocity.dtype == torch.float32
    assert velocity.isfinite().all()


def test_wan_with_two_transformers_is_refused(tmp_path):
    pipeline = make_wan()
    pipeline.register_modules(transformer_2=pipeline.transformer)
    pipeline.save_pretrained(tmp_path)
    assert "transformer_2" in json.loads((tmp_path / "model_index.json").read_text())
    with pytest.raises(ValueError, match="two transformers"):
        load_wan(tmp_path, dtype=torch.float32)
