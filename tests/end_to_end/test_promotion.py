"""A spot node that is up takes the role of a lost trainer: the run ends on the bits of an undisturbed run.

Real nodes; the test takes the launcher's part. A trainer that was frozen, and wakes beside its successor, ends itself,
and deletes and saves nothing.
"""

import json
import signal
import time
from pathlib import Path

import pytest

from engine.algorithm_config import AlgorithmConfig
from engine.config import (
    CandidateBudget,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ProfileConfig,
    RuntimeConfig,
)
from engine.node.lineage_watch import LOOK_SECONDS
from engine.storage.checkpoint import CheckpointStore
from tests.engine.fleet import free_port
from tests.engine.nursery import NurseryFleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ITERATIONS = 8

CONFIG = EngineConfig(
    iterations=ITERATIONS,
    algorithm=AlgorithmConfig(prompts_per_batch=2, images_per_prompt=4),
    exploration=ExplorationConfig(
        budget=CandidateBudget(candidates=16, patience_seconds=200), wait="all", profiles=(ProfileConfig(shape=16),)
    ),
    evaluation=EvaluationConfig(prompts=16, every=100),
    runtime=RuntimeConfig(shape=8, lease_seconds=3.0, heartbeat_seconds=0.5, trainer_threads=1),
)


def started(fleet: NurseryFleet) -> int:
    return len(fleet.events("engine_started"))


def trained_by(folder: Path, losses: tuple[signal.Signals, ...]) -> tuple[dict[int, str], str]:
    """Run, and lose the trainer's node in each way. Return the manifests by batch and the final weights' digest."""
    fleet = NurseryFleet(folder, CONFIG)
    try:
        for node in ("trainer", "spot-0", "spot-1"):
            fleet.start(node)
        trainer, others = "trainer", ["spot-0", "spot-1"]
        for number, loss in enumerate(losses):
            fleet.wait_for_iteration(1 + 2 * number)
            before = started(fleet)
            fleet.signal_node(trainer, loss)
            fleet.end(trainer)
            trainer = others.pop(0)
            fleet.promote(trainer)
            fleet.wait_for(lambda before=before: started(fleet) > before)
            others.append(f"spot-{number + 2}")
            fleet.start(others[-1])
        assert fleet.wait_until_finished(seconds=300).reason == "iterations", fleet.logs()
        newest = CheckpointStore(f"file://{folder}/store").newest()
        assert newest is not None
        assert (newest.iteration, newest.lineage) == (ITERATIONS, 1 + len(losses))
        return fleet.manifests(), fleet.events("checkpoint_saved")[-1].digest
    finally:
        fleet.close()


def test_three_trainers_are_lost_and_each_time_a_node_that_is_up_takes_over(tmp_path):
    losses = (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)
    assert trained_by(tmp_path / "moved", losses) == trained_by(tmp_path / "calm", ())


def test_a_frozen_trainer_that_wakes_beside_its_successor_ends_itself(tmp_path):
    fleet = NurseryFleet(tmp_path, CONFIG)
    store = CheckpointStore(f"file://{tmp_path}/store")
    try:
        for node in ("trainer", "spot-0", "spot-1"):
            fleet.start(node)
        fleet.wait_for_iteration(1)
        fleet.signal_node("trainer", signal.SIGSTOP)
        before, old_port = started(fleet), fleet.port
        saved = {f"checkpoints/{name}" for name in store.names()}  # its report may come after it woke
        fleet.promote("spot-0", port=free_port())
        assert fleet.port != old_port
        fleet.redirect("spot-1")
        fleet.wait_for(lambda: started(fleet) > before)
        fleet.signal_node("trainer", signal.SIGCONT)
        woken = time.monotonic()
        fleet.agents["trainer"].wait(timeout=3 * LOOK_SECONDS)
        assert time.monotonic() - woken < 2 * LOOK_SECONDS
        report = json.loads((tmp_path / "nodes" / "trainer" / "exit.json").read_text())
        assert "another node is the trainer's now" in report["text"]
        assert fleet.wait_until_finished(seconds=300).reason == "iterations", fleet.logs()
        old = [row.event for row in fleet.progress() if row.lineage == 1]
        assert not [event for event in old if event.KIND == "engine_finished"]
        assert {event.path for event in old if event.KIND == "checkpoint_saved"} <= saved
        assert {name[:5] for name in store.names()} == {"l0002"}
        assert sorted(fleet.manifests()) == list(range(ITERATIONS))
    finally:
        fleet.close()
