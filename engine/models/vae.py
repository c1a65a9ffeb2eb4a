"""Decode latents to images: the two conventions of diffusers' autoencoders.

`AutoencoderKL` (SD3, FLUX) scales and shifts all channels alike. The video autoencoders of Wan and Qwen-Image have a
mean and a std per channel and work on [B, C, F, H, W].
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def freeze(module: nn.Module) -> nn.Module:
    """Set eval mode and disable gradients."""
    return module.eval().requires_grad_(False)


@torch.no_grad()
def decode_images(vae: nn.Module, latents: Tensor) -> Tensor:
    """Decode [B, C, h, w] -> [B, 3, H, W] in [-1, 1]. A video autoencoder decodes a single frame."""
    if _is_video(vae):
        return decode_video(vae, latents[:, :, None])[:, :, 0]
    config = vae.config
    z = latents / config.scaling_factor + (config.shift_factor or 0.0)  # type: ignore[union-attr, operator]
    return _decoded(vae, z)


@torch.no_grad()
def decode_video(vae: nn.Module, latents: Tensor) -> Tensor:
    """Decode [B, C, f, h, w] -> [B, 3, F, H, W] in [-1, 1]."""
    mean = _per_channel(vae.config.latents_mean, latents)  # type: ignore[union-attr, arg-type]
    std = _per_channel(vae.config.latents_std, latents)  # type: ignore[union-attr, arg-type]
    return _decoded(vae, latents * std + mean)


def _decoded(vae: nn.Module, z: Tensor) -> Tensor:
    weight = next(vae.parameters())
    # The latents of trained rollouts were recorded on the CPU.
    images: Tensor = vae.decode(z.to(weight.device, weight.dtype), return_dict=False)[0]  # type: ignore[operator]
    return images.float().clamp(-1.0, 1.0)


def _is_video(vae: nn.Module) -> bool:
    # AutoencoderKL has the key too, with the value None.
    return getattr(vae.config, "latents_mean", None) is not None


def _per_channel(values: Sequence[float], latents: Tensor) -> Tensor:
    return torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1, 1)
