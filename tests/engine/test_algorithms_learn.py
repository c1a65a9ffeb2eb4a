"""AWM and Flow-DPPO learn to write digits, in a short run of one process. How fast is the benchmarks' question."""

import time

import pytest
import torch

from engine.clock import ScaledClock
from engine.config import EngineConfig
from engine.entrypoints.inproc import build_inproc
from engine.rewards.load import load_reward

ALGORITHMS = {
    # name: settings, iterations, least gain of exact match. Seed 1 gained .26 and .17.
    "awm": ({"learning_rate": 4e-4}, 8, 0.15),
    "flow-dppo": ({"learning_rate": 2e-4}, 18, 0.10),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_learns_digits(tmp_path, name):
    settings, iterations, least = ALGORITHMS[name]
    torch.set_num_threads(1)
    config = EngineConfig.model_validate(
        {
            "seed": 1,
            "iterations": iterations,
            "algorithm": {"name": name, **settings},
            "exploration": {
                "mode": "none" if name == "awm" else "stale",
                "wait": "all",
                "budget": {"candidates": 144},
                "profiles": [{"scorer": "student"}],
            },
            "evaluation": {"prompts": 128, "every": iterations, "wait": True},
            "checkpoint": {"every": iterations, "keep": 1},
            "runtime": {"name": "inproc", "lease_seconds": 600.0, "trainer_threads": 1},
        }
    )
    clock, reward = ScaledClock(origin_ms=time.time_ns() // 1_000_000), load_reward(config.reward, None)
    loop = build_inproc(config, tmp_path, run="learns", clock=clock, reward=reward, workers=1).loop
    assert loop.run().reason == "iterations"
    (_, before), (_, after) = loop.state.evaluations
    assert after["exact_match"] - before["exact_match"] > least
