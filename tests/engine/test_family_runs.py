"""Whole runs of every family, loaded from its folder as a run loads it.

Rollouts, scores, two updates, checkpoint, resume, publish.
"""

import json
from collections import Counter

import pytest
import torch

from engine.algorithm_config import AlgorithmConfig
from engine.clock import ScaledClock
from engine.config import (
    VIDEO,
    EngineConfig,
    EvaluationConfig,
    ExplorationConfig,
    ModelConfig,
    RewardConfig,
    RuntimeConfig,
    SamplerConfig,
)
from engine.entrypoints.inproc import build_inproc
from engine.models.load import load_adapter
from engine.protocol.request import Score
from tests.tiny_pipelines import PIPELINES

UPDATES, STEPS, EVALUATION_STEPS = 2, 2, 3

MODES = {
    "bf16-lora": ("lora", torch.bfloat16, 0.05),
    "bf16-full": ("full", torch.bfloat16, 0.05),
    "fp32-lora": ("lora", torch.float32, 1e-4),
}
"""Trained weights, number format of the frozen ones, and largest change of a log-prob before the first update."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that gives the family's model folder, which is written once."""
    torch.set_num_threads(1)
    written = {}

    def folder(family):
        if family not in written:
            torch.manual_seed(0)
            written[family] = tmp_path_factory.mktemp(family)
            PIPELINES[family]().save_pretrained(written[family])
        return written[family]

    return folder


def config_of(family, path, weights, iterations):
    frames = {"frames": 5} if family in VIDEO else {}
    return EngineConfig(
        iterations=iterations,
        model=ModelConfig(
            name=family, path=str(path), weights=weights, lora_rank=2, height=16, width=16, max_text_tokens=20, **frames
        ),
        sampler=SamplerConfig(steps=STEPS, noise_level=0.7),
        algorithm=AlgorithmConfig(
            name="flow-grpo", prompts_per_batch=2, images_per_prompt=2, updates_per_batch=UPDATES, kl_beta=0.01
        ),
        exploration=ExplorationConfig(mode="none"),
        reward=RewardConfig(name="tests.engine.test_family_runs:brightness"),
        evaluation=EvaluationConfig(prompts=1, every=2, steps=EVALUATION_STEPS, shape=1),
        runtime=RuntimeConfig(name="inproc", shape=4),
    )


def brightness(images, prompts):
    return [Score(reward=float(image.mean()), metrics={}) for image in images]


class Levels:
    """Adapter that counts the noise levels at which its network is called."""

    def __init__(self, adapter):
        self._adapter = adapter
        self.seen = Counter()

    def __getattr__(self, name):
        return getattr(self._adapter, name)

    def velocity(self, x, sigma, conditioning, guidance):
        self.seen.update(round(level, 5) for level in sigma.tolist())
        return self._adapter.velocity(x, sigma, conditioning, guidance)


def run(config, dtype, folder):
    """Run or continue a run without a spot node. Return its parts and the adapter."""
    adapter = Levels(load_adapter(config.model, dtype=dtype))
    parts = build_inproc(
        config,
        folder,
        run="tiny",
        clock=ScaledClock(origin_ms=0),
        reward=brightness,
        workers=0,
        make_adapter=lambda: adapter,
    )
    finished = parts.loop.run()
    assert finished.reason == "iterations", finished.text
    return parts, adapter


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "bf16-lora" else pytest.mark.long) for mode in MODES]
)
@pytest.mark.parametrize("family", PIPELINES)
def test_a_family_trains_and_resumes_from_its_checkpoint(folders, family, mode, tmp_path):
    weights, dtype, tolerance = MODES[mode]
    run(config_of(family, folders(family), weights, 1), dtype, tmp_path)
    parts, adapter = run(config_of(family, folders(family), weights, 2), dtype, tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "progress" / "trainer.jsonl").read_text().splitlines()]
    assert [line["event"]["iteration"] for line in lines if line["kind"] == "engine_started"] == [0, 1]
    done = [line["event"]["health"] for line in lines if line["kind"] == "iteration_done"]
    assert len(done) == 2
    for health in done:
        assert health["dlogp_before_update"] < tolerance
        assert health["skipped_groups"] == 0
        assert health["gradient_norm"] > 0
    state = parts.loop.model.trainer.optimizer_state()
    assert {float(value) for name, value in state.items() if name.endswith("|step")} == {2.0 * UPDATES}
    assert parts.loop.coordinator.peek().version == 2
    assert all(bool(value.isfinite().all()) for value in parts.loop.model.parameters.values())

    levels = {*adapter.schedule.sigmas(STEPS)[:-1], *adapter.schedule.sigmas(EVALUATION_STEPS)[:-1]}
    assert adapter.seen.keys() == {round(level, 5) for level in levels}
