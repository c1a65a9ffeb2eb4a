"""rewards: what does a scorer of 50 ms cost by its place, and does a fault lose, double or invent a score?

    python -m tests.benchmarks.rewards --json

`places`: a real worker with paced steps against a real coordinator, its images scored in line, beside the next lease,
by two scoring processes, or by a server. `faults`: real nodes with a scoring process each, of which one process is
killed or frozen while images are scored. `planted bugs`: those between an image and its score.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.clock import ScaledClock
from engine.config import EngineConfig, RewardConfig, RuntimeConfig
from engine.diffusion.sampler import plan_to_dict, rollout_plan
from engine.models.load import load_adapter, trainable
from engine.models.weights import get_weights
from engine.pool.client import PoolReward
from engine.pool.messages import socket_name
from engine.pool.server import ScoringProcess, listen
from engine.protocol.request import Kind, RequestId, Score, WeightsKey
from engine.protocol.task import Task
from engine.reward_config import LEASES_AT_A_SERVER, PoolConfig
from engine.rewards.load import load_reward
from engine.rewards.reward import Reward
from engine.worker.worker import Worker
from tests.benchmarks.page import ROOT, load_now, publish, spread
from tests.conformance.cluster import ClusterStage
from tests.conformance.drill import Drill
from tests.conformance.stage import SHAPE, engine_config
from tests.engine.heads import task_to_dict, weights_to_list
from tests.engine.scorer_server import ScorerServer
from tests.engine.served import Served

SCORER_SECONDS = 0.05
"""Of an image."""

PROCESSES = 2
IMAGES_OF_A_LEASE = 4

Scorer = Literal["free", "waits", "holds Python's lock"]
Place = Literal["in line", "with_rollout", "pool", "http"]

ARMS: tuple[tuple[Scorer, Place], ...] = (
    ("free", "in line"),
    ("waits", "in line"),
    ("waits", "with_rollout"),
    ("waits", "pool"),
    ("waits", "http"),
    ("holds Python's lock", "in line"),
    ("holds Python's lock", "with_rollout"),
    ("holds Python's lock", "pool"),
)


def reward_of(scorer: Scorer) -> Reward:
    """Return a scorer of the mean. `waits`: a model on a device of its own. `holds Python's lock`: slow Python code."""

    def score(images: Tensor, prompts: Sequence[str]) -> list[Score]:
        until = time.perf_counter() + (0.0 if scorer == "free" else SCORER_SECONDS * len(prompts))
        if scorer == "waits":
            time.sleep(max(0.0, until - time.perf_counter()))
        while time.perf_counter() < until:
            pass
        return [Score(reward=float(image.mean()), metrics={}) for image in images]

    return score


class SlowServer(ScorerServer):
    """A server that takes `SCORER_SECONDS` for each image of a request."""

    def _scores(self, asked: dict) -> list[float]:
        time.sleep(SCORER_SECONDS * len(asked["images"]))
        return super()._scores(asked)


@contextlib.contextmanager
def scoring(scorer: Scorer, place: Place) -> Iterator[tuple[Reward, int]]:
    """Yield the worker's reward, and the leases that it scores beside sampling."""
    match place:
        case "in line":
            yield reward_of(scorer), 0
        case "with_rollout":
            yield reward_of(scorer), 1
        case "http":
            with SlowServer("json") as server:
                reward = RewardConfig.model_validate({"name": "http", "http": {"url": server.url}})
                yield load_reward(reward, None), LEASES_AT_A_SERVER
        case "pool":
            with tempfile.TemporaryDirectory() as folder:
                words = [sys.executable, "-m", "tests.benchmarks.rewards", "--scorer", scorer, "--folder", folder]
                started = [subprocess.Popen([*words, "--number", str(n)], cwd=ROOT) for n in range(PROCESSES)]
                try:
                    while any(not Path(folder, socket_name(n)).exists() for n in range(PROCESSES)):
                        time.sleep(0.02)
                    yield PoolReward(Path(folder), processes=PROCESSES, tries=1), PROCESSES
                finally:
                    for process in started:
                        process.kill()
                        process.wait()


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speed of one worker, from the first pull to the last result."""

    images: int
    seconds: float
    waited_seconds: float
    """In which the worker, and so the trainer, did nothing but wait for scores."""

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def waits(self) -> float:
        """Return the share of the time spent waiting for scores."""
        return self.waited_seconds / self.seconds


def pace_of(scorer: Scorer, place: Place, leases: int, step_seconds: float) -> Pace:
    """Measure a worker that makes leases of four images."""
    config = EngineConfig()
    runtime = RuntimeConfig(lease_seconds=30, first_lease_seconds=30)
    with tempfile.TemporaryDirectory() as folder, scoring(scorer, place) as (reward, beside):
        front = Served(Path(folder), runtime)
        try:
            adapter = load_adapter(config.model)
            worker = Worker(
                name="spot/0",
                node="spot",
                workers_of_node=1,
                transport=front.transport(),
                adapter=adapter,
                parameters=trainable(adapter),
                reward=reward,
                scored_beside=beside,
                clock=ScaledClock(origin_ms=time.time_ns() // 1_000_000),
                heartbeat_seconds=0.5,
                step_seconds=step_seconds,
            )
            line, plan, v0 = front.transport(), rollout_plan(config.sampler, 0, 0), WeightsKey(version=0)
            line.call({"call": "publish", "weights": weights_to_list(v0)}, {"weights": get_weights(worker.parameters)})
            begun = waited = 0.0
            for batch, count in enumerate((1, leases)):  # the first batch warms up
                wanted = tuple(
                    RequestId(run="r", lineage=0, batch=batch, prompt=f"{i:04d}", seed=i, kind=Kind.TRAIN)
                    for i in range(IMAGES_OF_A_LEASE * count)
                )
                task = Task(
                    requests=wanted,
                    weights=v0,
                    sampler=json.dumps(plan_to_dict(plan)),
                    steps=plan.steps,
                    shape=IMAGES_OF_A_LEASE,
                    dtype="float32",
                )
                line.call({"call": "submit", "task": task_to_dict(task)})
                begun, waited = time.perf_counter(), worker.waited_for_scores_seconds
                while front.coordinator.queue.wanted(Kind.TRAIN):
                    worker.serve_once(wait=False)
            return Pace(
                images=IMAGES_OF_A_LEASE * leases,
                seconds=time.perf_counter() - begun,
                waited_seconds=worker.waited_for_scores_seconds - waited,
            )
        finally:
            front.close()


# --- faults


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    """A batch during which a process was killed or frozen."""

    victim: str
    signal: Literal["SIGKILL", "SIGSTOP"]
    images: int
    lost: int
    doubled: int
    wrong: int
    """Images with another trajectory or another reward than in an undisturbed run."""
    seconds: float


def fault_case(drill: Drill, part: str, signal: Literal["SIGKILL", "SIGSTOP"], images: int) -> FaultCase:
    """Disturb a process while a batch is sampled and scored, and count. A frozen process goes on after two leases."""
    begun = time.perf_counter()
    batch = drill.submit(images)
    hit = drill.in_the_middle(batch, step=3)
    victim = part if part == "coordinator" else f"{hit.node}/{part}"
    if signal == "SIGKILL":
        drill.stage.kill(victim)
    else:
        drill.stage.freeze(victim)
        time.sleep(2 * drill.lease_seconds)
        drill.stage.thaw(victim)
    found, _ = drill.collect_all(batch)
    seconds = time.perf_counter() - begun
    counted = Counter(result.request for result in found)
    expected = drill.undisturbed.results(batch.requests, drill.version)
    try:
        drill.assert_whole(batch)  # trajectories too, and what a restarted coordinator would know
        wrong = 0
    except AssertionError:
        wrong = max(1, sum(result.score.reward != expected[result.request][1] for result in found))
    return FaultCase(
        victim=part,
        signal=signal,
        images=images,
        lost=sum(counted[request] == 0 for request in batch.requests),
        doubled=sum(count - 1 for count in counted.values()),
        wrong=wrong,
        seconds=seconds,
    )


def fault_cases(times: int) -> list[FaultCase]:
    reward = RewardConfig(name="brightness:slow", placed="pool", pool=PoolConfig(batch=2 * SHAPE))
    with tempfile.TemporaryDirectory() as folder:
        stage = ClusterStage(Path(folder), engine_config("local").model_copy(update={"reward": reward}))
        try:
            drill = Drill(stage)
            found = []
            for _ in range(times):
                for part in ("scorer-0", "worker-0", "coordinator"):
                    for signal in ("SIGKILL", "SIGSTOP"):
                        drill.need(2, spare=0)
                        found.append(fault_case(drill, part, signal, 16 * SHAPE))
            return found
        finally:
            stage.close()


def planted_bugs() -> dict[str, bool]:
    """Return whether each planted bug between an image and its score is found by its test."""
    from tests.mutants.scores import FAULTS

    words = [sys.executable, "-m", "tests.mutants.faults", *FAULTS]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ)).stdout
    return {name: f"found {name}: " in printed for name in FAULTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--leases", type=int, default=8, help="of each arm and round")
    parser.add_argument("--step-seconds", type=float, default=0.05)
    parser.add_argument("--fault-rounds", type=int, default=2, help="times that each process is killed and frozen")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    parser.add_argument("--scorer", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.scorer is not None:
        process = ScoringProcess(reward_of(options.scorer), batch=IMAGES_OF_A_LEASE, timeout_seconds=60.0)
        process.serve(listen(options.folder, options.number))
    load1 = load_now()
    paces: dict[tuple[Scorer, Place], list[Pace]] = {arm: [] for arm in ARMS}
    for number in range(options.rounds):
        for arm in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
            paces[arm].append(pace_of(*arm, options.leases, options.step_seconds))
    cases = fault_cases(options.fault_rounds)
    bugs = planted_bugs()
    report(options, load1, paces, cases, bugs)


def report(
    options: argparse.Namespace,
    load1: float,
    paces: dict[tuple[Scorer, Place], list[Pace]],
    cases: Sequence[FaultCase],
    bugs: dict[str, bool],
) -> None:
    rates = {arm: [pace.images_per_second for pace in paces[arm]] for arm in ARMS}
    waits = {arm: [pace.waits for pace in paces[arm]] for arm in ARMS}
    free = rates["free", "in line"]

    def of_round(arm: tuple[Scorer, Place], figure: Callable[[float, float, float], float]) -> list[float]:
        in_line = rates[arm[0], "in line"]
        return [figure(*each) for each in zip(rates[arm], free, in_line, strict=True)]

    slower = {arm: of_round(arm, lambda mine, free, _: 1 - mine / free) for arm in ARMS}
    gains = {arm: of_round(arm, lambda mine, _, in_line: mine / in_line) for arm in ARMS}
    pool: tuple[Scorer, Place] = ("waits", "pool")
    rows = [
        {
            "scorer": scorer,
            "place": place,
            "images/s": spread(rates[scorer, place]),
            "waits for scores": spread(waits[scorer, place]),
            "slower than free": spread(slower[scorer, place]),
            "gain over in line": spread(gains[scorer, place]),
        }
        for scorer, place in ARMS
    ]
    publish(
        "rewards",
        question="what does a scorer of 50 ms cost by its place, and does a fault lose, double or invent a score?",
        command="python -m tests.benchmarks.rewards --json",
        result={
            "images_per_s": {f"{scorer}, {place}": statistics.median(rates[scorer, place]) for scorer, place in ARMS},
            "critical_path_share": statistics.median(waits[pool]),
            "waited_seconds": {
                f"{scorer}, {place}": statistics.median(pace.waited_seconds for pace in paces[scorer, place])
                for scorer, place in ARMS
            },
            "slower_than_free": statistics.median(slower[pool]),
            "overlap_gain": statistics.median(gains[pool]),
            "lost": sum(case.lost for case in cases),
            "doubled": sum(case.doubled for case in cases),
            "wrong": sum(case.wrong for case in cases),
            "fault_cases": [asdict(case) for case in cases],
            "planted_bugs": bugs,
            "scorer_seconds_per_image": SCORER_SECONDS,
            "scoring_processes": PROCESSES,
            "images_of_a_lease": IMAGES_OF_A_LEASE,
            "leases": options.leases,
            "step_seconds": options.step_seconds,
        },
        runs=options.rounds,
        seeds=[],
        load1=load1,
        rows=rows,
        text=page_text(options, cases, bugs, statistics.median(waits[pool]), statistics.median(gains[pool])),
    )


def _verdict(holds: bool) -> str:
    return "held" if holds else "missed"


def page_text(
    options: argparse.Namespace, cases: Sequence[FaultCase], bugs: dict[str, bool], share: float, gain: float
) -> str:
    images, kinds = sum(case.images for case in cases), len({(case.victim, case.signal) for case in cases})
    return f"""
