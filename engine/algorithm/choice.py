"""The objective that a job's algorithm names."""

from typing import assert_never

from engine.algorithm.diffusion_nft import DiffusionNft
from engine.algorithm.flow_grpo import FlowGrpo
from engine.algorithm.grpo_guard import GrpoGuard
from engine.algorithm.objective import Objective
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm_config import AlgorithmConfig
from engine.models.load import ReferencePolicy


def objective_of(config: AlgorithmConfig, old: OldPolicy, reference: ReferencePolicy | None) -> Objective:
    """Return the objective of `config.name`."""
    match config.name:
        case "flow-grpo":
            return FlowGrpo(config, reference)
        case "grpo-guard":
            return GrpoGuard(config, reference)
        case "diffusion-nft":
            return DiffusionNft(config, old, reference)
        case "auto":
            raise ValueError("algorithm.name is auto; EngineConfig replaces it by the recommended algorithm")
        case _:
            assert_never(config.name)
