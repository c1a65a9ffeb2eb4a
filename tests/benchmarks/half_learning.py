"""half_learning: does a run with low-rank adapters learn in bf16 as it does in fp32?

    python -m tests.benchmarks.half_learning --run ARM --seed N    one run; its raw file is kept and never made twice
    python -m tests.benchmarks.half_learning --json                the page, from the raw files

In bf16 the engine takes the layers of `engine/models/half_layers.py`. Shipped models are fp32, so this benchmark rounds
the weights of digits-ocr to bf16. A run is one process on one thread (`algorithm_runs.py`). In bf16 the worker merges
the adapters into its weights and the trainer has them beside the weights, as for a large model.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.clock import ScaledClock
from engine.config import ModelConfig
from engine.entrypoints.inproc import build_inproc
from engine.models.adapter import Conditioning
from engine.models.digits import DigitsAdapter, load_digits
from engine.models.half_adapters import HalfAdaptedLinear
from engine.models.load import freeze_but_trained
from engine.rewards.load import load_reward
from tests.benchmarks.algorithm_runs import TARGET, Arm, commit_now, config_of, crossing, this_computer
from tests.benchmarks.algorithms import SETTINGS
from tests.benchmarks.page import RESULTS, load_now, publish
from tests.benchmarks.staleness import loss

RAW = RESULTS / "half_learning"
ARMS = ("fp32", "bf16")
SEEDS = tuple(range(301, 306))
"""Seeds, fixed before the first run."""
EVERY, HELD_OUT = 3, 256
BUDGET, CAP = 9, 18
"""Iterations after which exact match is compared, and at which a run without the target ends."""
LORA = ModelConfig(weights="lora", lora_rank=16, lora_alpha=32)
ALGORITHM = {**SETTINGS["diffusion-nft"], "learning_rate": 3e-3}
"""The learning rate is the better of 1e-3 and 3e-3 in fp32 on seed 901, after three iterations."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run did. `curve`: exact match on HELD_OUT strings by iteration."""

    arm: str
    seed: int
    commit: str
    curve: Mapping[int, float]
    seconds: float
    where: Mapping[str, str]


class HalfDigits(DigitsAdapter):
    """digits-ocr with weights in bf16."""

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        return super().velocity(x.bfloat16(), sigma, {"text": conditioning["text"].bfloat16()}, guidance)


def adapter_of(arm: str) -> DigitsAdapter:
    """Return the model of an arm with adapters. In bf16 they have the engine's layers, in fp32 those of peft."""
    adapter = load_digits()
    if arm == "bf16":
        adapter = HalfDigits(adapter.transformer.bfloat16(), adapter.text)
    freeze_but_trained(adapter, LORA)
    assert any(isinstance(layer, HalfAdaptedLinear) for layer in adapter.transformer.modules()) == (arm == "bf16")
    return adapter


def run_arm(arm: str, seed: int) -> Run:
    torch.set_num_threads(1)
    begun = time.perf_counter()
    config = config_of(Arm(algorithm=ALGORITHM), seed, CAP, every=EVERY, prompts=HELD_OUT)
    config = config.model_copy(update={"model": LORA})
    with tempfile.TemporaryDirectory() as folder:
        clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
        reward = load_reward(config.reward, None)
        loop = build_inproc(
            config,
            Path(folder),
            run="half-learning",
            clock=clock,
            reward=reward,
            workers=1,
            make_adapter=lambda: adapter_of(arm),
        ).loop
        loop.begin()
        while True:
            loop.evaluator.evaluate_if_due()
            curve = {iteration: metrics["exact_match"] for iteration, metrics in loop.state.evaluations}
            if loop.state.iteration >= (BUDGET if max(curve.values()) >= TARGET else CAP):
                break
            loop.run_iteration()
        loop.reporter.close()
    return Run(
        arm=arm,
        seed=seed,
        commit=commit_now(),
        curve=curve,
        seconds=time.perf_counter() - begun,
        where=this_computer(),
    )


def raw_file(arm: str, seed: int) -> Path:
    return RAW / f"{arm}-{seed}.json"


def stored(arm: str) -> list[Run]:
    """Return the runs of an arm by seed. Exits with the names of those that are missing."""
    if missing := [raw_file(arm, seed).name for seed in SEEDS if not raw_file(arm, seed).exists()]:
        sys.exit(f"runs are missing: {', '.join(missing)}; make them with --run ARM --seed N")
    raw = [json.loads(raw_file(arm, seed).read_text("utf-8")) for seed in SEEDS]
    return [Run(**(run | {"curve": {int(at): exact for at, exact in run["curve"].items()}})) for run in raw]


def report() -> None:
    load1 = load_now()
    fp32, bf16 = stored("fp32"), stored("bf16")
    exact = loss(*({run.seed: run.curve[BUDGET] for run in runs} for runs in (fp32, bf16)))
    reached = [{run.seed: crossing(run.curve) or CAP for run in runs} for runs in (fp32, bf16)]
    later = loss(reached[1], reached[0])
    rows = [
        {
            "seed": one.seed,
            "iterations to the target, fp32": f"{reached[0][one.seed]:.1f}",
            "bf16": f"{reached[1][one.seed]:.1f}",
            f"exact match after {BUDGET}, fp32": f"{one.curve[BUDGET]:.3f}",
            "bf16 ": f"{other.curve[BUDGET]:.3f}",
        }
        for one, other in zip(fp32, bf16, strict=True)
    ]
    publish(
        "half_learning",
        question="does a run with low-rank adapters learn in bf16 as it does in fp32?",
        command="python -m tests.benchmarks.half_learning --json",
        result={"loss_of_exact_match": exact, "more_iterations_to_the_target": later},
        runs=len(fp32) + len(bf16),
        seeds=SEEDS,
        load1=load1,
        rows=rows,
        text=f"""
Measured on digits-ocr: DiffusionNFT, LoRA of rank {LORA.lora_rank}, learning rate {ALGORITHM["learning_rate"]:g}, exact
match on {HELD_OUT} held-out strings every {EVERY} iterations. The target is {TARGET}; the iteration that reaches it is
read from a straight line between two evaluations. In fp32 the adapters have peft's layers. In bf16 the frozen weights
are rounded, the adapters have the engine's layers (`engine/models/half_layers.py`), and the worker merges them.

| bf16 against fp32, paired by seed | mean | 95 % interval, bootstrap over the seeds |
| --- | --- | --- |
| exact match lost after {BUDGET} iterations | {exact["mean"]:+.3f} | {exact["low"]:+.3f} to {exact["high"]:+.3f} |
| more iterations to the target | {later["mean"]:+.1f} | {later["low"]:+.1f} to {later["high"]:+.1f} |

An interval without 0 is a difference. The bf16 arm also rounds the frozen weights, which were trained in fp32; a large
model is stored in bf16. How near the gradients are to those of fp32:
[training_row](training_row.md).
""",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Make one run, or write the page from all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=ARMS, help="the arm of a run to make")
    parser.add_argument("--seed", type=int, choices=SEEDS, help="the seed of the run to make")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args(argv)
    if not options.run:
        report()
        return
    if options.seed is None:
        parser.error("--run needs --seed")
    file = raw_file(options.run, options.seed)
    if file.exists():
        sys.exit(f"{file.name} exists already")
    made = run_arm(options.run, options.seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(made), indent=1) + "\n")
    print(f"{file.name}: {made.curve}, {made.seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
