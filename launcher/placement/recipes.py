"""Recipes: facts about the iterations of a job that a plan knows before the run. Figures, no decisions."""

from collections.abc import Mapping

from engine.algorithm_config import AlgorithmName
from engine.exploration.value import ASSUMED_RHO, IterationCost
from engine.timing.job import JobSeconds
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


def timed(
    *,
    seconds: JobSeconds,
    gpu: str,
    iterations: int,
    prompts: int,
    images_per_prompt: int,
    explores: bool,
    max_candidates: int | None,
    copy_bytes: int,
    algorithm: AlgorithmName = "flow-grpo",
) -> Recipe:
    """Return the recipe of a job whose model has timings (engine/timing/). `gpu`: the GPU of rollout nodes.

    The trainer helps with rollouts at the speed of a rollout GPU.
    """
    assumed = [f"{name}: {source.text}" for name, source in seconds.sources if source.basis == "assumed"]
    guess = [f"assumed, not measured: {'; '.join(assumed)}"] if assumed else []
    return Recipe(
        cost=IterationCost(
            prompts=prompts,
            images_per_prompt=images_per_prompt,
            reserved_gpus=1,
            rollout_gpu_seconds=seconds.rollout,
            candidate_gpu_seconds=seconds.candidate,
            train_seconds=seconds.train * prompts * images_per_prompt,
            max_candidates=max_candidates,
        ),
        iterations=Estimate(
            mean=iterations,
            low=iterations / 2,
            high=iterations * 2,
            basis=Basis.ASSUMED,
            source=(
                "the job's own number; half and twice, because seeds of digits-ocr needed 22 to 60 (research notes "
                "rl 4)"
            ),
        ),
        explores=explores,
        rho=ASSUMED_RHO,
        gain_exponent=GAIN_EXPONENTS[algorithm],
        copy_bytes=copy_bytes,
        measured_on=f"1 {gpu}",
        source=_words(seconds),
        never_run=(
            f"spotrl has never trained {seconds.model}: its seconds are of random weights, or published",
            *guess,
            "how many iterations the target takes is assumed, and so is what exploration saves of them",
            f"no spot {gpu} was ever watched: how soon they are preempted is known from V100s of 2022",
        ),
    )


def _words(seconds: JobSeconds) -> str:
    """Return the sources of the seconds, like `passes measured (spotrl on one H100: ...), training assumed (...)`."""
    return ", ".join(dict.fromkeys(f"{name} {source.basis} ({source.text})" for name, source in seconds.sources))


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
    copy_bytes: int,
    algorithm: AlgorithmName = "flow-grpo",
    gpus: str = "cloud GPUs",
) -> Recipe:
    """Return the recipe of a job without timings on its GPUs: a minute an iteration, half of it generation.

    Every figure of the recipe but `copy_bytes` is a guess.
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
        copy_bytes=copy_bytes,
        measured_on="nothing: a guess",
        source=f"a guess: {UNTIMED_SECONDS:.0f} s an iteration on one GPU",
        never_run=(
            f"nobody has timed {model} on {gpus}: cost and time are a guess of {UNTIMED_SECONDS:.0f} s an iteration, "
            "and the budget is what holds",
            "as many rollout nodes are bought as the job names, because nobody knows how many pay",
        ),
    )
