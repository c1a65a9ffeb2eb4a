"""Two ranks train full weights of a model from a folder, and each reads its own part of the folder: real processes."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from engine.algorithm_config import AlgorithmConfig
from engine.config import (
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ModelConfig,
    RewardConfig,
    RuntimeConfig,
    SamplerConfig,
)
from engine.models.load import load_adapter, trainable
from engine.models.weights import read_tensors
from engine.storage.checkpoint import CheckpointStore
from tests.engine.nursery import NurseryFleet
from tests.tiny_pipelines import make_sd3

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BATCHES, LEARNING_RATE = 3, 1e-4

REWARD = """
def brightness(images, prompts):
    return [float(image.mean()) for image in images]
"""

PART = re.compile(r"read ([\d.]+) of ([\d.]+) MB of the transformer, this rank's part")


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        iterations=BATCHES,
        model=ModelConfig(name="sd3", path=str(folder), weights="full", height=16, width=16, max_text_tokens=20),
        sampler=SamplerConfig(steps=2, noise_level=0.7),
        algorithm=AlgorithmConfig(
            name="flow-grpo",
            prompts_per_batch=2,
            images_per_prompt=2,
            updates_per_batch=1,
            learning_rate=LEARNING_RATE,
            order="fixed",
        ),
        exploration=ExplorationConfig(mode="none"),
        reward=RewardConfig(name="mine:brightness"),
        evaluation=EvaluationConfig(prompts=1, every=100, shape=1),
        runtime=RuntimeConfig(shape=4, heartbeat_seconds=0.3, trainer_threads=1, trainer_ranks=2, step_seconds=0.2),
    )


def test_two_ranks_read_their_parts_of_a_folder_and_again_after_a_loss(tmp_path: Path) -> None:
    """The weights at the end are those of the folder, changed by as much as so many steps can change a weight."""
    (tmp_path / "mine.py").write_text(REWARD)
    torch.manual_seed(0)
    make_sd3().save_pretrained(tmp_path / "model")
    config = config_of(tmp_path / "model")
    fleet = NurseryFleet(tmp_path, config, workdir=tmp_path)
    try:
        fleet.start("trainer")
        fleet.wait_for_iteration(1)
        os.kill(fleet.pid_of("trainer", "trainer-rank-1"), signal.SIGKILL)
        assert fleet.wait_until_finished(seconds=200).reason == "iterations", fleet.logs()
        assert sorted(fleet.manifests()) == list(range(BATCHES))
    finally:
        fleet.close()
    for name in ("trainer", "trainer-rank-1"):
        log = (tmp_path / "nodes" / "trainer" / "logs" / f"{name}.log").read_text()
        parts = [tuple(map(float, found)) for found in PART.findall(log)]
        assert len(parts) == 2, f"{name} began twice, and read its part each time:\n{log}"
        assert all(0.4 * whole < part < 0.6 * whole for part, whole in parts), parts
    newest = CheckpointStore(f"file://{tmp_path}/store").newest()
    assert newest is not None
    assert newest.iteration == BATCHES
    trained, base = read_tensors(newest.files["weights"]), trainable(load_adapter(config.model))
    assert trained.keys() == base.keys()
    changes = [float((trained[name] - value.detach()).abs().max()) for name, value in base.items()]
    assert 0 < max(changes) < 2 * BATCHES * LEARNING_RATE
