"""Timings of published models, measured on GPUs or published: small tables with the source of every figure.

Figures, no decisions; `seconds.py` computes with them. Measured ones are in tests/benchmarks/results/gpu.md. A figure
of another GPU of the same speed (H800, H200) counts as one of an H100: their arithmetic is equal.

`eager`: diffusers and torch as spotrl runs them. `tuned`: compiled networks, fused kernels and FlashAttention 3, as
serving frameworks run them. spotrl runs no tuned network; those figures are here for comparison with publications.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.families import FAMILIES
from engine.model_folder import ImageSize

Software = Literal["eager", "tuned"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The origin of a figure."""

    basis: Literal["measured", "published", "assumed"]
    """`measured`: by a check of this repository (tests/gpu/), with random weights."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    """Seconds of one forward pass for each of its images on an H100, without guidance."""

    model: str
    size: ImageSize
    seconds: float
    source: Source
    software: Software = "eager"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A number with its source."""

    value: float
    source: Source


def _measured(day: int, subject: str) -> Source:
    return Source(basis="measured", text=f"spotrl on one H100, 2026-11-{day}: {subject}")


def _published(text: str) -> Source:
    return Source(basis="published", text=text)


def _assumed(text: str) -> Source:
    return Source(basis="assumed", text=text)


XDIT_FLUX = "xDiT, docs/performance/flux.md"
XDIT_VIDEO = "xDiT, docs/performance/hunyuanvideo.md"
OMNI_WAN = "vLLM-Omni, tests/dfx/perf/tests/test_wan22_i2v_vllm_omni.json (commit 1f76b51)"
OMNI_QWEN = "vLLM-Omni, tests/dfx/perf/tests/test_qwen_image_vllm_omni.json (commit 380d679)"
OMNI_3266 = "vLLM-Omni, issue 3266"
ELASTIC_FLUX = "TheStageAI/Elastic-FLUX.1-dev, README on the Hugging Face hub, table of latencies"
LIGHTX2V = "LightX2V, benchmark page: Wan2.1 Official on one H200"
UNIANIMATE = "UniAnimate-DiT, issue 33"

WAN_FEW = ImageSize(240, 416, 33)

PASSES = (
    PassTime(
        model="Qwen-Image",
        size=ImageSize(512, 512, text_tokens=256),
        seconds=0.0481,
        source=_measured(22, "a pass of 16 images"),
    ),
    PassTime(
        model="Qwen-Image",
        size=ImageSize(1280, 1280, text_tokens=256),
        seconds=0.3072,
        source=_measured(22, "a pass of 4 images"),
    ),
    PassTime(
        model="FLUX.1-dev",
        size=ImageSize(512, 512),
        seconds=0.0566,
        source=_measured(26, "a pass of 4 images"),
    ),
    PassTime(
        model="FLUX.1-dev",
        size=ImageSize(1024, 1024),
        seconds=0.1832,
        source=_measured(26, "a pass of 4 images"),
    ),
    PassTime(
        model="SD3.5-medium",
        size=ImageSize(512, 512, text_tokens=256),
        seconds=0.0127,
        source=_measured(26, "a pass of 4 images"),
    ),
    PassTime(
        model="SD3.5-medium",
        size=ImageSize(1024, 1024, text_tokens=256),
        seconds=0.0454,
        source=_measured(26, "a pass of 4 images"),
    ),
    PassTime(model="Wan2.1-1.3B", size=WAN_FEW, seconds=0.0443, source=_measured(26, "a pass of 4 videos")),
    PassTime(model="Wan2.1-14B", size=WAN_FEW, seconds=0.2538, source=_measured(26, "a pass of 4 videos")),
    PassTime(
        model="Wan2.1-14B",
        size=ImageSize(480, 832, 81),
        seconds=4.53,
        source=_published(f"{LIGHTX2V}: 366 s, 40 steps with guidance, of which 4 s are counted for the VAE"),
    ),
    PassTime(
        model="HunyuanVideo",
        size=ImageSize(720, 1280, 129, 256),
        seconds=38.1,
        source=_published(f"{XDIT_VIDEO}: 1904 s on one H100, 50 steps"),
    ),
    PassTime(
        model="Qwen-Image",
        size=ImageSize(512, 512, text_tokens=128),
        seconds=0.0543,
        software="tuned",
        source=_published(f"{OMNI_3266}: diffusion stage on one H200, 2.17 s for 20 steps with guidance"),
    ),
    PassTime(
        model="Qwen-Image",
        size=ImageSize(1536, 1536, text_tokens=128),
        seconds=0.367,
        software="tuned",
        source=_published(f"{OMNI_QWEN}: 27.0 s for 35 steps with guidance, less 1.3 s beside the diffusion stage"),
    ),
    PassTime(
        model="FLUX.1-dev",
        size=ImageSize(1024, 1024),
        seconds=0.1536,
        software="tuned",
        source=_published(f"{XDIT_FLUX}: 4.30 s compiled on one H100, 28 steps"),
    ),
    PassTime(
        model="Wan2.1-14B",
        size=ImageSize(480, 832, 81),
        seconds=2.95,
        software="tuned",
        source=_published(f"{OMNI_WAN}: Wan2.2-I2V-A14B, 27.6 s for 4 steps with guidance, 4 s of it for the VAE"),
    ),
)
"""Wan2.2-A14B has two networks of the size of Wan2.1-14B, of which a step runs one."""

