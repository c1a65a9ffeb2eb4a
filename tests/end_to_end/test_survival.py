"""Whatever dies or freezes, a batch trains exactly its manifest: real processes, real signals, exploration on."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config import (
    AlgorithmConfig,
    CandidateBudget,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    RuntimeConfig,
)
from engine.training.checkpoint import CheckpointStore
from tests.engine.fleet import Fleet

ITERATIONS = 6

CONFIG = EngineConfig(
    iterations=ITERATIONS,
    algorithm=AlgorithmConfig(prompts_per_batch=4, images_per_prompt=4),
    exploration=ExplorationConfig(budget=CandidateBudget(candidates=32), shape=16),
    evaluation=EvaluationConfig(prompts=16, every=100),
    runtime=RuntimeConfig(shape=8, lease_seconds=1.5, heartbeat_seconds=0.3, trainer_threads=1),
)


def run_fleet(folder: Path, disturb: Callable[[Fleet], None] | None = None) -> tuple[dict[int, str], str]:
    """Manifests by batch and the digest of the final weights."""
    fleet = Fleet(folder, CONFIG)
    try:
        fleet.start("trainer")
        fleet.start("spot-0")
        fleet.start("spot-1")
        fleet.wait_for_iteration(1)
        if disturb is not None:
            disturb(fleet)
        finished = fleet.wait_until_finished()
        assert finished.reason == "iterations"
        newest = CheckpointStore(f"file://{folder}/store").newest()
        assert newest is not None
        assert newest.iteration == ITERATIONS
        explored = [event.explored for event in fleet.events("iteration_done")]
        assert explored[:-1] == [32] * (len(explored) - 1)
        digest = fleet.events("checkpoint_saved")[-1].digest
        return fleet.manifests(), digest
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], str]:
    return run_fleet(tmp_path_factory.mktemp("undisturbed"))


def signal_process(node: str, name: str, number: signal.Signals) -> Callable[[Fleet], None]:
    def disturb(fleet: Fleet) -> None:
        os.kill(fleet.pid_of(node, name), number)

    return disturb


def signal_agent(node: str, number: signal.Signals) -> Callable[[Fleet], None]:
    def disturb(fleet: Fleet) -> None:
        os.kill(fleet.agents[node].pid, number)
        if number == signal.SIGKILL:
            fleet.agents[node].wait()
            # The launcher would see the node gone and start its successor.
            fleet.tell_lost(node)
            fleet.start(f"{node}-g2")

    return disturb


def lose_node(number: signal.Signals, *, noticed: bool) -> Callable[[Fleet], None]:
    def disturb(fleet: Fleet) -> None:
        if noticed:
            fleet.notice("spot-0", seconds=1.0)
            fleet.wait_for_iteration(2)
        fleet.signal_node("spot-0", number)
        fleet.start("spot-0-g2")

    return disturb


DISTURBANCES = {
    f"{name}-{number.name}": signal_process(node, name, number)
    for node, name in [("trainer", "coordinator"), ("trainer", "trainer"), ("spot-0", "worker-0")]
    for number in (signal.SIGKILL, signal.SIGSTOP)
} | {
    "spot agent-SIGKILL": signal_agent("spot-0", signal.SIGKILL),
    "spot agent-SIGSTOP": signal_agent("spot-0", signal.SIGSTOP),
    "spot node-SIGKILL": lose_node(signal.SIGKILL, noticed=False),
    "spot node-SIGSTOP": lose_node(signal.SIGSTOP, noticed=False),
    "spot node-SIGKILL-notice": lose_node(signal.SIGKILL, noticed=True),
    "spot node-SIGSTOP-notice": lose_node(signal.SIGSTOP, noticed=True),
}


@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_a_disturbed_run_trains_what_an_undisturbed_run_trains(
    tmp_path: Path, undisturbed: tuple[dict[int, str], str], disturbance: str
) -> None:
    """Bit for bit: equal manifests and equal weights, with exploration on and a counted budget."""
    assert run_fleet(tmp_path, DISTURBANCES[disturbance]) == undisturbed


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, CONFIG)
    yield fleet
    fleet.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_trainer_machine_goes_on_from_its_checkpoint_under_a_new_lineage(
    fleet: Fleet, undisturbed: tuple[dict[int, str], str], number: signal.Signals
) -> None:
    fleet.start("trainer")
    fleet.start("spot-0")
    fleet.wait_for_iteration(2)
    fleet.signal_node("trainer", number)
    if number == signal.SIGSTOP:
        # The cloud has taken the machine: it will not answer on its address any more.
        fleet.signal_node("trainer", signal.SIGKILL)
    fleet.start("trainer-g2")
    assert fleet.wait_until_finished().reason == "iterations"
    assert {progress.lineage for progress in fleet.progress()} == {1, 2}
    assert fleet.manifests() == undisturbed[0]


def test_a_run_without_any_spot_node_trains_the_same_batches_without_exploration(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"iterations": 2, "exploration": ExplorationConfig(mode="none")})
    fleet = Fleet(tmp_path, config)
    try:
        fleet.start("trainer")
        assert fleet.wait_until_finished().reason == "iterations"
        assert sorted(fleet.manifests()) == [0, 1]
    finally:
        fleet.close()
