"""`spotrl launch` of a job whose spot nodes share images: it reaches its target with equal batches."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.events import EngineFinished, IterationDone, Progress
from tests.end_to_end.sharing import Sharing
from tests.end_to_end.test_launch import Bench

JOB = """
name: {name}
infra: local
iterations: 60
model: digits-ocr
prompts: digits
reward: ocr
algorithm: {{prompts_per_batch: 4, images_per_prompt: 4}}
exploration: {{mode: stale, wait: all, budget: {{candidates: 32, patience_seconds: 200}}, profiles: [{{shape: 8}}]}}
evaluation: {{prompts: 32, every: 2, shape: 16}}
target: {{metric: exact_match, value: 0.2, evaluations: {evaluations}}}
runtime:
  name: {runtime}
  sp_degree: {sp_degree}
  step_seconds: {pace_seconds}
  shape: 8
  lease_seconds: 1.5
  heartbeat_seconds: 0.3
  sp_timeout_seconds: 3
  trainer_threads: 1
  trace_steps: true
resources:
  trainer: {{accelerators: A100-80GB:1}}
  rollout: {{accelerators: A100-80GB:2, use_spot: true, num_nodes: 2}}
budget: {{max_total: $1000, max_hourly: $50}}
preemptions: {{trace: none}}
"""

EVALUATIONS = 7
"""The base already exceeds the target, so it is confirmed at iteration 12 in every run."""

PACE_SECONDS = 0.2
"""Minimum seconds of a step in disturbed runs, because processes start at the same time, perhaps on few cores."""

WORKERS = 2

FINISHED_SECONDS = 240.0


class SharedBench(Bench):
    """Launches runs whose spot nodes have two workers."""

    def launch(self, name: str, *, runtime: str = "local", sp_degree: int = 1, pace_seconds: float = 0.0) -> Path:
        """Launch a run, and return the folder of its nodes."""
        job = JOB.format(
            name=name, runtime=runtime, sp_degree=sp_degree, pace_seconds=pace_seconds, evaluations=EVALUATIONS
        )
        (self.folder / f"{name}.yaml").write_text(job)
        self.spotrl("launch", f"{name}.yaml", "--yes", "--detach")
        return self.folder / "state" / "runs" / name / "nodes"

    def until_finished(self, name: str) -> dict[int, str]:
        """Wait until the run reached its target, and return its manifests by batch."""
        trainer = self.folder / "state" / "runs" / name / "nodes" / f"{name}-trainer-g0" / "progress" / "trainer.jsonl"
        until = time.monotonic() + FINISHED_SECONDS
        while not (
            trainer.exists() and EngineFinished.KIND in trainer.read_text()
        ):  # `spotrl status` would take CPU time from the run
            assert time.monotonic() < until, self.view(name)
            time.sleep(0.5)
        events = [Progress.from_json(line).event for line in trainer.read_text().splitlines()]
        assert [event.reason for event in events if isinstance(event, EngineFinished)] == ["target"]
        self.wait_for(name, lambda run: run.status == "finished")
        return {event.iteration: event.manifest_digest for event in events if isinstance(event, IterationDone)}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedBench]:
    bench = SharedBench(tmp_path_factory.mktemp("bench"))
    yield bench
    for process in bench.processes():
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


@pytest.fixture(scope="module")
def undisturbed(bench: SharedBench) -> dict[int, str]:
    """Return the manifests of a run whose workers share no image."""
    bench.launch("alone")
    return bench.until_finished("alone")


@pytest.mark.long  # seven minutes; test_shared_images.py tests losses and joins without a launch
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_launch_with_changing_groups_reaches_its_target_with_equal_manifests(
    bench: SharedBench, undisturbed: dict[int, str], runtime: str
) -> None:
    if runtime == "ray":
        pytest.importorskip("ray")
    name = f"shared-{runtime}"
    nodes = bench.launch(name, runtime=runtime, sp_degree=WORKERS, pace_seconds=PACE_SECONDS)
    spot = [f"{name}-spot-{number}-g0" for number in range(2)]
    sharing = Sharing(nodes, workers=WORKERS)
    sharing.wait(dict.fromkeys(spot, 0))
    sharing.hurt({spot[0]: (1, signal.SIGKILL), spot[1]: (0, signal.SIGSTOP)})
    began_ns = time.time_ns()
    os.kill(json.loads((nodes / spot[0] / "agent.json").read_text())["pid"], signal.SIGKILL)
    sharing.wait({f"{name}-spot-0-g1": 0}, began_ns)
    shown = json.loads(bench.spotrl("status", name, "--json"))["nodes"]
    assert [len(group) for node in shown if node["name"] == spot[1] for group in node["groups"]] == [WORKERS]
    assert bench.until_finished(name) == undisturbed
