"""The brightness of an image as reward: it costs no time, which two cores need for a fleet; and a slow form of it."""

import time
from collections.abc import Sequence

from torch import Tensor


def brightness(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Return the mean brightness. images: [B, C, H, W] in [-1, 1]"""
    return [float(image.double().mean()) for image in images]


SLOW_SECONDS = 0.05
"""Seconds of the slow form for an image, on a device of its own: this computer's cores are free meanwhile."""


def slow(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Return the mean brightness after `SLOW_SECONDS` for each image."""
    time.sleep(SLOW_SECONDS * len(prompts))
    return brightness(images, prompts)
