"""trainer_ranks: do several ranks train what one rank trains, how fast, and what does the loss of a rank cost?

    python -m tests.benchmarks.trainer_ranks --json      18 minutes on two idle cores

Ranks are processes on this machine and use gloo. Four parts:

- equality: a tiny model of each family takes four AdamW steps with 1, 2 and 4 ranks, in fp64 and in fp32, LoRA and
  full weights;
- speed: optimiser steps of a model of about 39 M parameters, 1 rank and 2 ranks in turn, a thread each;
- sampling: rollouts of a node of 1 rank and of 2 ranks, and what orders wait for (rank_sampling.py);
- losses: a trainer's node with 2 ranks and two spot nodes, and a signal to one rank at a time.
"""

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import QwenImageTransformer2DModel

from engine.algorithm.transaction import Trainer
from engine.algorithm_config import AlgorithmConfig
from engine.clock import ScaledClock
from engine.config import EngineConfig, ModelConfig, SamplerConfig
from engine.diffusion.sampler import rollout_plan
from engine.events import Phase
from engine.models.adapter import DiTAdapter
from engine.models.load import freeze_but_trained, trainable
from engine.models.qwen_image import QwenImageAdapter
from engine.parallel.communicator import join_store, serve_store
from engine.parallel.rank_group import RankGroup
from engine.trainer.ranks import Follower, Ranks, take_start
from engine.trainer.reference import reference_of
from engine.trainer.shards import ShardFollower, Shards, joined_shard, led_shard
from engine.worker.usage import Usage
from tests.benchmarks.page import load_now, publish
from tests.benchmarks.rank_sampling import lines as sampling_lines
from tests.benchmarks.rank_sampling import sampling
from tests.benchmarks.sp_parity import Failed, Member
from tests.benchmarks.sp_parity import Ranks as Processes
from tests.end_to_end.test_rank_stops import FULL, STOPPED
from tests.end_to_end.test_rank_survival import CONFIG
from tests.engine.nursery import NurseryFleet
from tests.engine.test_families import TinyText, tiny_vae
from tests.rank_stops import Stop, environment, happened
from tests.rank_training import PROMPTS, Job, Trained, Trainings, manifest_of, rolled_out
from tests.shard_training import ShardTrainings, Task, largest_difference
from tests.shard_training import Trained as FullTrained

Weights = Literal["lora", "full"]

FAMILIES = ("qwen-image", "sd3", "wan")
ALGORITHM = AlgorithmConfig(
    name="flow-grpo", kl_beta=0.01, rows_per_forward=8, order="fixed", learning_rate=1e-3, gradient_clip=1.0
)
EQUAL_PASSES = ALGORITHM.model_copy(update={"rows_per_forward": 4})
"""For full weights: Wan's norms compute in fp32, and their gradients are rounded to the sum of a pass."""

SPEED = AlgorithmConfig(name="flow-grpo", kl_beta=0.0, order="fixed", learning_rate=1e-4)

MOST_FP64, MOST_FP32, LEAST_EFFICIENCY, LEAST_STEP_SECONDS = 1e-10, 1e-5, 0.8, 2.0
"""Targets."""

