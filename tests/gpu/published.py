"""Transformers of published sizes with random weights, and narrow ones of the same classes for a CPU."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import nn

from engine.config import GUIDANCE
from engine.memory.published import FLUX_1_DEV, QWEN_IMAGE, SD3_5_MEDIUM, WAN_1_3B, WAN_14B, PublishedModel
from engine.models.flux import FluxAdapter
from engine.models.qwen_image import QwenImageAdapter
from engine.models.sd3 import SD3Adapter
from engine.models.text import EncodedText
from engine.models.wan import WanAdapter

TEXT_TOKENS = 256
"""Text tokens of Qwen-Image's passes. Others have their pipeline's default."""


@dataclass(frozen=True, kw_only=True)
class Random:
    """A published transformer with random weights, and its adapter."""

    published: PublishedModel
    transformer: Callable[..., nn.Module]
    adapter: Callable[..., Any]
    text_tokens: int
    latents: dict[str, tuple[int, ...]]
    """Size of the latent, by the size of the image or video."""
    billions: float
    gib: int = 75
    """Memory that the GPU must have for passes and training steps."""
    seconds: float = 0.0
    """Time limit of the check of passes and training steps at all sizes. 0: the model has checks of its own."""
    more: dict[str, Any] = field(default_factory=dict)
    """Values of the published configuration that set no size."""
    narrow: dict[str, Any]
    """What differs in the model for the CPU."""

    @property
    def guidance(self) -> float:
        return GUIDANCE[self.published.family]

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.published.config) | self.more

    def built(self, device: str, dtype: torch.dtype, *, is_narrow: bool = False) -> nn.Module:
        """Return the transformer, created on the device."""
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                transformer = self.transformer(**self.config | (self.narrow if is_narrow else {}))
        finally:
            torch.set_default_dtype(usual)
        return transformer.eval().to(device)

    def over(self, transformer: nn.Module, size: str, *, is_narrow: bool = False, vae: nn.Module | None = None) -> Any:
        """Return our adapter for one size over the transformer. Its text is random. `vae`: None: it decodes nothing."""
        sizes, device = transformer.config, next(transformer.parameters()).device
        width = sizes.get("joint_attention_dim", sizes.get("text_dim"))
        latent = tuple(min(4, side) for side in self.latents[size]) if is_narrow else self.latents[size]

        def encode(prompts):
            shape = (len(prompts), 8 if is_narrow else self.text_tokens)
            hidden = torch.randn(*shape, width, device=device)
            pooled = torch.randn(len(prompts), sizes.get("pooled_projection_dim", 1), device=device)
            return EncodedText(hidden, torch.ones(shape, dtype=torch.bool, device=device), pooled)

        return self.adapter(transformer, vae or nn.Identity(), encode, latent)


IMAGES = {"512 px": (64, 64), "1024 px": (128, 128)}
VIDEO = {"33 frames of 240 x 416": (9, 30, 52)}

LAYERS = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12}
TEXT = {"joint_attention_dim": 32, "pooled_projection_dim": 16}
NARROW_SD3 = {"sample_size": 8, "caption_projection_dim": 24, "pos_embed_max_size": 16, "dual_attention_layers": (0,)}
NARROW_WAN = LAYERS | {"ffn_dim": 32, "freq_dim": 16, "text_dim": 32}

MODELS = {
    "20 B": Random(
        published=QWEN_IMAGE,
        transformer=QwenImageTransformer2DModel,
        adapter=QwenImageAdapter,
        text_tokens=TEXT_TOKENS,
        latents={"512 px": (64, 64), "1280 px": (160, 160)},
        billions=20.43,
        more={"patch_size": 2, "axes_dims_rope": (16, 56, 56)},
        narrow=LAYERS | {"joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4)},
    ),
    "FLUX.1": Random(
        published=FLUX_1_DEV,
        transformer=FluxTransformer2DModel,
        adapter=FluxAdapter,
        text_tokens=512,
        latents=IMAGES,
        billions=11.90,
        gib=40,
        seconds=150,
        narrow=LAYERS | TEXT | {"num_single_layers": 2, "axes_dims_rope": (4, 4, 4)},
    ),
    "SD3.5-medium": Random(
        published=SD3_5_MEDIUM,
        transformer=SD3Transformer2DModel,
        adapter=SD3Adapter,
        text_tokens=333,
        latents=IMAGES,
        billions=2.24,
        gib=24,
        seconds=120,
        narrow=LAYERS | TEXT | NARROW_SD3,
    ),
    "Wan 1.3 B": Random(
        published=WAN_1_3B,
        transformer=WanTransformer3DModel,
        adapter=WanAdapter,
        text_tokens=512,
        latents=VIDEO,
        billions=1.42,
        gib=24,
        seconds=120,
        narrow=NARROW_WAN,
    ),
    "Wan 14 B": Random(
        published=WAN_14B,
        transformer=WanTransformer3DModel,
        adapter=WanAdapter,
        text_tokens=512,
        latents=VIDEO,
        billions=14.29,
        gib=75,
        seconds=180,
        narrow=NARROW_WAN,
    ),
}
"""Without its table of positions, SD3.5-medium has 2.24 billion parameters; published are 2.5."""
