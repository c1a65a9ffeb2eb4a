"""A trainer of two ranks trains every batch exactly once, whichever rank is killed or frozen: real processes."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine.algorithm_config import AlgorithmConfig
from engine.config import EngineConfig, EvaluationConfig, ExplorationConfig, ModelConfig, RuntimeConfig
from engine.events import IterationDone
from tests.engine.fleet import Fleet
from tests.engine.nursery import NurseryFleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BATCHES = 8
RUNTIME = RuntimeConfig(shape=8, lease_seconds=1.5, heartbeat_seconds=0.3, trainer_threads=1, trainer_ranks=2)
CONFIG = EngineConfig(
    iterations=BATCHES,
    model=ModelConfig(weights="lora", lora_rank=4),
    algorithm=AlgorithmConfig(
        name="diffusion-nft", prompts_per_batch=4, images_per_prompt=4, updates_per_batch=2, order="fixed"
    ),
    exploration=ExplorationConfig(mode="none"),
    evaluation=EvaluationConfig(prompts=16, every=100),
    runtime=RUNTIME,
)

Disturbance = Callable[[Fleet], None]


Trained = tuple[dict[int, str], str]
"""The manifests by batch, and the digest of the last checkpoint."""


def trained_by(
    folder: Path, disturbances: Sequence[Disturbance], *, trainer_nodes: int = 1, ends: Sequence[str] = ()
) -> Trained:
    """Run with a disturbance after every batch. `ends`: nodes that end by themselves after the run."""
    fleet = NurseryFleet(folder, CONFIG, trainer_nodes=trainer_nodes)
    try:
        for node in ("trainer", *(f"ranks-{number}" for number in range(1, trainer_nodes)), "spot-0", "spot-1"):
            fleet.start(node)
        for number, disturb in enumerate(disturbances):
            fleet.wait_for_iteration(1 + number)
            disturb(fleet)
        assert fleet.wait_until_finished(seconds=400).reason == "iterations", fleet.logs()
        fleet.wait_for(lambda: all((folder / "nodes" / node / "exit.json").exists() for node in ends), seconds=20)
        done = fleet.events("iteration_done")
        assert sorted({event.iteration for event in done}) == list(range(BATCHES))
        assert all(event.phase_ms["collective"] > 0 for event in done)
        used = [event for event in fleet.events("node_usage", "coordinator") if event.node == "trainer"]
        assert sum(event.phase_ms.get("collective", 0) for event in used) > 0, "dollars of the report come from these"
        return fleet.manifests(), fleet.events("checkpoint_saved")[-1].digest
    finally:
        fleet.close()


def rank(name: str, number: signal.Signals) -> Disturbance:
    return lambda fleet: os.kill(fleet.pid_of("trainer", name), number)


def lose_spot(fleet: Fleet) -> None:
    fleet.signal_node("spot-0", signal.SIGKILL)
    fleet.start("spot-0-successor")


def one_rank_instead(fleet: Fleet) -> None:
    """Lose the trainer's node. Its successor has one rank."""
    fleet.signal_node("trainer", signal.SIGKILL)
    fleet.engine = fleet.engine.model_copy(update={"runtime": RUNTIME.model_copy(update={"trainer_ranks": 1})})
    fleet.start("trainer-g2")


