"""Counter-based noise: everything random about a rollout is a function of `(seed, step)`.

Step 0 is the noise that denoising starts from; step k + 1 is the increment that denoising step k adds.
The whole latent is drawn, on the CPU, before anything is sharded: Philox raw words, then our own Box-Muller in
float64, cast to float32. No library's `normal()` is involved, because those may change between versions.

The promise: equal (seed, step, shape) give equal bits on every worker, in every batch, at every SP degree. A change
of one bit unmakes every seed ranking, so it needs a new `NOISE_VERSION`; the golden vectors in the tests say so.
"""

from collections.abc import Sequence
from math import pi, prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NOISE_VERSION = 1

_TO_UNIT = 2.0**-53
"""The upper 53 bits of a word, times this, are a float64 in [0, 1)."""


def noise(seed: int, step: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Standard normal values of one picture at one step.

    seed, step  64 bits each, unsigned: the key of the Philox generator
    returns     float32 of the given shape
    """
    return _rows([seed], step, shape)[0]


def noise_rows(seeds: Sequence[int], step: int, shape: tuple[int, ...]) -> Tensor:
    """The noise of several pictures at one step; each row depends on its own seed alone.

    returns  [B, *shape] fp32, on the CPU
    """
    return torch.from_numpy(_rows(seeds, step, shape))


def _rows(seeds: Sequence[int], step: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    count = prod(shape)
    pairs = (count + 1) // 2
    words = _words(seeds, step, 2 * pairs) >> np.uint64(11)
    # One is added before the logarithm: u lies in (0, 1], so that log(0) cannot happen.
    radius = np.sqrt(-2.0 * np.log((words[:, :pairs] + np.uint64(1)) * _TO_UNIT))
    angle = words[:, pairs:] * (2.0 * pi * _TO_UNIT)
    values = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    return values[:, :count].astype(np.float32).reshape(len(seeds), *shape)


def _words(seeds: Sequence[int], step: int, count: int) -> NDArray[np.uint64]:
    """Raw Philox words of the keys (seed, step): [B, count]. One generator is set to every key in turn, because making
    one takes longer than drawing a picture's words."""
    words = np.empty((len(seeds), count), dtype=np.uint64)
    philox = np.random.Philox(key=0)
    fresh = philox.state
    for row, seed in zip(words, seeds, strict=True):
        key = np.array([seed, step], dtype=np.uint64)
        philox.state = {**fresh, "state": {**fresh["state"], "key": key}}
        row[:] = philox.random_raw(count)
    return words
