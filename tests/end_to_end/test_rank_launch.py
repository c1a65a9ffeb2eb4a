"""`spotrl launch` with a trainer of two ranks: losses of spot nodes and of ranks change no batch and no weight."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from engine.events import CheckpointSaved, EngineFinished, IterationDone, Progress, ProgressEvent
from tests.end_to_end.test_launch import Bench
from tests.engine.fleet import newest_pid

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # test_rank_survival.py has losses without a launch

NAME = "ranks"
ITERATIONS = 24

JOB = f"""
name: {NAME}
infra: local
clock_factor: 100
preemptions: {{{{trace: {{trace}}}}}}
iterations: {ITERATIONS}
prompts: digits
reward: ocr
model: {{{{name: digits-ocr, weights: {{weights}}, lora_rank: 4}}}}
algorithm:
  name: diffusion-nft
  prompts_per_batch: 4
  images_per_prompt: 4
  updates_per_batch: 2
  order: fixed
  rows_per_forward: 16
exploration: {{{{mode: none}}}}
evaluation: {{{{prompts: 16, every: 100}}}}
runtime:
  shape: 8
  lease_seconds: 1.5
  heartbeat_seconds: 0.3
  trainer_threads: 1
  trainer_ranks: 2
  step_seconds: {{step}}
resources:
  trainer: {{{{accelerators: A100-80GB:2}}}}
  rollout: {{{{accelerators: A100-80GB:2, use_spot: true, num_nodes: 2}}}}
budget: {{{{max_total: $1000, max_hourly: $100}}}}
"""

STOPS = (
    ("trainer-rank-1", signal.SIGKILL),
    ("trainer-rank-1", signal.SIGSTOP),
    ("trainer", signal.SIGKILL),
    ("trainer", signal.SIGSTOP),
)
"""Process and signal of every loss of a rank, in turn. The process `trainer` is rank 0."""

EVERY = 4
"""Iterations between two losses of a rank. A node whose processes die without progress gives up."""

PACE_SECONDS = 0.3
"""Least seconds of a denoising step of the disturbed run, so that the run outlives the first nodes of the trace."""

KINDS = {(notice, name) for notice in (True, False) for name in ("SIGKILL", "SIGSTOP")}


@pytest.fixture
def benches(tmp_path: Path) -> Iterator[tuple[Bench, Bench]]:
    """Two users, because the same run name gives the same noise."""
    both = []
    for name in ("calm", "disturbed"):
        (tmp_path / name).mkdir()
        both.append(Bench(tmp_path / name))
    yield both[0], both[1]
    for bench in both:
        for process in bench.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_launch_that_loses_spot_nodes_and_ranks_trains_the_same(benches: tuple[Bench, Bench], weights: str) -> None:
    """Preemptions with and without notice, by SIGKILL and by SIGSTOP, while both ranks die and freeze in turn."""
    calm, disturbed = benches
    undisturbed = trained_by(calm, weights, trace="none", step=0.0)
    assert trained_by(disturbed, weights, trace="bamboo-p3", step=PACE_SECONDS, stops=STOPS) == undisturbed
    report = json.loads(disturbed.spotrl("report", NAME, "--json", "--html", "report.html"))
    assert {(one["notice"], one["signal"]) for one in report["preemptions"]} == KINDS
    trainer = report["nodes"][0]
    assert trainer["role"] == "trainer"
    assert trainer["phase_micro_usd"]["collective"] == report["costs"]["by_phase"]["collective"] > 0
    assert report["collectives"]["seconds"] > 0
    assert "Ranks of the trainer: an iteration had" in (disturbed.folder / "report.html").read_text()


def trained_by(
    bench: Bench, weights: str, *, trace: str, step: float, stops: Sequence[tuple[str, signal.Signals]] = ()
) -> tuple[dict[int, str], str, bytes]:
    """Launch the run, and stop ranks in turn.

    Returns the manifests by batch, the digest of the last checkpoint, and the weights that a user pulls.
    """
    (bench.folder / "job.yaml").write_text(JOB.format(weights=weights, trace=trace, step=step))
    bench.spotrl("launch", "job.yaml", "--yes", "--detach")
    nodes = bench.folder / "state" / "runs" / NAME / "nodes"
    spec = nodes / f"{NAME}-trainer-g0" / "node.json"
    bench.wait_for(NAME, lambda _: spec.exists(), seconds=60)
    assert json.loads(spec.read_text())["ranks_have_room"], "the shipped model fits, so both ranks sample"
    for number, (process, name) in enumerate(stops):
        wait_for_iteration(bench, nodes, EVERY * (1 + number))
        os.kill(newest_pid(nodes / f"{NAME}-trainer-g0" / "logs" / f"{process}.log"), name)
    bench.wait_for(NAME, lambda run: run.status == "finished", seconds=400)
    bench.spotrl_here("pull", NAME, "--to", str(bench.folder / "pulled"))
    events = events_of(nodes)
    assert [event.reason for event in events if isinstance(event, EngineFinished)] == ["iterations"]
    done = [event for event in events if isinstance(event, IterationDone)]
    assert sorted({event.iteration for event in done}) == list(range(ITERATIONS))
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    pulled = (bench.folder / "pulled" / "weights.safetensors").read_bytes()
    return {event.iteration: event.manifest_digest for event in done}, saved[-1].digest, pulled


def wait_for_iteration(bench: Bench, nodes: Path, iteration: int) -> None:
    until = time.monotonic() + 300.0
    while not any(isinstance(event, IterationDone) and event.iteration >= iteration for event in events_of(nodes)):
        assert time.monotonic() < until, bench.view(NAME)
        time.sleep(0.2)


def events_of(nodes: Path) -> list[ProgressEvent]:
    """Return the trainer's events in written order. A line that is being written is left out."""
    log = nodes / f"{NAME}-trainer-g0" / "progress" / "trainer.jsonl"
    text = log.read_text() if log.exists() else ""
    return [Progress.from_json(line).event for line in text[: text.rfind("\n") + 1].splitlines()]
