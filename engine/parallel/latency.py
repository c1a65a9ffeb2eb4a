"""Step-time estimates for d GPUs: a model until steps are measured, then the measurements.

    t(d) = F / (d e(d) r) + 4 L alpha      (no second term for d = 1, and e(1) = 1)

F is the floating point operations of a forward pass and r the operations per second that a GPU reaches. e is the
efficiency of GPUs that share a long sequence. L is the number of blocks, with 4 all-to-alls each (query, key, value,
output); alpha is the launch cost of an all-to-all. r, e and alpha come from measured and published timings
(engine/timing/figures.py). A step of a single image that waits for the CPU is not modelled: workers batch images.
Pure: no torch, no clock.

The promise: measurements win. The model only fills the gaps, in proportion to the measurements.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from engine.memory.published import SizedModel
from engine.model_folder import ImageSize
from engine.timing.figures import Software
from engine.timing.seconds import image_seconds, published_at, shared_seconds

LAST = 32
"""Number of newest steps in the median. Enough steps to ignore a few slow steps, and few enough to notice new
weights, a new batch shape or a hot GPU within a request or two. Chosen."""


TOKEN_PIXELS = 16
"""Height and width of an image of one token in the published image models."""


def modelled_step_seconds(
    sized: SizedModel,
    degrees: Iterable[int],
    *,
    gpu: str = "H100",
    forwards: int = 1,
    software: Software = "eager",
) -> dict[int, float]:
    """Return the modelled seconds of a denoising step by degree, for use before any measurement.

    sized     a published model at the size of a request (engine/memory/published.py)
    gpu       a GPU with a speed in engine/timing/figures.py
    forwards  forward passes per step: 2 with guidance
    raises    ValueError: a degree below 1, no forward pass, an unknown GPU
    """
    if forwards < 1:
        raise ValueError(f"a step of {forwards} passes; it must be 1 or more")
    alone = image_seconds(sized, gpu, software)
    seconds = {}
    for degree in degrees:
        if degree < 1:
            raise ValueError(f"degree {degree} of sequence parallelism; use 1 (alone) or more GPUs")
        seconds[degree] = forwards * shared_seconds(alone, sized.tokens, sized.blocks, degree)
    return seconds


def believed_step_seconds(latent_shape: Sequence[int], degrees: Iterable[int]) -> dict[int, float]:
    """Return the modelled step seconds of an image by degree, for use before any measurement.

    The model is Qwen-Image, with as many tokens as the image and no text.

    latent_shape  [S, C] packed, [C, H, W] or [C, F, H, W] in patches of 2 x 2; without the batch

    Another network takes another time. The plan depends on the ratio between degrees, and the ratio depends mostly on
    the tokens. The first measured step sets the scale (`with_measured`).
    """
    tokens = latent_shape[0] if len(latent_shape) == 2 else math.prod(latent_shape[1:]) // 4
    row_of_tokens = ImageSize(TOKEN_PIXELS, TOKEN_PIXELS * max(1, tokens), text_tokens=0)
    return modelled_step_seconds(published_at("Qwen-Image", row_of_tokens), degrees)


def with_measured(modelled: Mapping[int, float], observed: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the step table of a request class after measurements.

    modelled  seconds of a step by degree: the estimate
    observed  measured seconds of steps by degree, newest last; degrees outside `modelled` are ignored
    returns   by degree of `modelled`: the median of the `LAST` newest steps; for an unmeasured degree, the model times
              the ratio of measurement to model at the nearest measured degree (in powers of two; on a tie the smaller)
    raises    ValueError: a step time that is zero, negative or not finite

    Use the median, not the mean: a first step compiles, and a commit or a neighbour slows an occasional step. Such
    steps do not predict the next step. A moving average would carry a slow step along for a dozen more.
    """
    measured = {}
    for degree, steps in observed.items():
        if degree in modelled and steps:
            measured[degree] = statistics.median(steps[-LAST:])
            if not 0 < measured[degree] < math.inf:
                raise ValueError(f"steps at degree {degree} took {measured[degree]} s; record finite times above 0")
    if not measured:
        return dict(modelled)
    table = {}
    for degree, seconds in modelled.items():
        near = min(sorted(measured), key=lambda near_degree: abs(math.log2(near_degree / degree)))
        table[degree] = seconds * measured[near] / modelled[near]
    return table
