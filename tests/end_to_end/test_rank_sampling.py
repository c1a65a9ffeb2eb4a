"""Every rank of a trainer samples, and trains the bits of rank 0 sampling alone: real processes.

With LoRA every rank has all weights. With full weights a rank that has room gathers them between its passes.
"""

import json
from pathlib import Path
from typing import Literal

import pytest

from engine.config import EngineConfig, ModelConfig, RewardConfig
from engine.events import Phase
from tests.end_to_end.test_rank_survival import CONFIG, RUNTIME, Trained
from tests.engine.nursery import NurseryFleet
from tests.sampling_stops import ALONE, DELAYS, NO_MEMORY, STOPPED, Stop, environment, happened

SLOW_REWARD = """
import time

def brightness(images, prompts):
    time.sleep(3)
    return images.float().mean(dim=(1, 2, 3)).tolist()
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


Weights = Literal["lora", "full"]

BOTH = pytest.mark.parametrize("weights", ["lora", "full"])
FULL_LATER = pytest.mark.parametrize("weights", ["lora", pytest.param("full", marks=pytest.mark.long)])


def job(ranks: int, batches: int = 3, *, weights: Weights = "lora") -> EngineConfig:
    """Return a job whose steps have four groups, so four ranks have work."""
    return CONFIG.model_copy(
        update={
            "iterations": batches,
            "model": CONFIG.model if weights == "lora" else ModelConfig(weights="full"),
            "algorithm": CONFIG.algorithm.model_copy(update={"prompts_per_batch": 8}),
            "evaluation": CONFIG.evaluation.model_copy(update={"prompts": 64, "shape": 2}),
            "runtime": RUNTIME.model_copy(update={"trainer_ranks": ranks}),
        }
    )


def trained(
    folder: Path,
    config: EngineConfig,
    *,
    trainer_nodes: int = 1,
    workdir: Path | None = None,
    ranks_have_room: bool = True,
) -> tuple[Trained, NurseryFleet]:
    """Train without a rollout node. Return the manifests, the last checkpoint's digest, and the ended fleet."""
    fleet = NurseryFleet(folder, config, trainer_nodes=trainer_nodes, workdir=workdir, ranks_have_room=ranks_have_room)
    try:
        for node in ("trainer", *(f"ranks-{number}" for number in range(1, trainer_nodes))):
            fleet.start(node)
        assert fleet.wait_until_finished(seconds=600).reason == "iterations", fleet.logs()
        done = fleet.events("iteration_done")
        assert sorted({event.iteration for event in done}) == list(range(config.iterations))
        images = config.algorithm.prompts_per_batch * config.algorithm.images_per_prompt
        assert {sum(event.made_by.values()) for event in done} == {images}, "no image twice, and none lost"
        return (fleet.manifests(), fleet.events("checkpoint_saved")[-1].digest), fleet
    finally:
        fleet.close()


def sampled_by(fleet: NurseryFleet, sampled: Phase = Phase.ROLLOUT) -> set[str]:
    """Return the workers that sampled training rollouts, or images of evaluations."""
    return {
        worker
        for event in fleet.events("node_usage", "coordinator")
        for worker, phase, _, _ in event.spans
        if phase == sampled
    }


def alone(folder: Path, config: EngineConfig) -> Trained:
    """Train with rank 0 sampling alone."""
    with pytest.MonkeyPatch.context() as patch:
        if config.model.weights == "lora":
            patch.setenv(ALONE, "1")
        run, fleet = trained(folder, config, ranks_have_room=False)
    assert sampled_by(fleet) == {"trainer/trainer"}
    return run


@BOTH
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_that_all_sample_train_the_bits_of_rank_0_sampling_alone(
    tmp_path: Path, ranks: int, weights: Weights
) -> None:
    """Rank 0 samples alone with LoRA because the test orders it, and with full weights because there is no room."""
    config = job(ranks, weights=weights)
    run, fleet = trained(tmp_path / "all", config)
    assert sampled_by(fleet) == {"trainer/trainer", *(f"trainer/trainer-rank-{rank}" for rank in range(1, ranks))}
    if weights == "lora":
        assert len(sampled_by(fleet, Phase.EVALUATION)) > 1
    assert all("idle_gpu_share" in event.health for event in fleet.events("iteration_done")), "every rank's time"
    assert run == alone(tmp_path / "alone", config)


@FULL_LATER
def test_a_rank_on_another_node_samples_too(tmp_path: Path, weights: Weights) -> None:
    config = job(2, weights=weights)
    run, fleet = trained(tmp_path / "two", config, trainer_nodes=2)
    assert sampled_by(fleet) == {"trainer/trainer", "ranks-1/trainer-rank-1"}
    assert run == alone(tmp_path / "alone", config)


@BOTH
def test_an_order_ends_the_sampling_of_a_rank_within_a_denoising_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Weights
) -> None:
    """A step takes a fifth of a second, so most orders come in the middle of one."""
    log, plain = tmp_path / "delays", job(2, batches=2, weights=weights)
    monkeypatch.setenv(DELAYS, str(log))
    config = plain.model_copy(update={"runtime": plain.runtime.model_copy(update={"step_seconds": 0.2})})
    trained(tmp_path / "run", config)
    waited = [json.loads(line) for line in log.read_text().splitlines()]
    assert waited, "an order came while the rank sampled"
    assert max(steps for _, _, steps in waited) <= 1, waited


@FULL_LATER
def test_a_rank_keeps_its_lease_while_a_slow_reward_scores(tmp_path: Path, weights: Weights) -> None:
    """Scoring takes twice as long as a lease. Ranks train, and wait for orders, meanwhile."""
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    config = job(2, batches=2, weights=weights).model_copy(
        update={"reward": RewardConfig(name="slow_reward:brightness")}
    )
    _, fleet = trained(tmp_path / "run", config, workdir=tmp_path)
    assert "trainer/trainer-rank-1" in sampled_by(fleet)
    assert not fleet.events("node_missed", "coordinator"), "no lease was lost"


@FULL_LATER
@pytest.mark.parametrize(
    "stops",
    [
        pytest.param(STOPPED, id="killed or frozen", marks=pytest.mark.long),
        # A rank without memory takes no lease as large again, so each needs a run of its own.
        *(pytest.param((stop,), id=f"no memory to {stop.point}") for stop in NO_MEMORY),
    ],
)
def test_a_sampling_rank_disturbed_at_every_point_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: tuple[Stop, ...], weights: Weights
) -> None:
    config = job(2, batches=2 * len(stops) + 2, weights=weights)
    calm, _ = trained(tmp_path / "calm", config)
    for name, value in environment(tmp_path / "stops", stops).items():
        monkeypatch.setenv(name, value)
    disturbed, fleet = trained(tmp_path / "disturbed", config)
    assert happened(tmp_path / "stops") == list(range(len(stops)))
    assert disturbed == calm, fleet.logs()
