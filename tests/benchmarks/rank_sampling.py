"""Sampling ranks of `trainer_ranks`: images a second, seconds of an iteration, and what an order waits for.

    python -m tests.benchmarks.rank_sampling      5 minutes, with a page of its own; `trainer_ranks` runs it too

A trainer's node of 1 rank, then of 2 ranks, without a rollout node: real processes of a run. A denoising step lasts
STEP_SECONDS, of which the small model computes a part and sleeps the rest, and a training row ROW_SECONDS. So the
figures say what the ranks' calls, orders and waiting cost, and not how many cores this machine has free.
"""

import json
import math
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.algorithm_config import AlgorithmConfig
from engine.config import (
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ModelConfig,
    RewardConfig,
    RuntimeConfig,
    SamplerConfig,
)
from engine.protocol.request import Kind
from tests.benchmarks.ladder_paced import REWARD
from tests.benchmarks.page import load_now, publish
from tests.engine.nursery import NurseryFleet
from tests.sampling_stops import DELAYS

STEP_SECONDS, ROW_SECONDS = 0.25, 0.02
GROUPS, IMAGES, STEPS = 8, 4, 6
BATCHES, STOPPED_BATCHES = 5, 10
TARGETS = {"sampling_efficiency": 0.9, "iteration_speedup": 1.5, "over a step, ms": 20.0}


def config_of(ranks: int, *, unit: int, updates: int, batches: int) -> EngineConfig:
    """Return a job with one lease a group. `unit`: groups that train together; GROUPS: none before the last rollout."""
    return EngineConfig(
        iterations=1 + batches,
        model=ModelConfig(weights="lora", lora_rank=4),
        sampler=SamplerConfig(steps=STEPS),
        algorithm=AlgorithmConfig(
            prompts_per_batch=GROUPS,
            images_per_prompt=IMAGES,
            updates_per_batch=updates,
            rows_per_forward=IMAGES * STEPS,
            unit=unit,
            order="fixed",
        ),
        exploration=ExplorationConfig(mode="none"),
        evaluation=EvaluationConfig(prompts=4, every=1000, steps=1),
        reward=RewardConfig(name="paced_reward:brightness"),
        runtime=RuntimeConfig(
            shape=IMAGES,
            step_seconds=STEP_SECONDS,
            row_seconds=ROW_SECONDS,
            trainer_threads=1,
            trainer_ranks=ranks,
            lease_seconds=10.0,
            trace_steps=True,
        ),
    )