def replace(node: str, number: signal.Signals, successor: str, *, after: str = "") -> Disturbance:
    """Lose a node of the trainer. Start its successor once `after` is in the trainer's log. A frozen node stays."""

    def lose(fleet: Fleet) -> None:
        fleet.signal_node(node, number)
        log = fleet.folder / "nodes/trainer/logs/trainer.log"
        fleet.wait_for(lambda: after in log.read_text())
        fleet.start(successor)

    return lose


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return what two ranks of one node train without a disturbance."""
    return trained_by(tmp_path_factory.mktemp("calm"), [])


def test_killed_and_frozen_ranks_change_no_batch_and_no_weight(tmp_path: Path, calm: Trained) -> None:
    in_turn = [
        rank("trainer-rank-1", signal.SIGKILL),
        rank("trainer-rank-1", signal.SIGSTOP),
        lose_spot,
        rank("trainer", signal.SIGKILL),
        rank("trainer", signal.SIGSTOP),
    ]
    assert trained_by(tmp_path / "disturbed", in_turn) == calm
    log = (tmp_path / "disturbed/nodes/trainer/logs/agent.log").read_text()
    assert "trainer-rank-1 is frozen: killed" in log
    assert "exit code 76" in log, "a rank that lost another rank says so"


def test_two_nodes_with_a_rank_each_train_what_two_ranks_of_one_node_train(tmp_path: Path, calm: Trained) -> None:
    """A killed node. Frozen nodes are in test_trainer_nodes.py, because noticing them takes longer."""
    in_turn = [replace("ranks-1", signal.SIGKILL, "ranks-1-g1")]
    assert trained_by(tmp_path, in_turn, trainer_nodes=2, ends=["ranks-1-g1"]) == calm
    assert "another rank of the trainer was lost" in (tmp_path / "nodes/trainer/logs/trainer.log").read_text()


def three_nodes(folder: Path, lost: signal.Signals | None) -> tuple[list[IterationDone], float]:
    """Train on three nodes with a rank each, lose the third after two batches, and give it back later.

    Returns the batches until all three train again, and the seconds from the loss until two had trained a batch. None:
    nothing is lost, and there are as many batches as the run has.
    """
    algorithm = CONFIG.algorithm.model_copy(update={"updates_per_batch": 1})
    runtime = RUNTIME.model_copy(update={"trainer_ranks": 3})
    most = 12 if lost is None else 60
    config = CONFIG.model_copy(update={"algorithm": algorithm, "runtime": runtime, "iterations": most})
    fleet, seconds = NurseryFleet(folder, config, trainer_nodes=3), 0.0

    def trained_with(ranks: int, after: int) -> bool:
        return any(done.ranks == ranks and done.iteration > after for done in fleet.events("iteration_done"))

    try:
        for node in ("trainer", "ranks-1", "ranks-2", "spot-0"):
            fleet.start(node)
        if lost is None:
            fleet.wait_until_finished(seconds=400)
            return fleet.events("iteration_done"), seconds
        fleet.wait_for_iteration(1)
        fleet.signal_node("ranks-2", lost)
        began = time.monotonic()
        fleet.wait_for(lambda: trained_with(2, 1))
        seconds = time.monotonic() - began
        fleet.start("ranks-2-g1")
        newest = fleet.events("iteration_done")[-1].iteration
        fleet.wait_for(lambda: trained_with(3, newest))
        return fleet.events("iteration_done"), seconds
    finally:
        fleet.close()


@pytest.mark.parametrize("lost", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_trainer_that_lost_a_node_trains_on_without_it_and_takes_its_successor_in(
    tmp_path: Path, lost: signal.Signals
) -> None:
    """The gradients of two ranks are those of three, but for the order of a sum."""
    undisturbed, _ = three_nodes(tmp_path / "undisturbed", None)
    assert {done.ranks for done in undisturbed} == {3}
    done, _ = three_nodes(tmp_path / "lossy", lost)
    of_batch = {event.iteration: event for event in done}
    assert sorted(of_batch) == list(range(len(of_batch))), "no batch is missing"
    assert [event.iteration for event in done] == sorted(of_batch), "and none was trained twice"
    ranks = [of_batch[number].ranks for number in sorted(of_batch)]
    assert ranks == sorted(ranks[: ranks.index(2)], reverse=True) + sorted(ranks[ranks.index(2) :])
    first = ranks.index(2)
    assert of_batch[first].health["gradient_norm"] == pytest.approx(
        undisturbed[first].health["gradient_norm"], rel=1e-4
    ), "the first batch of two ranks, from weights of three"
    assert of_batch[first].manifest_digest == undisturbed[first].manifest_digest


@pytest.mark.long
def test_a_run_continues_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Full weights, divided over two ranks: no spot node, so rank 0 samples with the weights of both."""
    fleet = NurseryFleet(tmp_path, CONFIG.model_copy(update={"model": ModelConfig(weights="full")}))
    try:
        fleet.start("trainer")
        fleet.wait_for_iteration(2)
        rank("trainer-rank-1", signal.SIGKILL)(fleet)
        fleet.wait_for_iteration(4)
        one_rank_instead(fleet)
        assert fleet.wait_until_finished(seconds=400).reason == "iterations", fleet.logs()
        assert sorted(fleet.manifests()) == list(range(BATCHES))
        assert not fleet.events("warned"), "a job with another number of ranks is the same job"
    finally:
        fleet.close()
