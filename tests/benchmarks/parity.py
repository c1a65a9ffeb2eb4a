"""parity: does a run sample the images that the model's diffusers pipeline samples?

    python -m tests.benchmarks.parity --json

Each family is a tiny pipeline of random weights, made of the real diffusers classes with the scheduler configuration of
the published model. The pipeline and a run sample the same prompts from the same noise, with the published guidance.
The run's side is what a job file gives that names the model and nothing else. All in fp32.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from engine.config import GUIDANCE, VIDEO, EngineConfig, ModelConfig, RewardConfig, SamplerConfig
from engine.diffusion.sampler import denoise, evaluation_plan, initial
from engine.families import FAMILIES as FILES
from engine.model_folder import FAMILIES, ImageSize
from engine.models.adapter import DiTAdapter
from engine.models.load import load_adapter
from tests.benchmarks.page import load_now, publish
from tests.tiny_pipelines import CALL_OPTIONS, PIPELINES, SCHEDULERS, EulerAt, published_levels

STEPS = 10
PROMPTS, SEEDS = ["a cat", "two dogs that play chess"], [1, 2]
BOUND = 1e-4
LOUDER = 2.0
"""Factor on the last layer's weights. A fresh network's velocity has an rms of .6, noise minus an image about 1.2."""
PUBLISHED_FACTOR = 3
"""Halvings of the VAE: the published models' images are 8 times as large as their latents."""


@dataclass(frozen=True)
class Parity:
    """Differences between a run and a pipeline."""

    max_abs: float
    """Largest difference of the finished latents."""
    relative: float
    """Root mean square of the difference, divided by that of the pipeline's latents."""
    max_level: float
    """Largest difference of a noise level."""
    unshifted: float
    """`max_abs` of a run with `sampler.shift: 1`, which was the default before the folder's configuration was read."""


def make_folder(family: str, folder: Path, halvings: int) -> DiffusionPipeline:
    """Save the family's tiny pipeline as a model folder, and return the pipeline. Draws the same weights every time."""
    torch.manual_seed(0)
    pipeline = PIPELINES[family](halvings)
    transformer = pipeline.transformer
    last = transformer.all_final_layer["2-1"].linear if family == "z-image" else transformer.proj_out
    last.weight.data.mul_(LOUDER)
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pipelines_latents(
    family: str, pipeline: DiffusionPipeline, noise: Tensor, size: ImageSize, steps: int
) -> tuple[Tensor, tuple[float, ...]]:
    """Return the latents that the pipeline samples from the noise, and the noise levels."""
    arguments: dict[str, Any] = {"height": size.height, "width": size.width, "latents": noise}
    arguments |= CALL_OPTIONS.get(family, {})
    if family == "qwen-image":
        # The model card's call: a blank as negative prompt.
        arguments |= {"true_cfg_scale": GUIDANCE[family], "negative_prompt": [" "] * len(PROMPTS)}
    else:
        offset = FILES[family].guidance_offset if family in FILES else 0.0
        arguments |= {"guidance_scale": GUIDANCE[family] - offset}
    if family in VIDEO:
        arguments["num_frames"] = size.frames
    if family == "wan":
        # UniPC is a multistep solver, and its steps have no log-probs. The reference is Euler with the same shift.
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=SCHEDULERS["wan"]["flow_shift"])
    elif (levels := published_levels(pipeline, steps)) is not None:
        pipeline.scheduler = EulerAt.of(levels)  # SANA's solver has several steps too; its own levels count
    found = pipeline(prompt=list(PROMPTS), num_inference_steps=steps, output_type="latent", **arguments)[0]
    return found, tuple(pipeline.scheduler.sigmas.tolist())


def runs_latents(adapter: DiTAdapter, sampler: SamplerConfig, steps: int) -> tuple[Tensor, tuple[float, ...]]:
    """Return the latents that an evaluation of a run samples, and the noise levels."""
    plan = evaluation_plan(sampler, steps, adapter.schedule)
    return denoise(adapter, plan, adapter.encode(PROMPTS), SEEDS), plan.sigmas