TUNED = Figure(
    value=1.25,
    source=_published(f"{XDIT_FLUX} against our own eager pass of FLUX.1-dev at 1024 px: 1.19; of Qwen-Image: 1.24"),
)
"""How many times faster a tuned network is, for a model without a figure of its own."""

LIKE: Mapping[str, str] = {"SD3.5-large": "FLUX.1-dev", "Wan2.2-TI2V-5B": "Wan2.1-14B"} | {
    sizes.name: sizes.timed_like
    for family in FAMILIES.values()
    for sizes in family.published
    if sizes.timed_like is not None
}
"""Models without a timing, and the model of similar width that stands for them. Assumed."""

LAUNCH_SECONDS: Mapping[str, Figure] = {
    "Qwen-Image": Figure(value=0.154, source=_measured(22, "a pass of one image of 512 px")),
    "FLUX.1-dev": Figure(value=0.060, source=_measured(26, "a pass of one image of 512 px, .068 s at most")),
    "SD3.5-medium": Figure(value=0.0446, source=_measured(26, "a pass of one image of 512 px")),
    "Wan2.1-1.3B": Figure(value=0.0482, source=_measured(26, "a pass of one video, .048 s at most")),
}
"""Seconds that the CPU needs to launch the kernels of an eager pass, however few its images are, by model."""

LAUNCH_SECONDS_PER_BLOCK = Figure(value=0.002, source=_assumed("between 1.6 and 2.6 ms of the measured models"))

STEP_LAUNCH_SECONDS: Mapping[str, Figure] = {
    "Qwen-Image": Figure(value=1.45, source=_measured(26, "steps of 1, 2 and 4 rows with guidance: 2.7 to 3.2 s")),
    "FLUX.1-dev": Figure(value=0.557, source=_measured(26, "a step of one row of 512 px")),
    "SD3.5-medium": Figure(value=0.42, source=_measured(26, "steps of one row of 512 and 1024 px: .42 and .43 s")),
    "Wan2.1-1.3B": Figure(value=0.578, source=_measured(26, "a step of one row")),
}
"""Seconds of a training pass that waits for the CPU, for each branch of guidance, by model. LoRA, checkpointing."""

STEP_LAUNCH_SECONDS_PER_BLOCK = Figure(value=0.02, source=_assumed("between 10 and 25 ms of the measured models"))

STEP_PASSES: Mapping[str, Figure] = {
    "Qwen-Image": Figure(value=6.07, source=_measured(26, "16 rows of 512 px .586 s each, 4 of 1280 px 3.72 s each")),
    "Wan2.1-14B": Figure(value=5.13, source=_measured(26, "a step of one row, 1.30 s")),
}
"""Seconds of a LoRA training row in forward passes of an image: forward, recomputed, backward, and adapters in fp32."""

STEP_PASSES_OTHERWISE = Figure(value=5.6, source=_assumed("the middle of Qwen-Image and Wan2.1-14B"))

STEP_PASSES_FULL = Figure(value=4.0, source=_assumed("forward, recomputed, and a backward pass of twice a forward"))
"""The same if every weight is trained."""

UNMERGED = Figure(value=1.75, source=_measured(22, "1.8 times at 512 px, 1.7 at 1280 px"))
"""Seconds of a pass with adapters beside the weights, in passes without adapters."""

VAE_SECONDS_PER_MEGAPIXEL: Mapping[str, Figure] = {
    "image": Figure(value=0.02, source=_assumed("a decoder of 5 TFLOP a megapixel at a quarter of an H100's peak")),
    "video": Figure(value=0.125, source=_assumed("4 s for 81 frames of 480 x 832 px, of 27.6 s that vLLM-Omni takes")),
}
"""Seconds of decoding on an H100, for a million pixels of an image, or of all frames of a video."""

_SAME = _assumed("the arithmetic of an H100")

