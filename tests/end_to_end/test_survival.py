"""A batch trains exactly its manifest despite kills and freezes: real processes and signals, with exploration."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import pytest

from engine.algorithm_config import AlgorithmConfig
from engine.config import (
    CandidateBudget,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ProfileConfig,
    RuntimeConfig,
    SecondsBudget,
)
from engine.storage.checkpoint import CheckpointStore
from tests.engine.fleet import Fleet
from tests.engine.nursery import NurseryFleet

pytestmark = pytest.mark.timeout(600)

ITERATIONS = 16
CANDIDATES = 16

CONFIG = EngineConfig(
    iterations=ITERATIONS,
    algorithm=AlgorithmConfig(prompts_per_batch=2, images_per_prompt=4),
    exploration=ExplorationConfig(
        budget=CandidateBudget(candidates=CANDIDATES, patience_seconds=200),
        wait="all",
        profiles=(ProfileConfig(shape=16),),
    ),
    evaluation=EvaluationConfig(prompts=16, every=100),
    runtime=RuntimeConfig(shape=8, lease_seconds=1.5, heartbeat_seconds=0.3, trainer_threads=1),
)

BESIDE = CONFIG.model_copy(
    update={
        "algorithm": AlgorithmConfig(name="diffusion-nft", prompts_per_batch=2, images_per_prompt=4),
        "evaluation": EvaluationConfig(prompts=16, every=1),
    }
)
"""Every batch has two optimiser steps, and the evaluation of the version before it runs beside it."""

TRAINED = EngineConfig(
    iterations=ITERATIONS,
    algorithm=BESIDE.algorithm,
    exploration=CONFIG.exploration.model_copy(update={"trains": "candidates"}),
    evaluation=CONFIG.evaluation,
    runtime=CONFIG.runtime,
)
"""Every batch but the first is the chosen candidates of the batch before it, without a rollout."""

Disturbance = Callable[[Fleet], None]


def trained_by(
    folder: Path, disturbances: Sequence[Disturbance], config: EngineConfig = CONFIG
) -> tuple[dict[int, str], str]:
    """Run with a disturbance at every other batch. Return the manifests by batch and the final weights' digest."""
    return watched(folder, disturbances, config)[:2]


def watched(
    folder: Path, disturbances: Sequence[Disturbance], config: EngineConfig
) -> tuple[dict[int, str], str, dict[int, float]]:
    """Do as `trained_by`, and return the evaluated rewards by version, too."""
    fleet = NurseryFleet(folder, config)
    try:
        for node in ("trainer", "spot-0", "spot-1"):
            fleet.start(node)
        for number, disturb in enumerate(disturbances):
            fleet.wait_for_iteration(1 + 2 * number)
            disturb(fleet)
        assert fleet.wait_until_finished().reason == "iterations", fleet.logs()
        explored = [event.explored for event in fleet.events("iteration_done") if event.iteration < ITERATIONS - 1]
        assert set(explored) == {CANDIDATES}
        if config.exploration.trains == "candidates":
            stale = [event.health["staleness"] for event in fleet.events("iteration_done") if event.iteration]
            assert set(stale) == {1.0}, stale
        newest = CheckpointStore(f"file://{folder}/store").newest()
        assert newest is not None
        assert newest.iteration == ITERATIONS
        rewards: dict[int, float] = {}
        for event in fleet.events("evaluated"):
            # A trainer that died may have reported a version; its successor then reports the same figure again.
            assert rewards.setdefault(event.iteration, event.metrics["reward"]) == event.metrics["reward"]
        return fleet.manifests(), fleet.events("checkpoint_saved")[-1].digest, rewards
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], str]:
    return trained_by(tmp_path_factory.mktemp("undisturbed"), [])


def process(node: str, name: str, number: signal.Signals) -> Disturbance:
    return lambda fleet: os.kill(fleet.pid_of(node, name), number)


def agent(node: str, number: signal.Signals) -> Disturbance:
    def disturb(fleet: Fleet) -> None:
        os.kill(fleet.agents[node].pid, number)
        if number == signal.SIGKILL:
            fleet.agents[node].wait()
            # The launcher would notice the lost node and start its successor.
            fleet.report_lost(node)
            fleet.start(f"{node}-g2")

    return disturb


