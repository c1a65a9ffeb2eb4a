"""One run of the algorithms benchmark: an arm and a seed, in one process on one thread, repeatable bit for bit.

Trainer and spot worker take turns (engine/entrypoints/inproc.py), so a result depends on the seed alone and not on the
speed or load of the machine. Stale candidates are tried with the weights of one batch before, as on real nodes.
"""

import itertools
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from engine.clock import ScaledClock
from engine.config import EngineConfig
from engine.diffusion.sampler import batch_plan, denoise, evaluation_plan
from engine.entrypoints.inproc import build_inproc
from engine.events import IterationDone, Progress
from engine.models.load import load_adapter, trainable
from engine.prompts import PromptSource, held_out_digits, prompt_source
from engine.protocol.request import Stream, seed_of
from engine.rewards.load import load_reward
from engine.rewards.ocr import OcrReward
from engine.timing.job import rows_of_an_image
from engine.trainer.state import config_digest
from tests.benchmarks.page import ROOT, processor
from tests.benchmarks.readers import drawn, exact_or_none

TARGET = 0.75
"""Exact match to reach."""
EVERY = 3
"""Iterations between two evaluations of 512 strings. The target's iteration is interpolated on a straight line."""
BUDGET = 12
"""Iterations after which quality is compared."""
CAP = 40
"""Iterations after which a run ends without the target, and counts as the cap."""
SEEDS = tuple(range(101, 111))
"""Reported seeds. No setting was chosen on them."""
TUNING_SEEDS = (901, 902)
"""Seeds for choosing settings."""

CANDIDATES = 144
PROMPTS, IMAGES = 12, 4
DIVERSITY_PROMPTS, DIVERSITY_SEEDS = 32, 8


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An algorithm with its settings, how seeds are chosen, and the task."""

    algorithm: Mapping[str, Any]
    mode: str = "none"
    keep: str = "variance"
    task: Literal["digits-ocr", "shapes"] = "digits-ocr"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run did. `curve`: exact match by iteration. `passes`: network passes by iteration, from the first one.

    A pass is the forward pass of one image at one step. The gradient of a training row counts as three, as usual.
    `where`: processor and torch. Two runs with the same values are equal bit for bit. `quality`: of the weights after
    BUDGET iterations. `at_target`: the same of the first evaluated weights that reach the target; None if there are
    none, or if the run was made before this was kept.
    """

    arm: str
    seed: int
    commit: str
    config_digest: str
    config: Mapping[str, Any]
    curve: Mapping[int, float]
    passes: Sequence[int]
    explored: Sequence[int]
    quality: Mapping[str, Any]
    seconds: float
    where: Mapping[str, str]
    at_target: Mapping[str, Any] | None = None


def config_of(arm: Arm, seed: int, cap: int, every: int = EVERY, prompts: int = 512) -> EngineConfig:
    task = {"model": {"name": "shapes"}, "prompts": "shapes", "reward": {"name": "shapes"}, "sampler": {"shift": 3.0}}
    return EngineConfig.model_validate(
        {
            **(task if arm.task == "shapes" else {}),
            "seed": seed,
            "iterations": cap,
            "algorithm": {"prompts_per_batch": PROMPTS, "images_per_prompt": IMAGES, **arm.algorithm},
            "exploration": {
                "mode": arm.mode,
                "keep": arm.keep,
                "wait": "all",
                "budget": {"candidates": CANDIDATES},
                "random_fraction": 1 / 24,
                "profiles": [{"name": "cheap", "dtype": "bfloat16", "scorer": "student"}],
            },
            "evaluation": {"prompts": prompts, "every": every, "wait": True},
            "checkpoint": {"every": cap, "keep": 1},
            "runtime": {"name": "inproc", "lease_seconds": 600.0, "trainer_threads": 1},
        }
    )


