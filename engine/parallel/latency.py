"""Step-time estimates for d GPUs: a model until steps are measured, then the measurements.

    t(d) = F / (d P mfu) + 4 L alpha + V(d) / B        (no second and third term for d = 1)

F is the floating point operations of a forward pass, P the GPU's peak and mfu the reached share of the peak. L is the
number of blocks, with 4 all-to-alls each (query, key, value, output); alpha is the launch cost of an all-to-all. V(d)
is the bytes sent by a rank and B the rank's bandwidth.
Formula and points: research notes, engine 6; every point names its publisher. Pure: no torch, no clock.

The promise: measurements win. The model only fills the gaps, in proportion to the measurements.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

ALPHA_SECONDS = 80e-6
"""Launch, layout copies and synchronisation of an all-to-all of any size. Published: FLUX.1-dev at 1024 pixels
on 2 and 4 H100 loses 18.9 and 19.8 ms a step, 83 us for each of 228 (xDiT, docs/performance/flux.md)."""

BYTES = 2
"""Bytes of an activation value: bf16."""

MFU = ((1_100, 0.20), (4_600, 0.49), (9_300, 0.50), (33_000, 0.35), (119_000, 0.32))
"""Reached share of the peak by tokens in the sequence, on H100. Published, in order: Qwen-Image at 512 pixels
(vLLM-Omni), FLUX.1-dev at 1024 (xDiT), Qwen-Image at 1536 (vLLM-Omni), Wan2.1-14B at 480p (bytedance/ATI issue 7),
HunyuanVideo at 720p (xDiT). Between two points: linear in the logarithm of the tokens; beyond: the last point."""

LAST = 32
"""Number of newest steps in the median. Enough steps to ignore a few slow steps, and few enough to notice new
weights, a new batch shape or a hot GPU within a request or two. Chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The speed of a GPU and of the links of its node."""

    flops: float
    """Peak per second, dense bf16."""
    bytes_per_second: float
    """Bandwidth from a GPU to its peers within the node."""


H100 = Gpu(flops=989e12, bytes_per_second=300e9)
A100 = Gpu(flops=312e12, bytes_per_second=300e9)
"""300 GB/s is NVLink as counted in research notes engine 6: the rate for weights, assumed for activations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The sizes of a diffusion transformer that set its step time."""

    blocks: int
    width: int
    heads: int
    weights_per_token: int
    """Weights of a block multiplied with each token."""
    cross_tokens: int = 0
    """Text tokens in cross-attention, for models with text outside the sequence (Wan)."""

    def flops(self, tokens: int) -> float:
        """Return the operations of a forward pass over a sequence of `tokens` (image and text)."""
        linear = 2 * self.blocks * self.weights_per_token * tokens
        return linear + 4 * tokens * (tokens + self.cross_tokens) * self.width * self.blocks

    def bytes_sent(self, tokens: int, degree: int) -> float:
        """Return the bytes sent by each rank in a forward pass."""
        return 4 * self.blocks * (tokens / degree) * self.width * BYTES * (degree - 1) / degree


QWEN_IMAGE = Network(blocks=60, width=3072, heads=24, weights_per_token=12 * 3072**2)
FLUX = Network(blocks=57, width=3072, heads=24, weights_per_token=12 * 3072**2)
HUNYUAN_VIDEO = Network(blocks=60, width=3072, heads=24, weights_per_token=12 * 3072**2)
WAN_14B = Network(blocks=40, width=5120, heads=40, weights_per_token=6 * 5120**2 + 2 * 5120 * 13_824, cross_tokens=512)


def model_flops_utilisation(tokens: int) -> float:
    """Return the reached share of a GPU's peak for a sequence of `tokens`: `MFU`, interpolated between its points."""
    if tokens <= MFU[0][0]:
        return MFU[0][1]
    for (low, begin), (high, end) in pairwise(MFU):
        if tokens <= high:
            return begin + (end - begin) * math.log(tokens / low) / math.log(high / low)
    return MFU[-1][1]


def modelled_step_seconds(
    network: Network, tokens: int, degrees: Iterable[int], *, gpu: Gpu = H100, forwards: int = 1
) -> dict[int, float]:
    """Return the modelled seconds of a denoising step by degree, for use before any measurement.

    tokens    image and text tokens of a request
    forwards  forward passes per step: 2 with guidance
    raises    ValueError: a degree below 1, no tokens
    """
    if tokens < 1 or forwards < 1:
        raise ValueError(f"a step of {forwards} passes over {tokens} tokens; both must be 1 or more")
    one = network.flops(tokens) / (gpu.flops * model_flops_utilisation(tokens))
    seconds = {}
    for degree in degrees:
        if degree < 1:
            raise ValueError(f"degree {degree} of sequence parallelism; use 1 (alone) or more GPUs")
        talk = 0.0
        if degree > 1:
            talk = 4 * network.blocks * ALPHA_SECONDS + network.bytes_sent(tokens, degree) / gpu.bytes_per_second
        seconds[degree] = forwards * (one / degree + talk)
    return seconds


def believed_step_seconds(latent_shape: Sequence[int], degrees: Iterable[int]) -> dict[int, float]:
    """Return the modelled step seconds of an image by degree, for use before any measurement.

    The model is Qwen-Image, with as many tokens as the image.

    latent_shape  [S, C] packed, [C, H, W] or [C, F, H, W] in patches of 2 x 2; without the batch

    Another network takes another time. The plan depends on the ratio between degrees, and the ratio depends mostly on
    the tokens. The first measured step sets the scale (`with_measured`).
    """
    tokens = latent_shape[0] if len(latent_shape) == 2 else math.prod(latent_shape[1:]) // 4
    return modelled_step_seconds(QWEN_IMAGE, max(1, tokens), degrees)


def with_measured(modelled: Mapping[int, float], seen: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the step table of a request class after measurements.

    modelled  seconds of a step by degree: the estimate
    seen      measured seconds of steps by degree, newest last; degrees outside `modelled` are ignored
    returns   by degree of `modelled`: the median of the `LAST` newest steps; for an unmeasured degree, the model times
              the ratio of measurement to model at the nearest measured degree (in powers of two; on a tie the smaller)
    raises    ValueError: a step time that is zero, negative or not finite

    Use the median, not the mean: a first step compiles, and a commit or a neighbour slows an occasional step. Such
    steps do not predict the next step. A moving average would carry a slow step along for a dozen more.
    """
    measured = {}
    for degree, steps in seen.items():
        if degree in modelled and steps:
            measured[degree] = statistics.median(steps[-LAST:])
            if not 0 < measured[degree] < math.inf:
                raise ValueError(f"steps at degree {degree} took {measured[degree]} s; record finite times above 0")
    if not measured:
        return dict(modelled)
    table = {}
    for degree, seconds in modelled.items():
        near = min(sorted(measured), key=lambda other: abs(math.log2(other / degree)))
        table[degree] = seconds * measured[near] / modelled[near]
    return table