OTHER_ORDER = (7, 2, 5, 0, 3, 6, 1, 4)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What is timed. `rows`: of a training pass."""

    name: str
    weights: Weights
    rows: int


TIMED = (
    Timed(name="LoRA", weights="lora", rows=48),
    Timed(name="full weights, packed", weights="full", rows=48),
    Timed(name="full weights, small passes", weights="full", rows=12),
)
"""Passes of full weights have collectives of their own: packed passes have the fewest."""

LONG = rollout_plan(SamplerConfig(steps=7, noise_level=0.7), run_seed=0, batch=0)
ROWS = len(PROMPTS) * 2 * len(LONG.trained_steps)
"""Rows of an optimiser step: 8 groups of 2 images. Every group has different rewards, so all rows count."""


def bits(trained: Trained) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in (trained.weights | trained.moments).items()}


def equality(families: Sequence[str]) -> list[dict[str, Any]]:
    """Train each family with 1, 2 and 4 ranks. A repetition has another order of arrival."""
    trainings, rows = Trainings(4), []
    try:
        for family in families:
            exact = Job(family=family, double=True, algorithm=ALGORITHM)
            short = replace(exact, double=False)
            in_fp64, in_fp32 = trainings.run(exact, 1), trainings.run(short, 1)
            for ranks in (2, 4):
                shared, shared32 = trainings.run(exact, ranks), trainings.run(short, ranks)
                again = trainings.run(replace(short, order=OTHER_ORDER), ranks)
                rows.append(
                    {
                        "family": family,
                        "weights": "LoRA",
                        "ranks": ranks,
                        "fp64 weights, 4 steps": largest_difference(shared.weights, in_fp64.weights),
                        "fp32 gradients": largest_difference(shared32.first_gradients, in_fp32.first_gradients),
                        "repetition equal": bits(again) == bits(shared32),
                    }
                )
    finally:
        trainings.close()
    return rows


def full_equality(families: Sequence[str], folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Do the same with full weights. Return the rows, and the largest difference after a resume with other ranks."""
    trainings, rows, resumed = ShardTrainings(4), [], 0.0
    places = (folder / f"full-{number}" for number in itertools.count())

    def run(job: Job, ranks: int, **more: Any) -> FullTrained:
        return trainings.run(Task(job=job, folder=next(places), **more), ranks)

    try:
        for family in families:
            exact = Job(family=family, double=True, algorithm=EQUAL_PASSES, weights="full")
            short = replace(exact, double=False)
            in_fp64, in_fp32 = run(exact, 1), run(short, 1)
            for ranks in (2, 4):
                shared, shared32 = run(exact, ranks), run(short, ranks)
                again = run(replace(short, order=OTHER_ORDER), ranks)
                rows.append(
                    {
                        "family": family,
                        "weights": "full",
                        "ranks": ranks,
                        "fp64 weights, 4 steps": largest_difference(shared.files["weights"], in_fp64.files["weights"]),
                        "fp32 gradients": largest_difference(shared32.first_gradients, in_fp32.first_gradients),
                        "repetition equal": again.bits == shared32.bits,
                    }
                )
            start = folder / f"start-{family}"
            trainings.run(Task(job=replace(exact, batches=1), folder=start), 4)
            then = run(exact, 2, start=start, first_batch=1)
            resumed = max(resumed, largest_difference(then.files["weights"], in_fp64.files["weights"]))
    finally:
        trainings.close()
    return rows, resumed


# --- speed ----------------------------------------------------------------------------------------------------------


