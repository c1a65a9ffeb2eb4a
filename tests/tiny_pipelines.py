"""Tiny random pipelines of the real diffusers classes, with the published scheduler configurations.

A pipeline saved with `save_pretrained` is a model folder as a run loads it.
"""

import re
import string
import warnings
from collections.abc import Callable

from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from transformers import (
    BertTokenizer,
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
WIDTH = 32

SCHEDULERS = {
    "qwen-image": {
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 8192,
        "max_shift": 0.9,
        "shift": 1.0,
        "shift_terminal": 0.02,
        "time_shift_type": "exponential",
        "use_dynamic_shifting": True,
    },
    "sd3": {"shift": 3.0},
    "flux": {
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "shift": 3.0,
        "use_dynamic_shifting": True,
    },
    "wan": {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
    "hunyuan-video": {"shift": 7.0},
    "flux2-klein": {"shift": 3.0, "use_dynamic_shifting": True, "time_shift_type": "exponential"},
    "z-image": {"shift": 3.0},
    "sana": {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
}
"""Values of `scheduler/scheduler_config.json` that are not diffusers' defaults, in the folders of Qwen/Qwen-Image,
stabilityai/stable-diffusion-3.5-medium, black-forest-labs/FLUX.1-dev and FLUX.2-klein-4B,
Wan-AI/Wan2.1-T2V-1.3B-Diffusers, Tongyi-MAI/Z-Image-Turbo, hunyuanvideo-community/HunyuanVideo and
Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers."""


def scheduler(family):
    if family == "wan":
        return UniPCMultistepScheduler(**SCHEDULERS["wan"])
    if family == "sana":
        return DPMSolverMultistepScheduler(**SCHEDULERS["sana"])
    return FlowMatchEulerDiscreteScheduler(**SCHEDULERS[family])


class EulerAt(FlowMatchEulerDiscreteScheduler):
    """Euler steps at given noise levels: what a run takes in place of a multistep solver."""

    levels: tuple[float, ...] = ()

    @classmethod
    def of(cls, levels):
        """`levels`: with the 0 at the end, which the scheduler appends itself."""
        euler = cls(shift=1.0)
        euler.levels = tuple(levels[:-1])
        return euler

    def set_timesteps(self, num_inference_steps=None, device=None, **_):
        super().set_timesteps(sigmas=list(self.levels), device=device)


CALL_OPTIONS = {"sana": {"use_resolution_binning": False}}
"""Arguments of a family's pipeline, so that it draws at the size it is asked for."""


def published_levels(pipeline, steps):
    """Return the noise levels of a pipeline's own scheduler, if it is a multistep solver; None for Euler."""
    if isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # diffusers 0.39 reads a tensor in numpy's old way
        pipeline.scheduler.set_timesteps(steps)
    return pipeline.scheduler.sigmas.tolist()


def image_vae(halvings, shift=0.1):
    """Return an autoencoder that makes images smaller by 2 ** halvings."""
    return AutoencoderKL(
        block_out_channels=(8,) * (halvings + 1),
        down_block_types=("DownEncoderBlock2D",) * (halvings + 1),
        up_block_types=("UpDecoderBlock2D",) * (halvings + 1),
        latent_channels=4,
        norm_num_groups=4,
        shift_factor=shift,
        scaling_factor=1.5,
    )


def video_vae(halvings):
    """Return the arguments of an autoencoder that makes images smaller by 2 ** halvings, and videos shorter."""
    return {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1] * (halvings + 1),
        "num_res_blocks": 1,
        "temperal_downsample": [halvings == 1, True, True][:halvings],
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


def make_sd3(halvings=1):
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
            pos_embed_max_size=64,
            **HEADS,
        ),
        scheduler=scheduler("sd3"),
        vae=image_vae(halvings),
        text_encoder=clip(CLIPTextModelWithProjection),
        tokenizer=tokenizer(),
        text_encoder_2=clip(CLIPTextModelWithProjection),
        tokenizer_2=tokenizer(),
        text_encoder_3=T5EncoderModel(T5Config(**T5)).eval(),
        tokenizer_3=tokenizer(),
    )


def make_flux(halvings=1):
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
        scheduler=scheduler("flux"),
        vae=image_vae(halvings),
        text_encoder=clip(CLIPTextModel),
        tokenizer=tokenizer(),
        text_encoder_2=T5EncoderModel(T5Config(**T5)).eval(),
        tokenizer_2=tokenizer(),
    )


def make_wan(halvings=1):
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
        scheduler=scheduler("wan"),
        vae=AutoencoderKLWan(
            **video_vae(halvings), scale_factor_spatial=2**halvings, scale_factor_temporal=min(4, 2**halvings)
        ),
        text_encoder=UMT5EncoderModel(UMT5Config(**T5)).eval(),
        tokenizer=tokenizer(),
    )


