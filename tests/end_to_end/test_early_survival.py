"""Early groups survive kills and freezes of real processes: each batch is trained once, no group has two versions."""

import json
from collections import defaultdict
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
from engine.early_config import EarlyConfig
from engine.storage.checkpoint import CheckpointStore
from tests.engine.nursery import NurseryFleet
from tests.trainer_stops import EVERY_POINT, FREEZE, KILL, POINTS, Stop, environment, happened, trained_groups

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS, BATCHES, AFTER_LOSS = 6, 26, 2

CONFIG = EngineConfig(
    iterations=BATCHES,
    sampler={"steps": STEPS},
    algorithm=AlgorithmConfig(
        name="flow-grpo", prompts_per_batch=4, images_per_prompt=4, updates_per_batch=2, unit=1, order="fixed"
    ),
    exploration=ExplorationConfig(
        budget=CandidateBudget(candidates=32, patience_seconds=1.0), wait="all", profiles=(ProfileConfig(shape=16),)
    ),
    early=EarlyConfig(share=0.5, patience_seconds=600),
    evaluation=EvaluationConfig(prompts=16, every=100),
    runtime=RuntimeConfig(
        shape=4,
        lease_seconds=1.5,
        heartbeat_seconds=0.3,
        trainer_threads=1,
        step_seconds=0.02,
        help="feedback",
        trace_steps=True,
    ),
)
"""Two of four groups are early, and a trainer that waits samples."""


def finish(fleet):
    """Wait for the end of a run, and check that the checkpoint and the events tell of every batch once."""
    assert fleet.wait_until_finished(seconds=800).reason == "iterations", fleet.logs()
    newest = CheckpointStore(f"file://{fleet.folder}/store").newest()
    assert newest is not None
    assert newest.iteration == BATCHES
    manifests = fleet.manifests()
    assert sorted(manifests) == list(range(BATCHES))
    return manifests, fleet.events("checkpoint_saved")[-1].digest


def check_versions(folder: Path) -> int:
    """Check that each trained group has the images of one version, its own or the one before. Return the early ones."""
    versions = defaultdict(set)
    for path in folder.glob("nodes/*/traces/*.jsonl"):
        text = path.read_text()
        for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
            for batch, prompt, seed, kind in line.get("requests", ()):
                versions[kind, batch, prompt, seed].add(line["version"])
    last = {(group.batch, group.number): group for group in trained_groups(folder / "stops")}
    assert sorted(last) == [(batch, number) for batch in range(BATCHES) for number in range(4)]
    for group in last.values():
        kind, version = ("early", group.batch - 1) if group.is_early else ("train", group.batch)
        found = [versions[kind, group.batch, group.prompt, seed] for seed in group.seeds]
        assert found == [{version}] * len(group.seeds), f"{group}: {found}"
    return sum(group.is_early for group in last.values())


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm")
    fleet = NurseryFleet(folder, CONFIG)
    try:
        for node in ("trainer", "spot-0"):
            fleet.start(node)
        return finish(fleet)
    finally:
        fleet.close()


def test_a_trainer_stopped_at_every_edge_of_early_groups_ends_on_the_same_bits(tmp_path, monkeypatch, calm):
    """SIGKILL and SIGSTOP after the draft, between two commits, during help and during publish, in one run."""
    for name, value in environment(tmp_path / "stops", EVERY_POINT).items():
        monkeypatch.setenv(name, value)
    fleet = NurseryFleet(tmp_path, CONFIG)
    try:
        for node in ("trainer", "spot-0"):
            fleet.start(node)
        assert finish(fleet) == calm
    finally:
        fleet.close()
    assert happened(tmp_path / "stops") == len(EVERY_POINT)
    assert check_versions(tmp_path) == 2 * (BATCHES - 1), "every batch but the first has its early groups"


@pytest.mark.parametrize("number", [KILL, FREEZE], ids=["SIGKILL", "SIGSTOP"])
def test_with_all_spot_gone_at_every_edge_each_batch_is_trained_once(tmp_path, monkeypatch, number):
    """The trainer dies at the edge, and all spot with it. A new spot node comes some batches later."""
    stops = [Stop(point=point, signal=KILL) for point in POINTS]
    for name, value in environment(tmp_path / "stops", stops).items():
        monkeypatch.setenv(name, value)
    early = CONFIG.early.model_copy(update={"patience_seconds": 1.0})
    fleet = NurseryFleet(tmp_path, CONFIG.model_copy(update={"early": early}))
    try:
        fleet.start("trainer")
        for lost in range(len(stops)):
            fleet.start(f"spot-{lost}")
            fleet.wait_for(lambda lost=lost: happened(tmp_path / "stops") > lost)
            fleet.signal_node(f"spot-{lost}", number)
            fleet.report_lost(f"spot-{lost}")
            fleet.wait_for_iteration(len(fleet.manifests()) + AFTER_LOSS)
        finish(fleet)
    finally:
        fleet.close()
    assert check_versions(tmp_path) >= 2, "the early groups of the batch that died between its commits were whole"
    assert any("made anew with version" in event.text for event in fleet.events("warned"))
