"""Count the parameters of text encoders and VAEs with their real classes on torch's meta device.

Sizes are the values of each part's published `config.json`; the defaults of diffusers' video VAEs are the published
values.
"""

from collections.abc import Callable

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)
from torch import nn
from transformers import (
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

from engine.families import FAMILIES
from engine.memory import published

T5 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
LLAMA = {
    "vocab_size": 128320,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
QWEN_VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
KL_16 = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}

KL_WAN_2_2 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}

QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
DC_SANA = {
    "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
    "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "upsample_block_type": "interpolate",
    "downsample_block_type": "Conv",
}
SANA = FAMILIES["sana"].published[0]
FLUX_2_KLEIN = FAMILIES["flux2-klein"].published[0]

PARTS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "T5-XXL": (published.T5_XXL, lambda: T5EncoderModel(T5Config(vocab_size=32128, **T5))),
    "UMT5-XXL": (published.UMT5_XXL, lambda: UMT5EncoderModel(UMT5Config(vocab_size=256384, **T5))),
    "CLIP-L": (published.CLIP_L, lambda: CLIPTextModel(CLIPTextConfig(**CLIP_L))),
    "CLIP-L, projected": (
        published.CLIP_L_PROJECTED,
        lambda: CLIPTextModelWithProjection(CLIPTextConfig(projection_dim=768, **CLIP_L)),
    ),
    "CLIP-G, projected": (
        published.CLIP_G_PROJECTED,
        lambda: CLIPTextModelWithProjection(CLIPTextConfig(projection_dim=1280, **CLIP_G)),
    ),
    "Llama 3 8 B": (published.LLAMA_8B, lambda: LlamaModel(LlamaConfig(**LLAMA))),
    "Qwen2.5-VL 7 B": (
        published.QWEN_VL_7B,
        lambda: Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=QWEN, vision_config=QWEN_VISION)),
    ),
    "VAE of SD3 and FLUX": (published.KL_16, lambda: AutoencoderKL(**KL_16)),
    "VAE of Wan": (published.KL_VIDEO_WAN, AutoencoderKLWan),
    "VAE of Wan2.2-TI2V-5B": (published.KL_VIDEO_WAN_2_2, lambda: AutoencoderKLWan(**KL_WAN_2_2)),
    "VAE of Qwen-Image": (published.KL_VIDEO_WAN, AutoencoderKLQwenImage),
    "Qwen3 4 B": (FLUX_2_KLEIN.text_encoder_parameters, lambda: Qwen3ForCausalLM(Qwen3Config(**QWEN3))),
    "VAE of FLUX.2": (FLUX_2_KLEIN.vae_parameters, AutoencoderKLFlux2),
    "Gemma 2 2 B": (SANA.text_encoder_parameters, lambda: Gemma2Model(Gemma2Config())),
    "VAE of SANA": (SANA.vae_parameters, lambda: AutoencoderDC(**DC_SANA)),
    "VAE of HunyuanVideo": (published.KL_VIDEO_HUNYUAN, AutoencoderKLHunyuanVideo),
}


def parts_off() -> dict[str, int]:
    """Return each part's parameters less the number in engine/memory/published.py. All should be 0."""
    off = {}
    for name, (noted, build) in PARTS.items():
        with torch.device("meta"):
            off[name] = sum(parameter.numel() for parameter in build().parameters()) - noted
    return off
