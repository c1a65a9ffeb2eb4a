"""A reward that costs nothing, so that two cores have time for a fleet: how bright a picture is."""

from collections.abc import Sequence

from torch import Tensor


def brightness(pictures: Tensor, prompts: Sequence[str]) -> list[float]:
    """pictures [B, C, H, W] in [-1, 1]"""
    return [float(picture.double().mean()) for picture in pictures]
