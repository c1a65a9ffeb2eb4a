"""Forecast the seconds of a pass, of a training pass and of a decoding from the tables of `figures.py`. Pure.

    model, size -> operations (engine/memory/) / operations per second that were reached -> seconds on an H100
    -> another GPU by its speed -> several GPUs by their efficiency

A forecast at a size of the tables is the table's figure. Between two sizes, the operations per second are interpolated
in the logarithm of the tokens; beyond the last size, they are those of the last size. An eager pass of few images waits
for the CPU, which launches its kernels, and takes at least the launch time.
"""

import math
from collections.abc import Collection
from functools import cache
from itertools import pairwise

from engine.memory.published import PUBLISHED, SizedModel
from engine.model_folder import ImageSize
from engine.timing.figures import (
    ALL_TO_ALL_SECONDS,
    LAUNCH_SECONDS,
    LAUNCH_SECONDS_PER_BLOCK,
    LIKE,
    LONG_TOKENS,
    PASSES,
    SHARED_EFFICIENCY,
    SHORT_TOKENS,
    SPEED,
    STEP_LAUNCH_SECONDS,
    STEP_LAUNCH_SECONDS_PER_BLOCK,
    STEP_PASSES,
    STEP_PASSES_FULL,
    STEP_PASSES_OTHERWISE,
    TUNED,
    UNMERGED,
    VAE_SECONDS_PER_MEGAPIXEL,
    Figure,
    PassTime,
    Software,
)

MEGA = 1e6


def published_at(model: str, size: ImageSize) -> SizedModel:
    """Return a published model at a size. Raises ValueError for an unknown name."""
    for published in PUBLISHED:
        if published.name == model:
            return published.at(size)
    raise ValueError(f"{model} is no published model; known are {', '.join(published.name for published in PUBLISHED)}")


def known_speed(gpu: str) -> Figure | None:
    """Return the speed of a GPU relative to an H100, or None for a GPU without timings. Case does not matter."""
    return next((figure for name, figure in SPEED.items() if name.lower() == gpu.lower()), None)


def speed(gpu: str) -> float:
    """Return the speed of a GPU relative to an H100. Raises ValueError for a GPU without timings."""
    factor = known_speed(gpu)
    if factor is None:
        raise ValueError(f"{gpu} has no speed in engine/timing/figures.py; known are {', '.join(SPEED)}")
    return factor.value


def rate(
    model: str, tokens: int, software: Software = "eager", *, without: Collection[PassTime] = ()
) -> tuple[float, tuple[PassTime, ...]]:
    """Return the operations per second of a model on an H100, and the timings behind the number.

    without  timings that are left out, as if nobody had measured them
    raises   ValueError: no timing is left for the model
    """
    named = LIKE.get(model, model)
    of_model = [timing for timing in PASSES if timing.model == named and timing not in without]
    if not of_model:
        raise ValueError(f"{model} has no timing in engine/timing/figures.py; add one with its source")
    of_software = [timing for timing in of_model if timing.software == software]
    if not of_software:
        per_second, used = rate(model, tokens, of_model[0].software, without=without)
        return per_second * (TUNED.value if software == "tuned" else 1 / TUNED.value), used
    points = sorted(((*_reached(timing), timing) for timing in of_software), key=lambda point: point[0])
    if tokens <= points[0][0]:
        return points[0][1], (points[0][2],)
    for (low, begin, first), (high, end, second) in pairwise(points):
        if tokens <= high:
            share = math.log(tokens / low) / math.log(high / low)
            return begin + (end - begin) * share, (first, second)
    return points[-1][1], (points[-1][2],)


@cache
def _reached(timing: PassTime) -> tuple[int, float]:
    """Return the tokens of a timing, and the operations per second that it reached."""
    sized = published_at(timing.model, timing.size)
    return sized.tokens, sized.operations / timing.seconds


def image_seconds(
    sized: SizedModel, gpu: str = "H100", software: Software = "eager", *, without: Collection[PassTime] = ()
) -> float:
    """Return the seconds of an image in a pass of many images, without guidance. `gpu`: one of `SPEED`."""
    reached, _ = rate(sized.model, sized.tokens, software, without=without)
    return sized.operations / (reached * speed(gpu))


def pass_seconds(sized: SizedModel, images: int, gpu: str = "H100", *, branches: int = 1) -> float:
    """Return the seconds of an eager pass of so many images. `branches`: passes of a step, 2 with guidance."""
    launch = LAUNCH_SECONDS.get(sized.model)
    waits = LAUNCH_SECONDS_PER_BLOCK.value * sized.blocks if launch is None else launch.value
    return branches * max(waits, images * image_seconds(sized, gpu))


def step_seconds(sized: SizedModel, rows: int, gpu: str = "H100", *, branches: int = 1, is_full: bool = False) -> float:
    """Return the seconds of an eager training pass of so many rows, forward and backward, with checkpointing.

    `is_full`: every weight is trained, in bf16 passes.
    """
    launch = STEP_LAUNCH_SECONDS.get(sized.model)
    waits = STEP_LAUNCH_SECONDS_PER_BLOCK.value * sized.blocks if launch is None else launch.value
    passes = STEP_PASSES_FULL if is_full else STEP_PASSES.get(sized.model, STEP_PASSES_OTHERWISE)
    return branches * max(waits, rows * passes.value * image_seconds(sized, gpu))


def unmerged_seconds(sized: SizedModel, rows: int, gpu: str = "H100", *, branches: int = 1) -> float:
    """Return the seconds of a pass without gradients through adapters beside the weights, as the trainer runs it."""
    return branches * rows * UNMERGED.value * image_seconds(sized, gpu)


def decode_seconds(size: ImageSize, gpu: str = "H100") -> float:
    """Return the seconds of decoding one image or video."""
    pixels = size.frames * size.height * size.width
    kind = "video" if size.frames > 1 else "image"
    return VAE_SECONDS_PER_MEGAPIXEL[kind].value * pixels / MEGA / speed(gpu)


def shared_efficiency(tokens: int, degree: int) -> float:
    """Return the efficiency of GPUs that share a sequence, beside the time of the all-to-alls.

    Degrees without a figure, like 3 and 6, have the efficiency of the next larger degree of the table.
    """
    if degree <= 1 or tokens <= SHORT_TOKENS:
        return 1.0
    at_most = max(SHARED_EFFICIENCY)
    long = SHARED_EFFICIENCY[min((tabled for tabled in SHARED_EFFICIENCY if tabled >= degree), default=at_most)].value
    share = min(1.0, math.log(tokens / SHORT_TOKENS) / math.log(LONG_TOKENS / SHORT_TOKENS))
    return 1.0 - (1.0 - long) * share


def shared_seconds(alone: float, tokens: int, blocks: int, degree: int) -> float:
    """Return the seconds of a pass on GPUs that share its sequence. `alone`: seconds of the pass on one GPU."""
    if degree <= 1:
        return alone
    return alone / (degree * shared_efficiency(tokens, degree)) + 4 * blocks * ALL_TO_ALL_SECONDS.value
