"""Counter-based noise: all randomness of a rollout is a function of `(seed, step)`.

Step 0 is the initial noise of denoising. Step k + 1 is the increment added by denoising step k.
The whole latent is drawn on the CPU before sharding: Philox raw words, then our own Box-Muller in float64, cast to
float32. No library's `normal()` is used, because library functions may change between versions.

The promise: equal (seed, step, shape) give equal bits on every worker, in every batch, at every SP degree. A change
of a single bit invalidates every seed ranking and needs a new `NOISE_VERSION`. Golden vectors in the tests detect the
change.
"""

from collections.abc import Sequence
from math import pi, prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NOISE_VERSION = 1

_TO_UNIT = 2.0**-53
"""Factor from the upper 53 bits of a word to a float64 in [0, 1)."""


def noise(seed: int, step: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the standard normal values of an image at a step.

    seed, step  64 bits each, unsigned: the key of the Philox generator
    returns     float32 of the given shape
    """
    row: np.ndarray = _rows([seed], step, shape)[0]
    return row


def noise_rows(seeds: Sequence[int], step: int, shape: tuple[int, ...]) -> Tensor:
    """Return the noise of several images at a step. Each row depends on its own seed alone.

    returns  [B, *shape] fp32, on the CPU
    """
    return torch.from_numpy(_rows(seeds, step, shape))


def _rows(seeds: Sequence[int], step: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    count = prod(shape)
    pairs = (count + 1) // 2
    words = _words(seeds, step, 2 * pairs) >> np.uint64(11)
    # Add 1 before the logarithm: u lies in (0, 1], so log(0) cannot happen.
    radius = np.sqrt(-2.0 * np.log((words[:, :pairs] + np.uint64(1)) * _TO_UNIT))
    angle = words[:, pairs:] * (2.0 * pi * _TO_UNIT)
    values = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    return values[:, :count].astype(np.float32).reshape(len(seeds), *shape)


def _words(seeds: Sequence[int], step: int, count: int) -> NDArray[np.uint64]:
    """Return the raw Philox words of the keys (seed, step): [B, count].

    A single generator is set to every key in turn, because creating a generator takes longer than drawing an image's
    words.
    """
    words = np.empty((len(seeds), count), dtype=np.uint64)
    philox = np.random.Philox(key=0)
    fresh = philox.state
    for row, seed in zip(words, seeds, strict=True):
        key = np.array([seed, step], dtype=np.uint64)
        philox.state = {**fresh, "state": {**fresh["state"], "key": key}}
        row[:] = philox.random_raw(count)
    return words