def run_arm(
    name: str,
    arm: Arm,
    seed: int,
    *,
    cap: int = CAP,
    budget: int = BUDGET,
    tuning: bool = False,
    until_target: bool = True,
) -> Run:
    """Run an arm. Ends once the budget is used and the target is crossed, or at the cap.

    `tuning`: evaluate on other strings than the reported ones.
    """
    torch.set_num_threads(1)
    begun = time.perf_counter()
    config = config_of(arm, seed, cap)
    prompts: PromptSource = prompt_source(config, None)
    if tuning:
        prompts = Tuning(prompts)
    with tempfile.TemporaryDirectory() as folder:
        clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
        made = build_inproc(
            config,
            Path(folder),
            run="algorithms",
            clock=clock,
            reward=load_reward(config.reward, None),
            workers=1,
            prompts=prompts,
        )
        loop, kept = made.loop, dict[str, bytes]()
        loop.begin()
        while True:
            loop.evaluator.evaluate_if_due()
            curve = {iteration: metrics["exact_match"] for iteration, metrics in loop.state.evaluations}
            crossed = max(curve.values()) >= TARGET
            if loop.state.iteration == budget:
                kept["budget"] = loop.model.average_weights("kept").open().to_bytes()
            if crossed and "target" not in kept:
                kept["target"] = loop.model.average_weights("kept").open().to_bytes()
            if loop.state.iteration >= (budget if crossed and until_target else cap):
                break
            loop.run_iteration()
        drifts = {iteration: metrics["drift"] for iteration, metrics in loop.state.evaluations}
        loop.reporter.close()
        done = [
            event
            for line in (Path(folder) / "progress" / "trainer.jsonl").read_text().splitlines()
            if isinstance(event := Progress.from_json(line).event, IterationDone)
        ]
    reached = min((iteration for iteration, exact in curve.items() if exact >= TARGET), default=None)

    def quality(name: str, iteration: int) -> dict[str, Any]:
        known = {"iteration": iteration, "exact_match": curve[iteration], "drift": drifts[iteration]}
        return known | (quality_of(load(kept[name]), prompts.held_out()) if arm.task == "digits-ocr" else {})

    return Run(
        arm=name,
        seed=seed,
        commit=commit_now(),
        config_digest=config_digest(config),
        config={"algorithm": dict(arm.algorithm), "mode": arm.mode, "keep": arm.keep, "task": arm.task},
        curve=curve,
        passes=[passes_of(config, event.explored) for event in done],
        explored=[event.explored for event in done],
        quality=quality("budget", budget),
        at_target=None if reached is None else quality("target", reached),
        seconds=time.perf_counter() - begun,
        where=this_computer(),
    )


class Tuning:
    """Prompts for choosing settings: evaluates 512 strings that are neither reported nor trained in the run."""

    def __init__(self, inner: PromptSource) -> None:
        self._inner = inner
        used = {*held_out_digits(), *(string for number in range(CAP) for string in inner.batch(number))}
        free = [f"{number:04d}" for number in range(10_000) if f"{number:04d}" not in used]
        self._strings = random.Random(997).sample(free, 512)

    def batch(self, batch: int) -> list[str]:
        return self._inner.batch(batch)

    def held_out(self) -> list[str]:
        return self._strings


def passes_of(config: EngineConfig, explored: int) -> int:
    """Return the network passes of an iteration: rollouts, candidates, control rollouts, training."""
    plan = batch_plan(config, 0)
    images = PROMPTS * IMAGES
    trained = rows_of_an_image(config)
    gradient = 3 if config.algorithm.image_training is None else 4  # the old policy's velocity is a pass more
    controls = round(max(0, explored - images) * config.exploration.random_fraction)
    rolled_out = CANDIDATES if config.exploration.mode == "in-path" else images
    return (rolled_out + explored + controls) * plan.steps + images * trained * gradient


def quality_of(weights: Mapping[str, Tensor] | None, prompts: Sequence[str]) -> dict[str, Any]:
    """Return exact match by three readers, the share of dark border pixels, and the diversity over seeds."""
    images = drawn(weights, prompts)
    own = float(np.mean([score.reward for score in OcrReward("ocr_strict")(images, prompts)]))
    others = {name: exact_or_none(name, images, prompts) for name in ("tesseract", "templates")}
    border = torch.cat([images[..., 0, :], images[..., -1, :]], dim=-1)
    return {
        "readers": {"reward": own, **{name: value for name, value in others.items() if value is not None}},
        "border": float((border < 0.9).float().mean()),
        "diversity": diversity_of(weights, prompts[:DIVERSITY_PROMPTS]),
    }


def diversity_of(weights: Mapping[str, Tensor] | None, prompts: Sequence[str]) -> float:
    """Return the mean standard deviation of a pixel over the images of one prompt with different seeds."""
    config = EngineConfig()
    adapter = load_adapter(config.model)
    if weights is not None:
        with torch.no_grad():
            for name, parameter in trainable(adapter).items():
                parameter.copy_(weights[name])
    plan = evaluation_plan(config.sampler, config.evaluation.steps)
    spreads = []
    for prompt in prompts:
        seeds = [seed_of(1, Stream.EVAL, 0, prompt, index) for index in range(DIVERSITY_SEEDS)]
        images = adapter.decode(denoise(adapter, plan, adapter.encode([prompt] * len(seeds)), seeds))
        spreads.append(float(images.float().std(dim=0).mean()))
    return float(np.mean(spreads))


def this_computer() -> dict[str, str]:
    """Return what decides a run's last bits: the processor and the version of torch."""
    return {"processor": processor(), "torch": torch.__version__}


def commit_now() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def crossing(curve: Mapping[int, float]) -> float | None:
    """Return the iterations to the target, on a straight line between two evaluations. None: never reached."""
    points = sorted(curve.items())
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= TARGET:
            return before + (after - before) * max(0.0, TARGET - low) / (high - low)
    return None


def to_json(run: Run) -> str:
    return json.dumps(asdict(run), indent=1) + "\n"


def from_json(text: str) -> Run:
    raw = json.loads(text)
    return Run(**raw | {"curve": {int(k): v for k, v in raw["curve"].items()}})
