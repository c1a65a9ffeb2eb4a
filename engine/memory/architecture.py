"""Layer sizes of a diffusion transformer, from its `transformer/config.json`, and the tokens of an image or a video."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from engine.families import FAMILIES
from engine.family import FRAMES_PER_LATENT as FRAMES_PER_LATENT
from engine.family import PATCH as PATCH
from engine.family import Architecture as Architecture
from engine.family import ImageSize

CLIP_TOKENS = 77
"""Tokens of SD3's CLIP encoders, which stand before the T5 tokens."""


def text_of(size: ImageSize) -> str:
    """Return a size in words, like `512 x 512 px` or `33 frames of 240 x 416 px`."""
    frames = f"{size.frames} frames of " if size.frames > 1 else ""
    return f"{frames}{size.height} x {size.width} px"


def image_tokens(architecture: Architecture, size: ImageSize) -> int:
    """Return the tokens of the latent of an image or a video."""
    frames = (size.frames - 1) // architecture.frames_per_latent + 1
    side = architecture.pixels_per_token
    return frames * (size.height // side) * (size.width // side)


def text_tokens(family: str, size: ImageSize) -> int:
    """Return the text tokens that the transformer reads. Shorter prompts are padded to this length."""
    return size.text_tokens + (CLIP_TOKENS if family == "sd3" else 0)


def architecture_from(family: str, config: Mapping[str, object]) -> Architecture:
    """Read the layer sizes from a model's `transformer/config.json`.

    Raises ValueError for a missing number; the error names the key.
    """

    def number(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int):
            raise ValueError(f"transformer/config.json of {family} has {key}: {value!r}; a whole number is needed")
        return value

    if family in FAMILIES:
        try:
            return FAMILIES[family].architecture(config)
        except (KeyError, TypeError) as error:
            raise ValueError(f"transformer/config.json of {family} gives no layer sizes ({error!r})") from None
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
            return replace(built(text="joint_attention_dim", mlp=4 * width, packed=True), adapted_width=4 * width)
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
            ffn = number("ffn_dim")
            return replace(built(text="text_dim", mlp=ffn, packed=False), adapted_width=ffn)
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
            raise ValueError(f"{family} is no model family")
