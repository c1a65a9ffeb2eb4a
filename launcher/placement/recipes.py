"""Recipes with known iteration times: facts about a job that a plan knows before the run. Figures, no decisions."""

from collections.abc import Mapping

from engine.algorithm_config import AlgorithmName
from engine.exploration.value import ASSUMED_RHO, IterationCost
from launcher.market.estimate import Basis, Estimate
from launcher.placement.iteration_time import Recipe


def _exponent(mean: float, high: float, measured: str) -> Estimate:
    source = (
        "assumed: iterations fall with a power of the trained rewards' variance; 0 is no use. Measured on digits-ocr, "
        f"candidates of old weights, 4 of 12 kept: {measured} (tests/benchmarks/results/algorithms.md)"
    )
    return Estimate(mean=mean, low=0.0, high=high, basis=Basis.ASSUMED, source=source)


GAIN_EXPONENTS: Mapping[AlgorithmName, Estimate] = {
    "flow-grpo": _exponent(0.5, 1.0, "x1.76 fewer (1.57 to 1.98), an exponent of 1.05 at rho .7"),
    "grpo-guard": _exponent(0.5, 1.0, "x1.55 fewer (1.42 to 1.71), an exponent of .82 at rho .7"),
    "diffusion-nft": _exponent(0.26, 0.4, "x1.15 fewer (1.09 to 1.22), an exponent of .26 at rho .7"),
}
"""What exploration saves, by algorithm. The means of flow-grpo and grpo-guard are below what digits-ocr gave, because
another model may gain less. The mean of diffusion-nft is what digits-ocr gave."""

QWEN_LORA_BYTES_PER_RANK = 380_000_000 // 64
"""Bytes per rank of a LoRA on Qwen-Image's attention projections; rank 64 has 189 M parameters (research notes
engine 6)."""

QWEN_BYTES = 40_900_000_000
"""Bytes of the whole model in bfloat16: 20.43 billion parameters (research notes engine 6)."""


def qwen_image_512(
    iterations: int = 300,
    prompts: int = 32,
    images_per_prompt: int = 16,
    explores: bool = True,
    max_candidates: int | None = None,
    lora_rank: int | None = 64,
    algorithm: AlgorithmName = "flow-grpo",
) -> Recipe:
    """Return the recipe of GRPO on Qwen-Image at 512 px with LoRA and a judge's reward (papers 4.2).

    The default is 32 x 16 images. Timed by verl-omni on 4 H800: 107 s of generation for 512 images, 253 s of everything
    else (papers 6.2). Training is assumed to cost the same for each image at any number of images. `lora_rank` None:
    every weight is trained and sent.
    """
    images = prompts * images_per_prompt
    return Recipe(
        cost=IterationCost(
            prompts=prompts,
            images_per_prompt=images_per_prompt,
            reserved_gpus=4,
            rollout_gpu_seconds=107 * 4 / 512,
            candidate_gpu_seconds=107 * 4 / 512,
            train_seconds=253 * images / 512,
            max_candidates=max_candidates,
        ),
        iterations=Estimate(
            mean=iterations,
            low=iterations / 2,
            high=iterations * 2,
            basis=Basis.ASSUMED,
            source=(
                "the recipe's 300 steps (papers 4.2), or the job's own number; half and twice, because seeds of "
                "digits-ocr needed 22 to 60 (research notes rl 4)"
            ),
        ),
        explores=explores,
        rho=ASSUMED_RHO,
        gain_exponent=GAIN_EXPONENTS[algorithm],
        copy_bytes=QWEN_BYTES if lora_rank is None else QWEN_LORA_BYTES_PER_RANK * lora_rank,
        measured_on="4 H800",
        source="verl-omni's documentation: 107 s of generation in a step of 360 s (research notes papers 4.2, 6.2)",
        never_run=(
            "spotrl has never trained Qwen-Image: its seconds are another framework's, on H800",
            "how many iterations the target takes is assumed, and so is what exploration saves of them",
            "no spot H100 was ever watched: how soon they are preempted is known from V100s of 2022",
        ),
    )


UNTIMED_SECONDS = 60.0
"""Assumed seconds of an iteration on one GPU, for a job without measurements. Plans name the value a guess."""


def untimed(
    *,
    model: str,
    iterations: int,
    prompts: int,
    images_per_prompt: int,
    explores: bool,
    max_candidates: int | None,
    algorithm: AlgorithmName = "flow-grpo",
) -> Recipe:
    """Return the recipe of a job without timings on cloud GPUs: a minute an iteration, half of it generation.

    Every figure of the recipe is a guess.
    """
    image_seconds = UNTIMED_SECONDS / 2 / (prompts * images_per_prompt)
    return Recipe(
        cost=IterationCost(
            prompts=prompts,
            images_per_prompt=images_per_prompt,
            reserved_gpus=1,
            rollout_gpu_seconds=image_seconds,
            candidate_gpu_seconds=image_seconds,
            train_seconds=UNTIMED_SECONDS / 2,
            max_candidates=max_candidates,
        ),
        iterations=Estimate(
            mean=iterations,
            low=iterations / 2,
            high=iterations,
            basis=Basis.ASSUMED,
            source="the job's own number, at most",
        ),
        explores=explores,
        rho=ASSUMED_RHO,
        gain_exponent=GAIN_EXPONENTS[algorithm],
        copy_bytes=0,
        measured_on="nothing: a guess",
        source=f"a guess: {UNTIMED_SECONDS:.0f} s an iteration on one GPU",
        never_run=(
            f"nobody has timed {model} on cloud GPUs: cost and time are a guess of {UNTIMED_SECONDS:.0f} s an "
            "iteration, and the budget is what holds",
            "as many rollout nodes are bought as the job names, because nobody knows how many pay",
            "copies of the weights are not counted",
        ),
    )