SPEED: Mapping[str, Figure] = {
    "H100": Figure(value=1.0, source=_measured(26, "the GPU of the measurements")),
    "H200": Figure(value=1.0, source=_SAME),
    "H800": Figure(value=1.0, source=_SAME),
    "A100": Figure(
        value=0.42, source=_published(f"{UNIANIMATE}: 18 min for a video of 480p that takes an H100 7.6 min")
    ),
    "A100-80GB": Figure(value=0.42, source=_published(f"{UNIANIMATE}, as A100")),
    "L40S": Figure(value=0.40, source=_published(f"{ELASTIC_FLUX}: 16 s where an H100 takes 6.46 s")),
    "B200": Figure(value=1.47, source=_published(f"{ELASTIC_FLUX}: 4.4 s where an H100 takes 6.46 s")),
    "H20": Figure(value=0.287, source=_published(f"{XDIT_VIDEO}: 6639 s where an H100 takes 1904 s")),
    "RTXPRO6000": Figure(
        value=0.5,
        source=_assumed(
            "peak of 500 TFLOP/s over the 989 of an H100, and 1.6 TB/s of its memory over 3.35; by the peak an A100 "
            "would be .32, an L40S .37 and a B200 2.3, where .42, .40 and 1.47 are published"
        ),
    ),
    "L4": Figure(value=0.12, source=_assumed("peak of 121 TFLOP/s over the 989 of an H100")),
    "A10": Figure(value=0.13, source=_assumed("peak of 125 TFLOP/s over the 989 of an H100")),
    "A10G": Figure(value=0.07, source=_assumed("peak of 70 TFLOP/s over the 989 of an H100")),
}
"""Speed of a GPU relative to an H100. GPUs that are not here have no timings."""

ALL_TO_ALL_SECONDS = Figure(
    value=83e-6, source=_published(f"{XDIT_FLUX}: 18.9 and 19.8 ms a step more on 2 and 4 GPUs, 228 all-to-alls")
)
"""Launch, layout copies and synchronisation of an all-to-all of sequence parallelism."""

SHARED_EFFICIENCY: Mapping[int, Figure] = {
    2: Figure(value=1.0, source=_published(f"{XDIT_VIDEO}: 1904 and 925 s on H100, 6639 and 3401 s on H20")),
    4: Figure(value=0.935, source=_published(f"{XDIT_VIDEO}: 514 s on H100, 1763 s on H20")),
    8: Figure(value=0.71, source=_published(f"{XDIT_VIDEO}: 338 s on H100")),
}
"""Efficiency of 2, 4 and 8 GPUs that share a sequence of `LONG_TOKENS`, beside the time of the all-to-alls. NCCL over
NVLink. spotrl's groups use NCCL if each worker has a GPU of its own, which nobody has timed."""

SHORT_TOKENS, LONG_TOKENS = 4_600, 119_000
"""Tokens of FLUX.1-dev at 1024 px, where the all-to-alls explain all of the loss, and of HunyuanVideo at 720p. Between
them, the loss is taken to grow with the logarithm of the tokens."""

_NVLINK_4, _NVLINK_3 = (
    _published(f"NVIDIA's data sheet of the {gpu}: NVLink {rate} GB/s, half of it in each direction")
    for gpu, rate in (("H100 SXM", 900), ("A100 SXM", 600))
)

_PCIE_5 = _published("NVIDIA's data sheet: PCIe Gen5 x16, 128 GB/s, half of it in each direction; no NVLink")

_PCIE = _published("NVIDIA's data sheet: PCIe Gen4 x16, 64 GB/s, half of it in each direction; no NVLink")

LINK_BYTES_PER_SECOND: Mapping[str, Figure] = {
    "H100": Figure(value=450e9, source=_NVLINK_4),
    "H200": Figure(value=450e9, source=_NVLINK_4),
    "H800": Figure(value=200e9, source=_published("the H100 of export rules: NVLink 400 GB/s")),
    "H20": Figure(value=450e9, source=_NVLINK_4),
    "A100": Figure(value=300e9, source=_NVLINK_3),
    "A100-80GB": Figure(value=300e9, source=_NVLINK_3),
    "B200": Figure(value=900e9, source=_published("NVIDIA's data sheet of the B200: NVLink 1.8 TB/s")),
    "L40S": Figure(value=32e9, source=_PCIE),
    "RTXPRO6000": Figure(value=64e9, source=_PCIE_5),
    "L4": Figure(value=32e9, source=_PCIE),
    "A10": Figure(value=32e9, source=_PCIE),
    "A10G": Figure(value=32e9, source=_PCIE),
}
"""Peak bytes per second that a GPU receives from the other GPUs of its node."""

LINK_OTHERWISE = Figure(value=16e9, source=_assumed("PCIe Gen3 x16, for a GPU whose link is not in the table"))

LINK_SHARE = Figure(value=0.5, source=_assumed("collectives reach half of a link's peak; nobody timed spotrl's"))
