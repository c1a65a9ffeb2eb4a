"""Decode latents to images: the conventions of diffusers' autoencoders.

`AutoencoderKL` (SD3, FLUX) scales and shifts all channels alike. The video autoencoders work on [B, C, F, H, W]: those
of Wan and Qwen-Image have a mean and a std per channel, that of HunyuanVideo scales all channels alike.

A decoder's activations at full size are hundreds of times larger than the image, so a batch is decoded in slices of
`PIXELS_AT_ONCE`. Frames of more than `TILED_ABOVE` pixels are decoded in overlapping tiles, like in diffusers'
`enable_tiling`; the overlaps are blended, so tiles change an image slightly. Slices change no image.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PIXELS_AT_ONCE = 8 * 512 * 512
"""Pixels decoded at once. The decoders of Wan and Qwen-Image decode one latent frame at a time, and count as one frame;
that of HunyuanVideo decodes several."""

TILED_ABOVE = 1024 * 1024
"""Pixels of a frame above which tiles are used. The published autoencoders decode 1024 x 1024 whole in diffusers."""

TILE, STRIDE = 512, 384
"""Pixels of a tile's side, and the distance of two tiles, for video autoencoders. diffusers' own tiles have half the
side and four times the number. `AutoencoderKL` has tiles of its training size, 1024 for published models."""


def freeze(module: nn.Module) -> nn.Module:
    """Set eval mode and disable gradients."""
    return module.eval().requires_grad_(False)


@torch.no_grad()
def decode_images(vae: nn.Module, latents: Tensor) -> Tensor:
    """Decode [B, C, h, w] -> [B, 3, H, W] in [-1, 1]. A video autoencoder decodes a single frame."""
    if _has_statistics(vae):
        return decode_video(vae, latents[:, :, None])[:, :, 0]
    config = vae.config
    z = latents / config.scaling_factor + (config.shift_factor or 0.0)  # type: ignore[union-attr, operator]
    return decoded(vae, z)


@torch.no_grad()
def decode_video(vae: nn.Module, latents: Tensor) -> Tensor:
    """Decode [B, C, f, h, w] -> [B, 3, F, H, W] in [-1, 1]."""
    if not _has_statistics(vae):
        return decoded(vae, latents / vae.config.scaling_factor)  # type: ignore[union-attr, operator]
    mean = _per_channel(vae.config.latents_mean, latents)  # type: ignore[union-attr, arg-type]
    std = _per_channel(vae.config.latents_std, latents)  # type: ignore[union-attr, arg-type]
    return decoded(vae, latents * std + mean)


def decoded(vae: nn.Module, z: Tensor) -> Tensor:
    """Decode scaled latents [B, ..., h, w], slice by slice."""
    weight = next(vae.parameters())
    pixels = z.shape[-2] * z.shape[-1] * _pixels_per_latent(vae)
    _tile(vae, pixels > TILED_ABOVE)
    images = []
    frames: int = getattr(vae, "tile_sample_min_num_frames", 1)
    for some in z.split(max(1, PIXELS_AT_ONCE // (pixels * frames))):
        # The latents of trained rollouts were recorded on the CPU.
        part: Tensor = vae.decode(some.to(weight.device, weight.dtype), return_dict=False)[0]  # type: ignore[operator]
        images.append(part.float().clamp(-1.0, 1.0))
    return torch.cat(images)


def _pixels_per_latent(vae: nn.Module) -> int:
    """Return the number of pixels of a frame made from one latent position."""
    factor = getattr(vae, "spatial_compression_ratio", None)
    if factor is None:
        factor = 2 ** (len(vae.config.block_out_channels) - 1)  # type: ignore[union-attr, arg-type]
    return int(factor) ** 2


def _tile(vae: nn.Module, is_large: bool) -> None:
    """Turn tiles on or off for the next decoding."""
    if not is_large:
        vae.disable_tiling()  # type: ignore[operator]
    elif hasattr(vae, "tile_sample_stride_height"):
        vae.enable_tiling(  # type: ignore[operator]
            tile_sample_min_height=TILE,
            tile_sample_min_width=TILE,
            tile_sample_stride_height=STRIDE,
            tile_sample_stride_width=STRIDE,
        )
    else:
        vae.enable_tiling()  # type: ignore[operator]


def _has_statistics(vae: nn.Module) -> bool:
    """Return True if the autoencoder has a mean and a std per channel: that of Wan, or of Qwen-Image."""
    # AutoencoderKL has the key too, with the value None.
    return getattr(vae.config, "latents_mean", None) is not None


def _per_channel(values: Sequence[float], latents: Tensor) -> Tensor:
    return torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1, 1)
