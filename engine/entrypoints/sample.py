"""Sample images from a model: `python -m engine.entrypoints.sample < REQUEST.json`, with a `SampleRequest` as input.

The sampling equals an evaluation's: ODE steps, fp32 latents, the noise of a seed. The images therefore depend only on
the weights, the prompt and the seed. Images are sampled one at a time, so a model that fits into memory elsewhere also
fits here. After each image, stdout gets a line of JSON.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from engine.config import ModelConfig, SamplerConfig
from engine.diffusion.images import as_bytes
from engine.diffusion.sampler import Plan, denoise, evaluation_plan
from engine.models.adapter import DiTAdapter
from engine.models.load import load_adapter, trainable
from engine.models.weights import set_weights
from engine.storage.tensor_files import Stored
from engine.strict import Strict
from engine.trainer.evaluation import to_rgb

FRAME_MS = 1000 / 16
"""Milliseconds per frame: Wan generates 16 frames a second."""


class Wanted(Strict):
    """Order for one image, with the file to write."""

    prompt: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    file: Path


class SampleRequest(Strict):
    model: ModelConfig
    sampler: SamplerConfig
    steps: Annotated[int, Field(ge=1)]
    weights: Path | None
    """Trained weights in the format of checkpoints; None: the base model."""
    images: tuple[Wanted, ...]


def load_trained(model: ModelConfig, weights: Path | None, device: str) -> DiTAdapter:
    """Return the model with these weights. Raises KeyError if the weights belong to another model."""
    adapter = load_adapter(model, device)
    if weights is not None:
        set_weights(trainable(adapter), Stored.of_path(weights))
    return adapter


@torch.no_grad()
def draw(adapter: DiTAdapter, plan: Plan, prompt: str, seed: int) -> Tensor:
    """Return one image in [-1, 1]: [C, H, W], or [C, F, H, W] for video."""
    return adapter.decode(denoise(adapter, plan, adapter.encode([prompt]), [seed]))[0].float().cpu()


def write_image(image: Tensor, file: Path) -> None:
    """Write a PNG, or an animated PNG for a video. `image`: in [-1, 1], [C, H, W] or [C, F, H, W]."""
    data = as_bytes(image)
    frames = [data] if data.dim() == 3 else list(data.unbind(1))
    first, *more = (Image.fromarray(to_rgb(frame.numpy())) for frame in frames)
    animated = {"save_all": True, "append_images": more, "duration": FRAME_MS, "loop": 0} if more else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.part")
    first.save(unfinished, "PNG", **animated)
    unfinished.replace(file)


def sample(request: SampleRequest, device: str) -> Iterator[Wanted]:
    """Write the images one after the other, and yield each written image's order."""
    adapter = load_trained(request.model, request.weights, device)
    plan = evaluation_plan(request.sampler, request.steps, adapter.schedule)
    for image in request.images:
        write_image(draw(adapter, plan, image.prompt, image.seed), image.file)
        yield image


if __name__ == "__main__":
    for done in sample(
        SampleRequest.model_validate_json(sys.stdin.read()), "cuda" if torch.cuda.is_available() else "cpu"
    ):
        print(json.dumps({"file": str(done.file)}), flush=True)