def make_wan_2_2():
    """Return a pipeline like that of Wan2.2-TI2V-5B: an autoencoder of factor 16 that works on patches of 2 x 2."""
    return WanPipeline(
        transformer=WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=8,
            out_channels=8,
            text_dim=WIDTH,
            freq_dim=16,
            ffn_dim=48,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        scheduler=UniPCMultistepScheduler(**SCHEDULERS["wan"] | {"flow_shift": 5.0}),
        vae=AutoencoderKLWan(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=8,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            is_residual=True,
            in_channels=12,
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
            scale_factor_temporal=4,
            latents_mean=[0.1] * 8,
            latents_std=[1.0, 2.0] * 4,
        ),
        text_encoder=UMT5EncoderModel(UMT5Config(**T5)).eval(),
        tokenizer=tokenizer(),
        expand_timesteps=True,
    )


def make_qwen_image(halvings=1):
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
        scheduler=scheduler("qwen-image"),
        vae=AutoencoderKLQwenImage(**video_vae(halvings)),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=tokenizer(2048),
    )


def word_tokenizer():
    """Return a tokenizer with a token for each word of HunyuanVideo's template, and one for each letter elsewhere.

    The pipeline drops the template's first 95 tokens, so a tokenizer of bytes would leave no room for a prompt.
    """
    words = re.findall(r"[a-z]+", DEFAULT_PROMPT_TEMPLATE["template"].lower())
    letters = string.ascii_lowercase + string.digits + string.punctuation
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *words, *letters, *(f"##{letter}" for letter in letters)]
    return BertTokenizer(vocab={piece: number for number, piece in enumerate(dict.fromkeys(pieces))})


def make_hunyuan_video(halvings=1):
    blocks = max(3, halvings + 1)  # its frames become a quarter, whatever the factor of the image
    text = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return HunyuanVideoPipeline(
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=WIDTH,
            pooled_projection_dim=16,
            rope_axes_dim=(4, 6, 6),
            **HEADS,
        ),
        scheduler=scheduler("hunyuan-video"),
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * blocks,
            up_block_types=("HunyuanVideoUpBlock3D",) * blocks,
            block_out_channels=(8,) * blocks,
            layers_per_block=1,
            norm_num_groups=4,
            spatial_compression_ratio=2**halvings,
            temporal_compression_ratio=4,
        ),
        text_encoder=LlamaModel(LlamaConfig(vocab_size=384, **text)).eval(),
        tokenizer=word_tokenizer(),
        text_encoder_2=clip(CLIPTextModel),
        tokenizer_2=tokenizer(),
    )


CHAT = "{% for message in messages %}user: {{ message.content }}{% endfor %} assistant:"


def qwen3(layers, hidden):
    text = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}
    config = Qwen3Config(vocab_size=384, hidden_size=hidden, num_hidden_layers=layers, **text)
    return Qwen3ForCausalLM(config).eval()


def chat_tokenizer():
    tokens = tokenizer(512)
    tokens.chat_template = CHAT
    return tokens


def make_flux2_klein(halvings=1, is_distilled=False):
    vae = AutoencoderKLFlux2(
        block_out_channels=(8,) * (halvings + 1),
        down_block_types=("DownEncoderBlock2D",) * (halvings + 1),
        up_block_types=("UpDecoderBlock2D",) * (halvings + 1),
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
    )
    vae.bn.running_mean.uniform_(-1, 1)
    vae.bn.running_var.uniform_(0.5, 2)
    return Flux2KleinPipeline(
        transformer=Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            joint_attention_dim=48,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
            **HEADS,
        ),
        scheduler=scheduler("flux2-klein"),
        vae=vae.eval(),
        text_encoder=qwen3(28, 16),  # the pipeline reads layers 9, 18 and 27
        tokenizer=chat_tokenizer(),
        is_distilled=is_distilled,
    )


def make_z_image(halvings=1):
    return ZImagePipeline(
        transformer=ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        ),
        scheduler=scheduler("z-image"),
        vae=image_vae(halvings),
        text_encoder=qwen3(3, WIDTH).model,
        tokenizer=chat_tokenizer(),
    )


def make_sana(halvings=1):
    text = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    channels = (8,) * (halvings + 1)
    blocks = {"block_types": ("ResBlock",) * (halvings + 1), "layers_per_block": (1,) * (halvings + 1)}
    blocks["qkv_multiscales"] = ((),) * (halvings + 1)
    parts = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in blocks.items()}
    return SanaPipeline(
        transformer=SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=WIDTH,
            **HEADS,
        ),
        scheduler=scheduler("sana"),
        vae=AutoencoderDC(
            latent_channels=4,
            encoder_block_out_channels=channels,
            decoder_block_out_channels=channels,
            scaling_factor=0.41407,
            **parts,
        ),
        text_encoder=Gemma2Model(
            Gemma2Config(vocab_size=384, num_attention_heads=2, num_key_value_heads=1, **text)
        ).eval(),
        tokenizer=tokenizer(2048),
    )


PIPELINES: dict[str, Callable[..., DiffusionPipeline]] = {
    "qwen-image": make_qwen_image,
    "sd3": make_sd3,
    "flux": make_flux,
    "wan": make_wan,
    "hunyuan-video": make_hunyuan_video,
    "flux2-klein": make_flux2_klein,
    "z-image": make_z_image,
    "sana": make_sana,
}
"""By family: the function that makes the pipeline. `halvings=3` gives the published VAE factor of 8."""
