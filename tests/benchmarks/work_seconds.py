"""work_seconds: how many CPU seconds does the engine's work take, by which the clock of a local run advances?

    python -m tests.benchmarks.work_seconds --json

One thread of one process: denoising steps at two shapes, scores, and training rows of the quickstart's job. The figures
of engine/timing/work.py are rounded from a run of this. They need no update for another machine: the clock of a run is
to be the same everywhere.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.algorithm.objective import FinishedGroup
from engine.algorithm.transaction import Trainer
from engine.algorithm_config import AlgorithmConfig
from engine.config import EngineConfig, ModelConfig, RewardConfig, SamplerConfig
from engine.diffusion.sampler import advance, initial, rollout_plan
from engine.diffusion.trajectory import Trajectory
from engine.models.adapter import DiTAdapter
from engine.models.load import load_adapter, trainable
from engine.prompts import prompt_source
from engine.protocol.request import Group, Manifest
from engine.rewards.load import load_reward_of_job
from engine.timing.work import SHIPPED
from tests.benchmarks.page import load_now, publish

MODELS = {"digits-ocr": "ocr", "shapes": "shapes"}
"""Reward of each shipped model."""

PROMPTS = {"digits-ocr": "digits", "shapes": "shapes"}

IMAGES, SHAPES, TIMES = 4, (4, 32), 15


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, as always")
    parser.parse_args()
    load1 = load_now()
    torch.set_num_threads(1)
    figures = {model: measured(model, reward) for model, reward in MODELS.items()}
    rows = [
        {"model": model, "of": name, "ms measured": f"{1000 * found:.2f}", "ms used": f"{1000 * used[name]:.2f}"}
        for model, of_model in figures.items()
        for used in [vars_of(model)]
        for name, found in of_model.items()
    ]
    publish(
        "work_seconds",
        question="how many CPU seconds does the engine's work take, by which the clock of a local run advances?",
        command="python -m tests.benchmarks.work_seconds --json",
        result={"seconds": figures},
        runs=TIMES,
        seeds=[0],
        load1=load1,
        rows=rows,
        text="""
Measured: CPU seconds of one thread, medians. An image in a forward pass, a forward pass beside its images, a training
row of diffusion-nft with its share of the optimiser's step, the score of an image. The clock of a run on the local
infra advances by the used figures, on every machine (engine/work_clock.py), so they need no update. They were read off
a machine whose two cores were shared by more processes, as in a run, and are about 1.6 times those of an idle core.
""",
    )


def vars_of(model: str) -> dict[str, float]:
    used = SHIPPED[model]
    return {"image": used.image, "launch": used.launch, "row": used.row, "score": used.score}


def measured(model: str, reward: str) -> dict[str, float]:
    """Return the median CPU seconds of each kind of work."""
    config = EngineConfig(
        model=ModelConfig(name=model),
        reward=RewardConfig(name=reward),
        prompts=PROMPTS[model],
        sampler=SamplerConfig(steps=8),
        algorithm=AlgorithmConfig(name="diffusion-nft", prompts_per_batch=12, images_per_prompt=IMAGES),
    )
    adapter = load_adapter(config.model)
    prompts = prompt_source(config, None).batch(0)
    plan = rollout_plan(config.sampler, 0, 0)
    few, many = (
        cpu_seconds(lambda shape=shape: denoised(adapter, plan, prompts[0], shape)) / plan.steps for shape in SHAPES
    )
    image = (many - few) / (SHAPES[1] - SHAPES[0])
    latents = torch.stack([trajectory.x for trajectory in denoised(adapter, plan, prompts[0], IMAGES)])
    score = load_reward_of_job(config, None)
    images = adapter.decode(latents)
    scored = cpu_seconds(lambda: list(score(images, [prompts[0]] * IMAGES))) / IMAGES
    return {
        "image": image,
        "launch": few - SHAPES[0] * image,
        "row": row_seconds(config, adapter, plan, prompts),
        "score": scored,
    }


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the median CPU seconds of a call, after two calls to warm up."""
    seconds = []
    for _ in range(TIMES + 2):
        begun = time.process_time()
        work()
        seconds.append(time.process_time() - begun)
    return statistics.median(seconds[2:])


def denoised(adapter: DiTAdapter, plan: Any, prompt: str, images: int) -> list[Trajectory]:
    """Sample images of a prompt."""
    seeds = list(range(images))
    trajectories = [Trajectory.begin(x) for x in initial(seeds, adapter.latent_shape())]
    conditioning = adapter.encode([prompt] * images)
    x = torch.stack([trajectory.x for trajectory in trajectories])
    for step in range(plan.steps):
        x, log_probs = advance(adapter, plan, conditioning, seeds, x, step)
        trajectories = [t.then(plan, row, p) for t, row, p in zip(trajectories, x, log_probs, strict=True)]
    return trajectories


def row_seconds(config: EngineConfig, adapter: DiTAdapter, plan: Any, prompts: list[str]) -> float:
    """Return the CPU seconds of a training row, the optimiser's step included."""
    groups = tuple(Group(prompt=prompt, seeds=tuple(range(IMAGES))) for prompt in prompts)
    manifest = Manifest(
        run="run",
        lineage=1,
        batch=0,
        version=0,
        sampler=plan.signature,
        groups=groups,
        minibatches=(tuple(range(len(groups))),),
    )
    finished = [
        FinishedGroup(
            prompt=group.prompt,
            seeds=group.seeds,
            trajectories=tuple(denoised(adapter, plan, group.prompt, IMAGES)),
            rewards=(0.0, 1.0, 0.5, 0.25),
        )
        for group in groups
    ]
    trainer = Trainer(adapter, trainable(adapter), config.algorithm)

    def trained() -> None:
        step = trainer.begin(manifest, 0, plan, std=None)
        for number, group in enumerate(finished):
            step.add(number, group)
        step.commit()

    return cpu_seconds(trained) / (len(groups) * IMAGES * plan.steps)


if __name__ == "__main__":
    main()
