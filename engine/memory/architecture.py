"""Layer sizes of a diffusion transformer, from its `transformer/config.json`, and the tokens of an image or a video."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never, cast

from engine.model_folder import ImageSize

FamilyName = Literal["qwen-image", "sd3", "flux", "wan", "hunyuan-video"]
"""Families of diffusers' transformer classes (engine/models/)."""

PATCH = 2
"""Latent values of a token along one side, in all published models with patches."""

PIXELS_PER_TOKEN = 8 * PATCH
"""Pixels of an image per token, in each direction: 8 per latent value. Of most published models."""

FRAMES_PER_LATENT = 4
"""Frames of a video per latent frame, after the first frame. Of the published models."""

CLIP_TOKENS = 77
"""Tokens of SD3's CLIP encoders, which stand before the T5 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Layer sizes of a transformer. Widths count numbers, not bytes."""

    family: FamilyName
    layers: int
    """Blocks with one stream for the image and one for the text; for Wan, all blocks."""
    heads: int
    head_width: int
    text_width: int
    """Width of a token of the text encoder."""
    channels: int
    """Numbers of a token of the latent before the first layer: latent channels x patch."""
    output_channels: int
    """Numbers of a token after the last layer."""
    mlp_width: int
    """Inner width of the feed-forward layers."""
    single_layers: int = 0
    """Blocks with one stream for image and text together (FLUX, HunyuanVideo)."""
    dual_layers: int = 0
    """Blocks with a second attention over the image alone, counted from the first block (SD3.5-medium)."""
    refiner_layers: int = 0
    """Blocks that refine the text before the first block (HunyuanVideo)."""
    pooled_width: int = 0
    """Width of the pooled text vector. 0: the family has none."""
    positions: int = 0
    """Rows of the learned position table (SD3). It is a buffer: stored, but not trained."""
    has_head_norm: bool = True
    """True if queries and keys are normalised. Only SD3 without .5 does not."""
    takes_guidance: bool = False
    """True if the guidance scale is an input (distilled guidance), so guidance needs no second branch."""
    pixels_per_token: int = PIXELS_PER_TOKEN
    """Pixels of an image per token, in each direction: the VAE's factor times the patch."""
    frames_per_latent: int = FRAMES_PER_LATENT
    """Frames of a video per latent frame, after the first frame."""

    @property
    def width(self) -> int:
        """Return the width of a token inside the transformer."""
        return self.heads * self.head_width


def text_of(size: ImageSize) -> str:
    """Return a size in words, like `512 x 512 px` or `33 frames of 240 x 416 px`."""
    frames = f"{size.frames} frames of " if size.frames > 1 else ""
    return f"{frames}{size.height} x {size.width} px"


def image_tokens(architecture: Architecture, size: ImageSize) -> int:
    """Return the tokens of the latent of an image or a video."""
    frames = (size.frames - 1) // architecture.frames_per_latent + 1
    side = architecture.pixels_per_token
    return frames * (size.height // side) * (size.width // side)


def text_tokens(family: FamilyName, size: ImageSize) -> int:
    """Return the text tokens that the transformer reads. Shorter prompts are padded to this length."""
    return size.text_tokens + (CLIP_TOKENS if family == "sd3" else 0)


def architecture_from(family: FamilyName, config: Mapping[str, object]) -> Architecture:
    """Read the layer sizes from a model's `transformer/config.json`.

    Raises ValueError for a missing number; the error names the key.
    """

    def number(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int):
            raise ValueError(f"transformer/config.json of {family} has {key}: {value!r}; a whole number is needed")
        return value

    heads, head_width, layers = number("num_attention_heads"), number("attention_head_dim"), number("num_layers")
    width, channels = heads * head_width, number("in_channels")
    output = config.get("out_channels") or channels
    if not isinstance(output, int):
        raise ValueError(f"transformer/config.json of {family} has out_channels: {output!r}; a whole number is needed")

    def built(
        *, text: str, mlp: int, packed: bool, single: int = 0, dual: int = 0, refiner: int = 0, pooled: int = 0,
        positions: int = 0, has_head_norm: bool = True, takes_guidance: bool = False,
    ) -> Architecture:  # fmt: skip
        return Architecture(
            family=family, layers=layers, heads=heads, head_width=head_width, text_width=number(text), mlp_width=mlp,
            channels=channels if packed else 4 * channels, single_layers=single,
            output_channels=output if family == "flux" else 4 * output,
            dual_layers=dual, refiner_layers=refiner, pooled_width=pooled, positions=positions,
            has_head_norm=has_head_norm, takes_guidance=takes_guidance,
        )  # fmt: skip

    match family:
        case "qwen-image":
            return built(text="joint_attention_dim", mlp=4 * width, packed=True)
        case "flux":
            return built(
                text="joint_attention_dim",
                mlp=4 * width,
                packed=True,
                single=number("num_single_layers"),
                pooled=number("pooled_projection_dim"),
                takes_guidance=bool(config.get("guidance_embeds")),
            )
        case "sd3":
            return built(
                text="joint_attention_dim",
                mlp=4 * width,
                packed=False,
                dual=len(cast(Sequence[int], config.get("dual_attention_layers") or ())),
                pooled=number("pooled_projection_dim"),
                positions=number("pos_embed_max_size") ** 2,
                has_head_norm=config.get("qk_norm") is not None,
            )
        case "wan":
            return built(text="text_dim", mlp=number("ffn_dim"), packed=False)
        case "hunyuan-video":
            return built(
                text="text_embed_dim",
                mlp=round(float(cast(float, config.get("mlp_ratio", 4.0))) * width),
                packed=False,
                single=number("num_single_layers"),
                refiner=number("num_refiner_layers"),
                pooled=number("pooled_projection_dim"),
                takes_guidance=bool(config.get("guidance_embeds")),
            )
        case _:
            assert_never(family)
