"""Sizes of published models. Figures, no decisions.

Sources: `transformer/config.json` of each model's diffusers folder on the Hugging Face hub (Qwen/Qwen-Image,
black-forest-labs/FLUX.1-dev, stabilityai/stable-diffusion-3.5-medium and -large, Wan-AI/Wan2.1-T2V-1.3B-Diffusers,
-14B-Diffusers and Wan-AI/Wan2.2-TI2V-5B-Diffusers, hunyuanvideo-community/HunyuanVideo). The benchmark builds the
diffusers and transformers classes with these values on torch's meta device and compares the numbers of parameters
(`python -m tests.benchmarks.memory`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.families import FAMILIES
from engine.family import PublishedSizes
from engine.memory.activations import operations_of
from engine.memory.architecture import Architecture, architecture_from, image_tokens, text_tokens
from engine.model_folder import ImageSize
from engine.tally import HALF

T5_XXL = 4_762_310_656
CLIP_L = 123_060_480
CLIP_L_PROJECTED = 123_650_304
CLIP_G_PROJECTED = 694_659_840
UMT5_XXL = 5_680_910_336
QWEN_VL_7B = 8_292_166_656
LLAMA_8B = 7_505_186_816
"""Parameters of text encoders, without heads that predict words. QWEN_VL_7B is the whole Qwen2.5-VL with its head."""

KL_16 = 83_819_683
KL_VIDEO_WAN = 126_892_531
KL_VIDEO_WAN_2_2 = 704_688_668
KL_VIDEO_HUNYUAN = 246_478_803
"""Parameters of VAEs with 16 latent channels: of SD3 and FLUX; of Wan2.1 and Qwen-Image; of
Wan2.2-TI2V-5B; of HunyuanVideo."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel(PublishedSizes):
    """A published model."""

    family: str

    @property
    def architecture(self) -> Architecture:
        return replace(architecture_from(self.family, self.config), pixels_per_token=self.vae_factor * self.patch)

    def at(self, size: ImageSize) -> "SizedModel":
        """Return the model at one size."""
        return SizedModel(
            model=self.name,
            text=self.name,
            architecture=self.architecture,
            size=size,
            text_encoder_bytes=self.text_encoder_parameters * HALF,
            vae_bytes=self.vae_parameters * HALF,
            file_bytes=self.file_bytes,
            licence=self.licence,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedModel:
    """A model and the size of its images: all that its memory and its seconds follow from."""

    model: str
    """Name of the published model whose timings count."""
    text: str
    """The model in words: its published name, or its family and folder."""
    architecture: Architecture
    size: ImageSize
    text_encoder_bytes: int
    vae_bytes: int
    file_bytes: int
    licence: str | None
    """As of `PublishedModel`. None: the folder is of another model than the published ones."""

    @property
    def operations(self) -> int:
        """Return the floating point operations of a pass of one image, without guidance."""
        return operations_of(self.architecture, self.size)

    @property
    def tokens(self) -> int:
        return image_tokens(self.architecture, self.size) + text_tokens(self.architecture.family, self.size)

    @property
    def blocks(self) -> int:
        return self.architecture.layers + self.architecture.single_layers


QWEN_IMAGE = PublishedModel(
    name="Qwen-Image",
    family="qwen-image",
    config={
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "joint_attention_dim": 3584,
    },
    text_encoder_parameters=QWEN_VL_7B,
    vae_parameters=KL_VIDEO_WAN,
    spelled=r"qwenimage(2512)?",
    licence="Apache-2.0",
)

FLUX_1_DEV = PublishedModel(
    name="FLUX.1-dev",
    family="flux",
    config={
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
    },
    text_encoder_parameters=T5_XXL + CLIP_L,
    vae_parameters=KL_16,
    spelled=r"flux1?(dev|schnell|kreadev)?",
    licence="FLUX.1 non-commercial (schnell: Apache-2.0)",
)

SD3_5_MEDIUM = PublishedModel(
    name="SD3.5-medium",
    family="sd3",
    config={
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 24,
        "num_attention_heads": 24,
        "attention_head_dim": 64,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    },
    text_encoder_parameters=T5_XXL + CLIP_L_PROJECTED + CLIP_G_PROJECTED,
    vae_parameters=KL_16,
    spelled=r"(sd|stablediffusion)35medium",
    licence="Stability AI community",
)

SD3_5_LARGE = PublishedModel(
    name="SD3.5-large",
    family="sd3",
    config={
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 38,
        "num_attention_heads": 38,
        "attention_head_dim": 64,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 2432,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 192,
        "qk_norm": "rms_norm",
    },
    text_encoder_parameters=T5_XXL + CLIP_L_PROJECTED + CLIP_G_PROJECTED,
    vae_parameters=KL_16,
    spelled=r"(sd|stablediffusion)35large(turbo)?",
    licence="Stability AI community",
)

WAN_1_3B = PublishedModel(
    name="Wan2.1-1.3B",
    family="wan",
    config={
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 30,
        "num_attention_heads": 12,
        "attention_head_dim": 128,
        "ffn_dim": 8960,
        "text_dim": 4096,
    },
    text_encoder_parameters=UMT5_XXL,
    vae_parameters=KL_VIDEO_WAN,
    file_bytes=4,
    spelled=r"wan(21)?(t2v)?13b",
    licence="Apache-2.0",
)

WAN_14B = PublishedModel(
    name="Wan2.1-14B",
    family="wan",
    config={
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 40,
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "ffn_dim": 13824,
        "text_dim": 4096,
    },
    text_encoder_parameters=UMT5_XXL,
    vae_parameters=KL_VIDEO_WAN,
    file_bytes=4,
    spelled=r"wan(21)?(t2v)?14b",
    licence="Apache-2.0",
)

WAN_5B = PublishedModel(
    name="Wan2.2-TI2V-5B",
    family="wan",
    config={
        "in_channels": 48,
        "out_channels": 48,
        "num_layers": 30,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "ffn_dim": 14336,
        "text_dim": 4096,
    },
    text_encoder_parameters=UMT5_XXL,
    vae_parameters=KL_VIDEO_WAN_2_2,
    spelled=r"wan22(ti2v)?5b",
    licence="Apache-2.0",
    vae_factor=16,
)

HUNYUAN_VIDEO = PublishedModel(
    name="HunyuanVideo",
    family="hunyuan-video",
    config={
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
    },
    text_encoder_parameters=LLAMA_8B + CLIP_L,
    vae_parameters=KL_VIDEO_HUNYUAN,
    spelled=r"hunyuanvideo",
    licence="Tencent Hunyuan community (not for the EU, the UK and South Korea)",
)

PUBLISHED = (
    QWEN_IMAGE,
    FLUX_1_DEV,
    SD3_5_MEDIUM,
    SD3_5_LARGE,
    WAN_1_3B,
    WAN_14B,
    WAN_5B,
    HUNYUAN_VIDEO,
    *(PublishedModel(family=family.name, **vars(sizes)) for family in FAMILIES.values() for sizes in family.published),
)


def _embedded(channels: int, output_channels: int) -> Architecture:
    """Return the sizes of a model that ships with spotrl: a narrow Qwen-Image in pixel space (engine/models/)."""
    heads, head_width = 4, 24
    return Architecture(
        family="qwen-image",
        layers=4,
        heads=heads,
        head_width=head_width,
        text_width=64,
        channels=channels,
        output_channels=output_channels,
        mlp_width=4 * heads * head_width,
        adapted_width=4 * heads * head_width,
    )


EMBEDDED: Mapping[str, Architecture] = {
    "digits-ocr": _embedded(4 * 4, 4 * 4),
    "shapes": _embedded(3 * 9 * 9 + 2 * 4 + 64, 3 * 9 * 9),
}
"""Sizes of the models that ship with spotrl. A token is a patch of 4 x 4 grey values, or of 9 x 9 colours with its row,
its column and the text."""
