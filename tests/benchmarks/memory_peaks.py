"""Compare the memory forecast with the peaks that `tests/gpu` measured on an H100 (results/gpu.json).

The measured engine had adapters in fp32 and recomputed every block. Its steps differ from a trainer's: no VAE, no
average and no old policy; gradients exist only after the backward pass, when the activations are gone; and their AdamW
is not fused, so its step needs one set of numbers more.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.memory.activations import activations, parameters_of
from engine.memory.budget import GIB, MOMENTS, Setting, denoising_bytes
from engine.memory.published import FLUX_1_DEV, QWEN_IMAGE, SD3_5_MEDIUM, WAN_1_3B, WAN_14B, PublishedModel
from engine.model_folder import ImageSize
from engine.tally import FP32, Training
from tests.benchmarks.page import RESULTS

RANK = 64
LORA = Training(rank=RANK, adapter_bytes=FP32)
FULL = Training(rank=None, compute_bytes=FP32)

SIZES = {
    "512 px": ImageSize(512, 512),
    "1024 px": ImageSize(1024, 1024),
    "1280 px": ImageSize(1280, 1280),
    "33 frames of 240 x 416": ImageSize(240, 416, 33),
}
TEXT_TOKENS = {"Qwen-Image": 256, "SD3.5-medium": 256}
"""Text tokens of the measured passes. 512 with the other models."""

FAMILIES = {"FLUX.1": FLUX_1_DEV, "SD3.5-medium": SD3_5_MEDIUM, "Wan 1.3 B": WAN_1_3B, "Wan 14 B": WAN_14B}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A measured peak of GPU memory beside its forecast. GiB."""

    what: str
    forecast: float
    measured: float

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1


def peaks() -> list[Peak]:
    """Return every peak of gpu.json that the forecast covers."""
    raw = json.loads((RESULTS / "gpu.json").read_text("utf-8"))
    return [*_qwen_steps(raw), *_qwen_passes(raw), *_families(raw), *_full_steps(raw)]


def _qwen_steps(raw: dict[str, Any]) -> Iterator[Peak]:
    found = raw["20 B LoRA step, rank 64, guidance 4, checkpointing"]
    for pixels in ("512 px", "1280 px"):
        for rows, figures in found[pixels].items():
            forecast = step_gib(QWEN_IMAGE, pixels, LORA, int(rows), is_guided=True)
            what = f"20 B LoRA step, guidance, {pixels}, rows {rows}"
            yield Peak(what=what, forecast=forecast, measured=figures["peak_gib"])


def _qwen_passes(raw: dict[str, Any]) -> Iterator[Peak]:
    found = raw["20 B rollout passes"]
    for pixels in ("512 px", "1280 px"):
        for images, figures in found[pixels]["adapters apart"].items():
            count, guidance = images.split(", ")
            if guidance == "guidance 4":
                what = f"20 B pass, adapters apart, {pixels}, images {count}"
                forecast = pass_gib(QWEN_IMAGE, pixels, LORA, int(count), adapters=True)
                yield Peak(what=what, forecast=forecast, measured=figures["peak_gib"])


def _families(raw: dict[str, Any]) -> Iterator[Peak]:
    for name, model in FAMILIES.items():
        found = raw[f"{name} forward and LoRA step, rank 64, bf16"]
        for size in [size for size in SIZES if size in found]:
            for case, figures in found[size].items():
                if not isinstance(figures, dict) or "peak_gib" not in figures:
                    continue
                count = int(case.rpartition(" ")[2])
                forecast = (
                    step_gib(model, size, LORA, count, is_guided=False)
                    if "step" in case
                    else pass_gib(model, size, LORA, count, adapters=False)
                )
                yield Peak(what=f"{name} {case}, {size}", forecast=forecast, measured=figures["peak_gib"])


def _full_steps(raw: dict[str, Any]) -> Iterator[Peak]:
    found = raw["SD3.5-medium, all weights trained"]
    for size in ("512 px", "1024 px"):
        measured = found[size]["fp32"]["step"]["peak_gib"]
        forecast = step_gib(SD3_5_MEDIUM, size, FULL, 1, is_guided=False)
        yield Peak(what=f"SD3.5-medium, all weights in fp32, {size}, rows 1", forecast=forecast, measured=measured)


def step_gib(model: PublishedModel, size: str, training: Training, rows: int, *, is_guided: bool) -> float:
    """Return the forecast of a measured training step with checkpointing."""
    counts = parameters_of(model.architecture, training)
    trained = FP32 * (counts.transformer if training.is_full else counts.adapters)
    row = activations(
        model.architecture, _sized(model, size), training, is_checkpointed=True, is_guided=is_guided, kept_blocks=0
    ).total
    fixed = _weights(model, training) + (0 if training.is_full else trained) + MOMENTS * trained
    return (fixed + max(rows * row, 2 * trained)) / GIB


def pass_gib(model: PublishedModel, size: str, training: Training, images: int, *, adapters: bool) -> float:
    """Return the forecast of a measured pass without gradients. `adapters`: the model has adapters."""
    counts = parameters_of(model.architecture, training)
    setting = Setting(
        training=training if adapters else Training(rank=None), is_checkpointed=True, is_guided=True, rows=1,
        images=images,
    )  # fmt: skip
    fixed = _weights(model, training) + (FP32 * counts.adapters if adapters else 0)
    return (fixed + images * denoising_bytes(model.at(_sized(model, size)), setting)) / GIB


def _weights(model: PublishedModel, training: Training) -> int:
    """Return the bytes of the transformer. Its table of positions was fp32 in these checks."""
    counts = parameters_of(model.architecture, training)
    return counts.transformer * training.compute_bytes + counts.buffers * FP32


def _sized(model: PublishedModel, size: str) -> ImageSize:
    pixels = SIZES[size]
    return ImageSize(pixels.height, pixels.width, pixels.frames, TEXT_TOKENS.get(model.name, 512))