def whole_node(node: str, number: signal.Signals, *, noticed: bool) -> Disturbance:
    def disturb(fleet: Fleet) -> None:
        if noticed:
            fleet.notice(node, seconds=1.0)
            fleet.wait_for_iteration(len(fleet.manifests()))
        fleet.signal_node(node, number)
        fleet.start(f"{node}-successor")

    return disturb


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    # tests/conformance kills every process one by one, on the same runtime
    [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP],
    ids=["SIGKILL", "SIGSTOP"],
)
def test_losing_every_process_in_turn_keeps_batches_and_weights(
    tmp_path: Path, undisturbed: tuple[dict[int, str], str], number: signal.Signals
) -> None:
    """Manifests and weights equal those of an undisturbed run bit for bit, with a counted exploration budget."""
    in_turn = [
        process("trainer", "coordinator", number),
        process("spot-0", "worker-0", number),
        process("trainer", "trainer", number),
        whole_node("spot-0", number, noticed=False),
        whole_node("spot-0-successor", number, noticed=True),
        agent("spot-1", number),
    ]
    assert trained_by(tmp_path, in_turn) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)], ids=["SIGKILL", "SIGSTOP"]
)
def test_losses_change_no_bit_of_trained_candidates(tmp_path: Path, number: signal.Signals) -> None:
    """Coordinator, worker, trainer, spot nodes, trainer's node: in one run. No batch but the first is rolled out.

    The trainer's node takes the journal with the candidates along. The checkpoint has the images of its manifest.
    """

    def lose_trainer(fleet: Fleet) -> None:
        fleet.signal_node("trainer", signal.SIGKILL)
        fleet.start("trainer-g2")

    in_turn = [
        process("trainer", "coordinator", number),
        process("spot-0", "worker-0", number),
        process("trainer", "trainer", number),
        whole_node("spot-0", number, noticed=False),
        whole_node("spot-0-successor", number, noticed=True),
        lose_trainer,
    ]
    calm = trained_by(tmp_path / "calm", [], TRAINED)
    assert trained_by(tmp_path / "disturbed", in_turn, TRAINED) == calm


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_losses_beside_an_evaluation_change_no_batch_no_weight_and_no_score(
    tmp_path: Path, number: signal.Signals
) -> None:
    """DiffusionNFT, with an old policy between the two steps of a batch, and an evaluation beside every batch."""
    in_turn = [
        process("trainer", "coordinator", number),
        process("trainer", "trainer", number),
        process("spot-0", "worker-0", number),
        process("trainer", "trainer", number),
        whole_node("spot-0", number, noticed=False),
    ]
    calm = watched(tmp_path / "calm", [], BESIDE)
    assert watched(tmp_path / "disturbed", in_turn, BESIDE) == calm
    assert sorted(calm[2]) == list(range(ITERATIONS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_lost_trainer_node_resumes_from_its_checkpoint_in_a_new_lineage(
    tmp_path: Path, undisturbed: tuple[dict[int, str], str], number: signal.Signals
) -> None:
    def lose_trainer(fleet: Fleet) -> None:
        fleet.signal_node("trainer", number)
        if number == signal.SIGSTOP:
            # The cloud has preempted the node: it no longer answers on its address.
            fleet.signal_node("trainer", signal.SIGKILL)
        fleet.start("trainer-g2")

    manifests, digest = trained_by(tmp_path, [lose_trainer])
    assert (manifests, digest) == undisturbed


@pytest.mark.slow
def test_a_run_without_spot_nodes_trains_on_the_trainer_alone(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"iterations": 2, "exploration": ExplorationConfig(mode="none")})
    fleet = NurseryFleet(tmp_path, config)
    try:
        fleet.start("trainer")
        assert fleet.wait_until_finished().reason == "iterations"
        assert sorted(fleet.manifests()) == [0, 1]
    finally:
        fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "number"),
    [
        (CandidateBudget(candidates=CANDIDATES, patience_seconds=1.0), signal.SIGKILL),
        (SecondsBudget(max_candidates=64), signal.SIGSTOP),
    ],
    ids=["counted-SIGKILL", "idle-time-SIGSTOP"],
)
def test_exploration_pauses_without_spot_nodes_and_resumes_with_the_next(
    tmp_path: Path, budget: CandidateBudget | SecondsBudget, number: signal.Signals
) -> None:
    """The trainer does not wait for missing nodes: it continues alone at its plain speed."""
    exploration = ExplorationConfig(budget=budget, wait="all", profiles=(ProfileConfig(shape=16),))
    fleet = NurseryFleet(tmp_path, CONFIG.model_copy(update={"iterations": 5_000, "exploration": exploration}))

    def explored() -> list[int]:
        return [event.explored for event in fleet.events("iteration_done")]

    try:
        fleet.start("trainer")
        fleet.start("spot-0")
        fleet.wait_for(lambda: sum(count > 0 for count in explored()) >= 2)
        fleet.signal_node("spot-0", number)
        alone = len(explored())
        # Leases of the lost node are requeued, and its exploration is waited for once.
        fleet.wait_for(lambda: explored()[alone:].count(0) >= 4)
        fleet.start("spot-1")
        before = len(explored())
        fleet.wait_for(lambda: any(explored()[before:]))
        whole = [event for event in fleet.events("iteration_done")[alone:before] if event.explored == 0][1:]
        waited = [event.wall_seconds - sum(event.phase_ms.values()) / 1000 for event in whole]
        assert len(whole) >= 3
        assert median(waited) < 0.5, waited  # one may be slow on a busy machine; a wait would be in each
    finally:
        fleet.close()
