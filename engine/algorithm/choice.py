"""The objective that a job's algorithm names."""

from typing import assert_never

from engine.algorithm.awm import Awm
from engine.algorithm.diffusion_nft import DiffusionNft
from engine.algorithm.flow_dppo import FlowDppo
from engine.algorithm.flow_grpo import FlowGrpo
from engine.algorithm.grpo_guard import GrpoGuard
from engine.algorithm.objective import Objective
from engine.algorithm.old_policy import OldPolicy
from engine.algorithm_config import AlgorithmConfig
from engine.models.load import ReferencePolicy


def objective_of(
    config: AlgorithmConfig, old: OldPolicy, reference: ReferencePolicy | None, *, workers_differ: bool
) -> Objective:
    """Return the objective of `config.name`.

    `workers_differ`: rollout workers merge adapters or compile blocks, so their log-probs are close to the trainer's
    and not equal.
    """
    own = old if workers_differ else None
    match config.name:
        case "flow-grpo":
            return FlowGrpo(config, reference, own)
        case "grpo-guard":
            return GrpoGuard(config, reference, own)
        case "flow-dppo":
            return FlowDppo(config, reference, own)
        case "diffusion-nft":
            return DiffusionNft(config, old, reference)
        case "awm":
            return Awm(config, old, reference)
        case "auto":
            raise ValueError("algorithm.name is auto; EngineConfig replaces it by the recommended algorithm")
        case _:
            assert_never(config.name)
