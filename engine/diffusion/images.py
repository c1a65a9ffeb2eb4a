"""Finished images as bytes and as PIL images."""

import torch
from PIL import Image
from torch import Tensor


def as_bytes(image: Tensor) -> Tensor:
    """Convert an image in [-1, 1] to contiguous uint8 on the CPU: [C, H, W] or [C, F, H, W].

    Decoders may return non-contiguous images.
    """
    return ((image.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).contiguous().cpu()


def as_pil(image: Tensor) -> Image.Image:
    """Convert an image [1 or 3, H, W] in [-1, 1] to a PIL image in RGB."""
    return Image.fromarray(as_bytes(image).expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())