def large_adapter(weights: Weights = "lora") -> DiTAdapter:
    """Return a Qwen-Image transformer of about 39 M parameters. Adapters have rank 8."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        num_attention_heads=8,
        attention_head_dim=64,
        joint_attention_dim=32,
        axes_dims_rope=(16, 24, 24),
    )
    adapter = QwenImageAdapter(transformer, tiny_vae(), TinyText(), (24, 32))
    freeze_but_trained(adapter, ModelConfig(weights=weights, lora_rank=8))
    return adapter


@dataclass(frozen=True, kw_only=True)
class Spent:
    """A step: wall seconds of rank 0, and CPU seconds of this rank."""

    wall: float
    cpu: float


def get_ready(member: Member, port: int, rank: int, ranks: int, timed: Timed) -> None:
    """Load the model and join the ranks. Later steps are taken by `take_step`."""
    adapter, usage = large_adapter(timed.weights), Usage(ScaledClock(origin_ms=0))
    config = SPEED.model_copy(update={"rows_per_forward": timed.rows})
    job = Job(family="qwen-image", double=False, algorithm=config)
    made = [replace(group, rewards=(0.0, 1.0)) for group in rolled_out(adapter, job, LONG)] if rank == 0 else []
    group = None
    if ranks > 1:
        store = join_store(port, timeout_seconds=60.0)
        group = RankGroup.form(store, rank, ranks, torch.device("cpu"), limit_seconds=120.0)
    member.kept["follower"], member.kept["made"] = None, made
    if group is not None and timed.weights == "full":
        if rank > 0:
            member.kept["follower"] = ShardFollower(joined_shard(group, adapter, config, compiles=False))
        else:
            measure = partial(usage.measure, Phase.COLLECTIVE)
            shard = led_shard(group, adapter, config, measure, start=None, compiles=False)
            member.kept["steps"] = Shards(shard, measure)
        return
    parameters = trainable(adapter)
    is_started = rank > 0 and group is not None and take_start(group, parameters.values())
    trainer = Trainer(adapter, parameters, config, reference_of(adapter, config, is_started=is_started))
    if rank > 0 and group is not None:
        member.kept["follower"] = Follower(group, trainer)
    else:
        member.kept["steps"] = Ranks(group, trainer, usage, is_started=False)


def take_step(member: Member, rank: int) -> Spent:
    """Take an optimiser step together with the other ranks."""
    cpu, wall = time.process_time(), time.perf_counter()
    if rank > 0:
        member.kept["follower"].follow_step()
    else:
        whole = replace(manifest_of(0), sampler=LONG.signature, minibatches=(tuple(range(len(PROMPTS))),))
        step = member.kept["steps"].begin(whole, 0, LONG, std=None)
        for number in step.missing:
            step.add(number, member.kept["made"][number])
        step.commit()
    return Spent(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)


def speed(blocks: int, timed: Timed) -> list[dict[str, Any]]:
    """Time a step of 1 rank and a step of 2 ranks in turn, in processes that live all the while.

    The first block warms up and is left out. While one side steps, the other waits without using the processor.
    """
    processes, rows = Processes(3, (), preload=["tests.benchmarks.trainer_ranks"]), []
    try:
        store = serve_store()
        processes.send([0], get_ready, 0, 0, 1, timed)
        for rank in (0, 1):
            processes.send([1 + rank], get_ready, store.port, rank, 2, timed)
        _whole(processes.answers(range(3)))
        for block in range(blocks + 1):
            sides = ((0,), (1, 2)) if block % 2 else ((1, 2), (0,))
            found: dict[int, list[Spent]] = {}
            for side in sides:
                for rank, process in enumerate(side):
                    processes.send([process], take_step, rank)
                found[len(side)] = _whole(processes.answers(side))
            if block:
                rows.append(_block(found[1], found[2]))
    finally:
        processes.close()
    return rows


def _whole(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Failed):
            raise answer
    return answers


def _block(one: list[Spent], two: list[Spent]) -> dict[str, Any]:
    cpu = sum(rank.cpu for rank in two)
    return {
        "step of 1 rank, s": one[0].wall,
        "step of 2 ranks, s": two[0].wall,
        "efficiency": one[0].wall / (2 * two[0].wall),
        "CPU of 1 rank, s": one[0].cpu,
        "CPU of 2 ranks, s": cpu,
        "CPU efficiency": one[0].cpu / cpu,
        "load": load_now(),
    }


def middle(values: Sequence[float]) -> dict[str, float]:
    """Return the median and its interval of at least 95 %, from the order of the values (binomial, no assumption)."""
    ordered, n = sorted(values), len(values)
    below, chance = 0, 0.5**n
    while below < n // 2 and chance + math.comb(n, below + 1) * 0.5**n <= 0.025:
        below += 1
        chance += math.comb(n, below) * 0.5**n
    return {"median": statistics.median(ordered), "low": ordered[below], "high": ordered[n - 1 - below]}


# --- losses ---------------------------------------------------------------------------------------------------------

LOSSES = (
    ("trainer-rank-1", signal.SIGKILL),
    ("trainer-rank-1", signal.SIGSTOP),
    ("trainer", signal.SIGKILL),
    ("trainer", signal.SIGSTOP),
)


def losses(folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """Stop a rank in turn: LoRA between two batches, and full weights inside steps and files.

    Returns the seconds until the trainer went on, and whether manifests and last weights are those of calm runs.
    """
    calm = _trained(folder / "calm", CONFIG, len, [])[1]
    rows, disturbed = _trained(folder / "disturbed", CONFIG, _signalled, LOSSES)
    calm_full = _trained(folder / "calm-full", FULL, len, [])[1]
    os.environ |= environment(folder / "stops", STOPPED)
    more, stopped = _trained(folder / "stopped", FULL, partial(_stopped, folder / "stops"), STOPPED)
    return [*rows, *more], (disturbed, stopped) == (calm, calm_full)


def _trained(
    folder: Path, config: EngineConfig, lose: Callable[..., Any], lost: Sequence[Any]
) -> tuple[list[dict[str, Any]], Any]:
    """Run with these losses. `lose(fleet, number, loss)`: returns its row."""
    fleet, rows = NurseryFleet(folder, config), []
    try:
        for node in ("trainer", "spot-0", "spot-1"):
            fleet.start(node)
        for number, loss in enumerate(lost):
            rows.append(lose(fleet, number, loss))
        assert fleet.wait_until_finished(seconds=400).reason == "iterations", fleet.logs()
        manifests = fleet.manifests()
        assert sorted(manifests) == list(range(config.iterations))
        return rows, (manifests, fleet.events("checkpoint_saved")[-1].digest)
    finally:
        fleet.close()


def _signalled(fleet: NurseryFleet, number: int, loss: tuple[str, signal.Signals]) -> dict[str, Any]:
    """Signal one rank once a batch is trained."""
    name, sent = loss
    fleet.wait_for_iteration(1 + number)
    starts, begun = len(fleet.events("engine_started")), time.monotonic()
    os.kill(fleet.pid_of("trainer", name), sent)
    fleet.wait_for(lambda: len(fleet.events("engine_started")) > starts)
    return {"what": f"LoRA, {sent.name} of {name}", "resumed_s": time.monotonic() - begun}


def _stopped(stops: Path, fleet: NurseryFleet, number: int, loss: Stop) -> dict[str, Any]:
    """Wait until a rank has stopped itself."""
    starts = len(fleet.events("engine_started")) or 1
    fleet.wait_for(lambda: number in happened(stops), seconds=300.0)
    fleet.wait_for(lambda: len(fleet.events("engine_started")) > starts, seconds=120.0)
    return {"what": f"full, {loss.words}", "resumed_s": time.time() - happened(stops)[number]}


# --- page -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and write the page")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--without-losses", action="store_true", help="leave out the runs that lose ranks")
    options = parser.parse_args()
    load1 = load_now()
    parameters = sum(one.numel() for one in large_adapter().transformer.parameters())
    timed = {one.name: speed(options.blocks, one) for one in TIMED}
    print(json.dumps({name: _middles(rows) for name, rows in timed.items()}), file=sys.stderr, flush=True)
    sampled = sampling()
    equal = equality(FAMILIES)
    with tempfile.TemporaryDirectory() as name:
        more, resumed = full_equality(FAMILIES, Path(name))
        lost, is_same = ([], None) if options.without_losses else losses(Path(name))
    equal += more
    result = {
        "max_rel_diff": max(row["fp64 weights, 4 steps"] for row in equal),
        "max_rel_diff_fp32_gradients": max(row["fp32 gradients"] for row in equal),
        "max_rel_diff_resumed": resumed,
        "repetitions_equal": all(row["repetition equal"] for row in equal),
        "resumed_s": max((row["resumed_s"] for row in lost), default=None),
        "same_after_losses": is_same,
        "efficiency": {name: middle([row["efficiency"] for row in rows]) for name, rows in timed.items()},
        "speed": {name: _middles(rows) for name, rows in timed.items()},
        "rows": ROWS,
        "parameters": parameters,
        "load_while_timed": statistics.mean(row["load"] for rows in timed.values() for row in rows),
        **sampled,
        "gpus": "never run: no machine with two GPUs was at hand",
    }
    publish(
        "trainer_ranks",
        question="do several ranks train what one rank trains?",
        command="python -m tests.benchmarks.trainer_ranks " + " ".join(sys.argv[1:]),
        result={**result, "blocks": timed, "losses": lost},
        runs=len(equal) * 3 + 2,
        seeds=[0],
        load1=load1,
        rows=[{name: _shown(value) for name, value in row.items()} for row in equal],
        text=_text(result, lost),
    )


def _middles(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {name: middle([row[name] for row in rows]) for name in rows[0] if name != "load"}


def _shown(value: Any) -> Any:
    return f"{value:.1e}" if isinstance(value, float) else value


def _target(name: str, value: float, relation: str, limit: float) -> str:
    is_met = value <= limit if relation == "<=" else value >= limit
    return f"- {name}: {value:.3g}, target {relation} {limit:g}: {'met' if is_met else '**missed**'}"


def _efficiency(name: str, found: dict[str, float]) -> str:
    """Judge by the interval, not by the median alone."""
    verdict = "**missed**" if found["median"] < LEAST_EFFICIENCY else "not shown, the interval reaches below"
    if found["low"] >= LEAST_EFFICIENCY:
        verdict = "met"
    return f"- {name}: {_cell(found)}, target >= {LEAST_EFFICIENCY:g}: {verdict}"


def _lines(speed: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    head = ["| | " + " | ".join(speed) + " |", "| --- |" + " --- |" * len(speed)]
    names = next(iter(speed.values()))
    return head + [f"| {name} | " + " | ".join(_cell(one[name]) for one in speed.values()) + " |" for name in names]


def _cell(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _text(result: dict[str, Any], lost: Sequence[dict[str, Any]]) -> str:
    lines = [
        "gloo on CPUs. A difference is relative to the largest value of its tensor. A repetition has another order of",
        "arrival. **Several ranks never ran on GPUs: no machine with two GPUs was at hand.**",
        "",
        _target("max_rel_diff", result["max_rel_diff"], "<=", MOST_FP64),
        _target("fp32 gradients", result["max_rel_diff_fp32_gradients"], "<=", MOST_FP32),
        _target("resumed with other ranks", result["max_rel_diff_resumed"], "<=", MOST_FP64),
        *(_efficiency(f"efficiency, {name}", found) for name, found in result["efficiency"].items()),
        _target(
            "CPU seconds of a step of 1 rank",
            min(found["CPU of 1 rank, s"]["median"] for found in result["speed"].values()),
            ">=",
            LEAST_STEP_SECONDS,
        ),
        "",
        "## Speed",
        "",
        f"{result['parameters'] / 1e6:.0f} M parameters, {ROWS} rows an optimiser step, one thread a rank.",
        "A block times a step of 1 rank and a step of 2 ranks; blocks alternate which comes first. Efficiency: the",
        "rows per second of 2 ranks over twice those of 1 rank. On two cores that other processes use too, the wall",
        "clock of 2 ranks shows that load: a rank waits for the slower one. CPU efficiency: the CPU seconds of 1 rank",
        "over those of both ranks: the work that ranks add, without the waiting. Mean load while timed: "
        f"{result['load_while_timed']:.1f}.",
        "",
        "With full weights, each pass gathers all weights twice and adds all gradients, which over gloo takes CPU",
        f"seconds of both ranks. Packed passes have {TIMED[1].rows} rows, small ones {TIMED[2].rows}: fewer have",
        "fewer of these collectives.",
        "",
        "Medians of the blocks, with intervals of at least 95 %:",
        "",
        *_lines(result["speed"]),
        "",
        "## Sampling",
        "",
        *sampling_lines(result),
        "",
        *_losses(result, lost),
    ]
    return "\n".join(lines)


def _losses(result: dict[str, Any], lost: Sequence[dict[str, Any]]) -> list[str]:
    if not lost:
        return ["## Losses", "", "Left out of this run (`--without-losses`)."]
    return [
        "## Losses",
        "",
        "A trainer of 2 ranks and two spot nodes. `resumed_s`: from the signal until the trainer has restored its",
        "checkpoint; a frozen process is first found frozen.",
        "",
        *(f"- {row['what']}: resumed after {row['resumed_s']:.1f} s" for row in lost),
        "",
        "Manifests and the last checkpoint are those of an undisturbed run: "
        + ("yes." if result["same_after_losses"] else "**no**."),
    ]


if __name__ == "__main__":
    main()
