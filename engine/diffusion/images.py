"""Finished images as bytes."""

import torch
from torch import Tensor


def as_bytes(image: Tensor) -> Tensor:
    """Convert an image in [-1, 1] to contiguous uint8 on the CPU: [C, H, W] or [C, F, H, W].

    Decoders may return non-contiguous images.
    """
    return ((image.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).contiguous().cpu()
