"""Measure drift: the distance of evaluation images from the base model's, in properties no reward scores. Pure.

A reward detects only the properties in its score: a recogniser reads text through grey speckle on the paper. Two
statistics over all pixels of an evaluation's kept images detect such changes, in every model family and at negligible
cost:

    tone   the distribution of grey values: haze, burnt colours, a paper that gets darker
    grain  the distribution of differences to the mean of the four neighbours: speckle, blur, outlines

`drift` is the sum of both distances (first Wasserstein, in shares of the range from black to white) to the statistics
of the first evaluation. The first evaluation has the same prompts and seeds, and the start weights of the run. 0 means
no difference. Pixels of all images are pooled, so another text in the same style changes the figure little.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEVELS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Counts of pixels by tone and by grain, both in `LEVELS` steps."""

    tone: tuple[int, ...]
    grain: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"tone": list(self.tone), "grain": list(self.grain)}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "Look":
        return Look(tone=tuple(raw["tone"]), grain=tuple(raw["grain"]))


def look_of(images: Sequence[NDArray[np.uint8]]) -> Look:
    """Return the counts of pixels by tone and by grain of images [C, H, W] or [C, F, H, W]."""
    tone, grain = np.zeros(LEVELS, np.int64), np.zeros(LEVELS, np.int64)
    for image in images:
        grey = image.astype(np.float32).mean(axis=0)
        frames = grey.reshape(-1, *grey.shape[-2:])
        tone += _counts(frames)
        grain += _counts(np.abs(frames - _neighbours(frames)))
    return Look(tone=tuple(tone.tolist()), grain=tuple(grain.tolist()))


def drift(look: Look, base: Look) -> float:
    """Return the drift of `look` from `base`: the sum of the tone and grain distances. Both need at least one pixel."""
    return _distance(look.tone, base.tone) + _distance(look.grain, base.grain)


def _neighbours(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """frames [F, H, W] -> the mean of each pixel's four neighbours; an edge's missing neighbour is the pixel itself."""
    padded = np.pad(frames, ((0, 0), (1, 1), (1, 1)), mode="edge")
    above, below = padded[:, :-2, 1:-1], padded[:, 2:, 1:-1]
    left, right = padded[:, 1:-1, :-2], padded[:, 1:-1, 2:]
    return ((above + below + left + right) / 4).astype(np.float32)


def _counts(values: NDArray[np.float32]) -> NDArray[np.int64]:
    counts: NDArray[np.int64] = np.bincount(np.rint(values).astype(np.int64).ravel(), minlength=LEVELS)
    return counts


def _distance(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the first Wasserstein distance of two histograms, as a share of their range."""
    ours, theirs = np.cumsum(a) / np.sum(a), np.cumsum(b) / np.sum(b)
    return float(np.abs(ours - theirs).sum() / (LEVELS - 1))
