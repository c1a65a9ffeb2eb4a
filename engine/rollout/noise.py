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
    count = prod(shape)
    pairs = (count + 1) // 2
    words = np.random.Philox(key=np.array([seed, step], dtype=np.uint64)).random_raw(2 * pairs) >> np.uint64(11)
    # One is added before the logarithm: u lies in (0, 1], so that log(0) cannot happen.
    radius = np.sqrt(-2.0 * np.log((words[:pairs] + np.uint64(1)) * _TO_UNIT))
    angle = words[pairs:] * (2.0 * pi * _TO_UNIT)
    values = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
    return values[:count].astype(np.float32).reshape(shape)


def noise_rows(seeds: Sequence[int], step: int, shape: tuple[int, ...]) -> Tensor:
    """The noise of several pictures at one step; each row depends on its own seed alone.

    returns  [B, *shape] fp32, on the CPU
    """
    return torch.from_numpy(np.stack([noise(seed, step, shape) for seed in seeds]))