`median (range)` of {options.rounds} rounds; the order of the arms changes with each round. A real worker (digits model,
one thread) makes {options.leases} leases of {IMAGES_OF_A_LEASE} images against a real coordinator over HTTP. Steps are
paced to {options.step_seconds} s. `in line`: the next lease begins when the scores are there. `free`: a scorer that
takes no time. `waits for scores`: share of the time in which the worker, and with it the trainer, does nothing else.
The wait for the last scores of the batch is included. `slower than free`: 1 - images/s over those of `free` in the
same round, which moves with the machine's load too. `waits`: a model on a device of its own; `holds Python's lock`:
slow Python code. `pool`: {PROCESSES} processes.

## Faults

{len(cases)} batches of real nodes with a scoring process each, {images} images: scoring process, worker and coordinator
were killed (SIGKILL) and frozen (SIGSTOP, for two lease times), {len(cases) // kinds} times each, while images were
sampled and scored. Lost: {sum(case.lost for case in cases)}. Doubled: {sum(case.doubled for case in cases)}.
With another trajectory or reward than undisturbed: {sum(case.wrong for case in cases)}.

## Planted bugs

{sum(bugs.values())} of {len(bugs)} found by the test that their entry names: {", ".join(bugs)}.

## Targets

`critical_path_share` (`waits for scores`) of `pool` for a scorer that waits: {share:.3f}, target .05
{_verdict(share <= 0.05)}. What remains is the last lease, whose images all processes share:
{IMAGES_OF_A_LEASE * SCORER_SECONDS / PROCESSES:g} s. `overlap_gain`: {gain:.2f}, target 1.15 {_verdict(gain >= 1.15)}.
Where ranges of two places overlap, the places cannot be ranked.
"""


if __name__ == "__main__":
    main()
