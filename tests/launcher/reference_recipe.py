"""A recipe with published times: Qwen-Image on four H800, as verl-omni published it.

The closed forms of the notes are checked with its figures. Plans take theirs from engine/timing/.
"""

from engine.exploration.value import ASSUMED_RHO
from engine.timing.ranks import StepWork
from engine.trainer_ranks import ONE, RankLimits
from launcher.job.recipe import GAIN_EXPONENTS, Recipe
from launcher.market.estimate import Basis, Estimate

ADAPTER_BYTES = 1_698_693_120
"""Bytes of adapters of rank 64 on Qwen-Image in fp32."""


def verl_omni(
    *,
    explores: bool = True,
    iterations: int = 300,
    limits: RankLimits = ONE,
    step: StepWork | None = None,
) -> Recipe:
    """Return the recipe: 107 s of generation for 512 images, and 253 s of everything else, on four GPUs."""
    return Recipe(
        prompts=32,
        images_per_prompt=16,
        sampling_gpus=4,
        rollout_gpu_seconds=107 * 4 / 512,
        candidate_gpu_seconds=107 * 4 / 512,
        train_seconds=253,
        iterations=Estimate(
            mean=iterations,
            low=iterations / 2,
            high=iterations * 2,
            basis=Basis.ASSUMED,
            source="the recipe's 300 steps; half and twice are assumed",
        ),
        explores=explores,
        rho=ASSUMED_RHO,
        gain_exponent=GAIN_EXPONENTS["flow-grpo"],
        copy_bytes=ADAPTER_BYTES,
        measured_on="4 H800",
        source="verl-omni's documentation",
        limits=limits,
        step=step,
        never_run=("spotrl has never trained Qwen-Image",),
    )