@torch.no_grad()
def compare(
    family: str,
    folder: Path,
    *,
    halvings: int = PUBLISHED_FACTOR,
    steps: int = STEPS,
    size: Mapping[str, int] | None = None,
) -> Parity:
    """Return the differences between a run and the pipeline of one family. `size`: fields of the job; None: none."""
    pipeline = make_folder(family, folder, halvings)
    model = ModelConfig.model_validate({"name": family, "path": str(folder), **(size or {})})
    adapter = load_adapter(model, dtype=torch.float32)
    # The built-in rewards score images, so a job for videos names a reward of the user's.
    sampler = EngineConfig(model=model, reward=RewardConfig(name="module:function")).sampler
    default = FAMILIES[family].size
    pixels = ImageSize(model.height or default.height, model.width or default.width, model.frames or default.frames)
    noise = initial(SEEDS, adapter.latent_shape())
    theirs, their_levels = pipelines_latents(family, pipeline, noise, pixels, steps)
    ours, levels = runs_latents(adapter, sampler, steps)
    unshifted, _ = runs_latents(adapter, sampler.model_copy(update={"shift": 1.0}), steps)
    if family in FILES and ours.shape != theirs.shape:  # FLUX.2's pipeline returns the input of the decoder
        ours, unshifted = (FILES[family].to_decoder(pipeline.vae, latents) for latents in (ours, unshifted))
    difference = ours - theirs
    return Parity(
        max_abs=float(difference.abs().max()),
        relative=float(difference.norm() / theirs.norm()),
        max_level=max(abs(one - other) for one, other in zip(levels, their_levels, strict=True)),
        unshifted=float((unshifted - theirs).abs().max()),
    )


def measure(report: Callable[[str], None] = print) -> dict[str, Parity]:
    found = {}
    for family in PIPELINES:
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found[family] = compare(family, Path(folder))
        report(f"{family}: {found[family]} in {time.perf_counter() - begun:.0f} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    parser.parse_args()
    load1 = load_now()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    found = measure()
    publish(
        "parity",
        question="does a run sample the images that the model's diffusers pipeline samples?",
        command="python -m tests.benchmarks.parity --json",
        result={
            "families": {
                family: {"guidance": GUIDANCE[family], "size": vars_of(FAMILIES[family].size), **vars_of(one)}
                for family, one in found.items()
            },
            "bound": BOUND,
            "steps": STEPS,
            "seconds": time.perf_counter() - begun,
        },
        runs=1,
        seeds=SEEDS,
        load1=load1,
        rows=[
            {
                "family": family,
                "guidance": GUIDANCE[family],
                "latents: max abs": f"{one.max_abs:.1e}",
                "relative rms": f"{one.relative:.1e}",
                "noise levels: max abs": f"{one.max_level:.1e}",
                "latents with shift 1": f"{one.unshifted:.2f}",
            }
            for family, one in found.items()
        ],
        text=TEXT,
    )


def vars_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


TEXT = f"""
Measured in fp32 on a CPU. Random weights of a few narrow layers: zeros carry over to the published models, sizes of
differences do not. {STEPS} ODE steps of two prompts, from the noise of seeds {SEEDS}, at the size that a job without
size fields gets (512 x 512; Wan 33 frames of 240 x 416, HunyuanVideo of 320 x 512). The VAE has the published factor,
so the number of image tokens is that of the published model, and with it the dynamic shift.

## What is compared

- Ours: a job that names the model only. `load_adapter` of the saved folder, `evaluation_plan` at the job's guidance and
  the folder's noise levels, text at its default length.
- Qwen-Image: `true_cfg_scale` 4 with a blank negative prompt, and the norm of each token's conditional velocity.
- SD3: classifier-free guidance without skip-layer guidance, which the pipeline leaves out by default too.
- FLUX.1-dev and HunyuanVideo: distilled guidance as an input of the network, one forward pass a step.
- Wan: the pipeline with `FlowMatchEulerDiscreteScheduler(shift=3)`. The published scheduler, UniPC, is a multistep
  solver: a step depends on earlier steps, has no Gaussian, and so no log-prob to train.

## Last column

The same run with `sampler.shift: 1`, the default before the folder's scheduler configuration was read.
"""


if __name__ == "__main__":
    main()
