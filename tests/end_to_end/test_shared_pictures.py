"""Workers that share a picture's sequence: whoever of a group dies or freezes, a batch trains its manifest."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.config import (
    AlgorithmConfig,
    CandidateBudget,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ProfileConfig,
    RuntimeConfig,
)
from tests.engine.fleet import Fleet

ITERATIONS = 8

CONFIG = EngineConfig(
    iterations=ITERATIONS,
    algorithm=AlgorithmConfig(prompts_per_batch=4, images_per_prompt=4),
    exploration=ExplorationConfig(budget=CandidateBudget(candidates=32), profiles=(ProfileConfig(shape=8),)),
    evaluation=EvaluationConfig(prompts=16, every=100),
    runtime=RuntimeConfig(
        shape=8, lease_seconds=1.5, heartbeat_seconds=0.3, trainer_threads=1, sp_degree=2, sp_timeout_seconds=3.0
    ),
)

Disturbance = Callable[[Fleet], None]


def trained_by(folder: Path, config: EngineConfig, disturbances: Sequence[Disturbance]) -> dict[int, str]:
    """Manifests by batch, after a run that was disturbed at every other batch."""
    fleet = Fleet(folder, config)
    try:
        for node in ("spot-0", "spot-1"):
            fleet.start(node, workers=2)
        fleet.start("trainer")
        for number, disturb in enumerate(disturbances):
            fleet.wait_for_iteration(1 + 2 * number)
            disturb(fleet)
        assert fleet.wait_until_finished().reason == "iterations", fleet.logs()
        return fleet.manifests()
    finally:
        fleet.close()


def worker(node: str, place: int, number: signal.Signals) -> Disturbance:
    return lambda fleet: os.kill(fleet.pid_of(node, f"worker-{place}"), number)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    config = CONFIG.model_copy(update={"runtime": CONFIG.runtime.model_copy(update={"sp_degree": 1})})
    return trained_by(tmp_path_factory.mktemp("alone"), config, [])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_members_of_groups_are_lost_and_join_again_and_the_batches_are_those_of_workers_alone(
    tmp_path: Path, alone: dict[int, str], how: signal.Signals
) -> None:
    first, second = worker("spot-0", 0, how), worker("spot-1", 1, how)
    assert trained_by(tmp_path, CONFIG, [first, second, first]) == alone