def run(config: EngineConfig, delays: Path | None = None) -> dict[str, Any]:
    """Run a job. Return the seconds of its iterations, its images a second by batch, and the steps of its samplers.

    The first batch warms up and is left out. `delays`: file for the delays of orders.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "workdir").mkdir()
        (folder / "workdir" / "paced_reward.py").write_text(REWARD)
        if delays is not None:
            os.environ[DELAYS] = str(delays)
        fleet = NurseryFleet(folder, config, workdir=folder / "workdir")
        try:
            fleet.start("trainer")
            ended = fleet.wait_until_finished(every=0.5, seconds=600)
            assert ended.reason == "iterations", fleet.logs()
            done = fleet.events("iteration_done")
            return {
                "seconds": [event.wall_seconds for event in done[1:]],
                **rates(folder),
            }
        finally:
            os.environ.pop(DELAYS, None)
            fleet.close()


def rates(folder: Path) -> dict[str, list[float]]:
    """Return the images a second of each batch but the first, and the seconds of all denoising steps in a lease."""
    at: dict[int, list[float]] = defaultdict(list)
    begun: dict[int, list[float]] = defaultdict(list)
    steps = []
    for path in folder.glob("nodes/*/traces/*.jsonl"):
        lines = [line for line in map(json.loads, path.read_text().splitlines()) if "requests" in line]
        lines = [line for line in lines if line["requests"][0][3] == Kind.TRAIN]
        for number, line in enumerate(lines):
            seconds, batch = line["at_ns"] / 1e9, line["requests"][0][0]
            at[batch].append(seconds)
            before = lines[number - 1] if number else None
            if before is not None and before["lease"] == line["lease"]:
                steps.append(seconds - before["at_ns"] / 1e9)
            else:
                begun[batch].append(seconds)
    middle = statistics.median(steps)
    images = {batch: GROUPS * IMAGES / (max(at[batch]) - min(begun[batch]) + middle) for batch in sorted(at)}
    return {"images_per_second": list(images.values())[1:], "step_seconds": steps}


def p95(values: Sequence[float]) -> float:
    return sorted(values)[max(0, math.ceil(0.95 * len(values)) - 1)]


def sampling() -> dict[str, Any]:
    """Return the figures. Medians over the batches; times of orders at the 95th percentile."""
    load = load_now()
    alone, shared = (run(config_of(ranks, unit=GROUPS, updates=1, batches=BATCHES)) for ranks in (1, 2))
    with tempfile.TemporaryDirectory() as name:
        delays = Path(name) / "delays.jsonl"
        stopped = run(config_of(2, unit=1, updates=2, batches=STOPPED_BATCHES), delays)
        orders = [json.loads(line) for line in delays.read_text().splitlines()]
    step_ms = 1000 * statistics.median(stopped["step_seconds"])
    collective = [seconds for kind, seconds, _ in orders if kind != "TrainGroup"]
    pairs = list(zip(shared["images_per_second"], alone["images_per_second"], strict=True))
    return {
        "sampling_efficiency": statistics.median(two / (2 * one) for two, one in pairs),
        "iteration_speedup": statistics.median(alone["seconds"]) / statistics.median(shared["seconds"]),
        "stop_ms": 1000 * p95([seconds for _, seconds, _ in orders]),
        "step_delay_ms": 1000 * p95(collective),
        "step_ms": step_ms,
        "sampling": {
            "images_per_second": {"1 rank": alone["images_per_second"], "2 ranks": shared["images_per_second"]},
            "iteration_seconds": {"1 rank": alone["seconds"], "2 ranks": shared["seconds"]},
            "orders_while_sampling": len(orders),
            "of_these_before_a_collective": len(collective),
            "load": [load, load_now()],
        },
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures beside their targets, for a page."""
    most_ms = found["step_ms"] + TARGETS["over a step, ms"]
    more = found["sampling"]
    return [
        f"A node of a run without rollout nodes. A denoising step is stretched by sleep to {1000 * STEP_SECONDS:g} ms,",
        f"a training row to {1000 * ROW_SECONDS:g} ms; a thread a rank. Load before and after: "
        f"{' and '.join(f'{one:.1f}' for one in more['load'])}.",
        f"Orders that came while a rank sampled: {more['orders_while_sampling']}.",
        "",
        _target(
            "images per second of 2 ranks over twice those of 1",
            found["sampling_efficiency"],
            TARGETS["sampling_efficiency"],
        ),
        _target(
            "iterations of 1 rank over those of 2, equal batch",
            found["iteration_speedup"],
            TARGETS["iteration_speedup"],
        ),
        _target("ms from an order to a rank that obeys, p95", found["stop_ms"], most_ms, at_most=True),
        _target("ms added to an optimiser step, p95", found["step_delay_ms"], most_ms, at_most=True),
    ]


def _target(name: str, value: float, limit: float, *, at_most: bool = False) -> str:
    is_met = value <= limit if at_most else value >= limit
    return f"- {name}: {value:.3g}, target {'<=' if at_most else '>='} {limit:.3g}: {'met' if is_met else '**missed**'}"


def main() -> None:
    load = load_now()
    found = sampling()
    seconds, images = found["sampling"]["iteration_seconds"], found["sampling"]["images_per_second"]
    publish(
        "rank_sampling",
        question="what does a second sampling rank gain, and what do orders wait for?",
        command="python -m tests.benchmarks.rank_sampling",
        result=found,
        runs=3,
        seeds=[0],
        load1=load,
        rows=[
            {
                "trainer": name,
                "images a second": f"{statistics.median(images[name]):.2f}",
                "s of an iteration": f"{statistics.median(seconds[name]):.2f}",
            }
            for name in seconds
        ],
        text="\n".join(lines(found)),
    )


if __name__ == "__main__":
    main()
