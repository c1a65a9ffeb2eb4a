"""The seconds of a job's images: rolled out, tried, and trained, on the GPUs that the job names. Pure.

    EngineConfig, SizedModel (engine/memory/job.py) -> seconds of passes (seconds.py) -> seconds of an image

Models that ship with spotrl, and GPUs without a known speed, have no timings. Not counted: scoring, which a thread does
beside the next images; text encoders, which encode a prompt once; the optimiser's step; evaluations.
"""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.memory.activations import branches_of
from engine.memory.published import SizedModel
from engine.timing.figures import LIKE, STEP_PASSES, STEP_PASSES_FULL, STEP_PASSES_OTHERWISE, UNMERGED, Source
from engine.timing.seconds import (
    decode_seconds,
    known_speed,
    pass_seconds,
    rate,
    step_seconds,
    unmerged_seconds,
)

MEASURED_ON = "H100"
"""The GPU of the tables, whose speed is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSeconds:
    """Seconds of one GPU for an image of a job, and the sources of the figures."""

    model: str
    """Published model whose timings count."""
    rollout: float
    """An image rolled out on a rollout GPU, decoding included."""
    candidate: float
    """A candidate tried on a rollout GPU, decoding included."""
    train: float
    """An image trained on the trainer's GPU: all of its rows."""
    sources: tuple[tuple[str, Source], ...]
    """The figures that were used, by name, each with its source."""


def job_seconds(
    config: EngineConfig, sized: SizedModel, *, trainer: str, rollout: str, rows: int | None = None
) -> JobSeconds | None:
    """Return the seconds of a job's images. None: a GPU has no known speed.

    trainer, rollout  GPU of the trainer and of rollout nodes
    rows              rows of a training pass that fit; None: as many as the job asks for
    """
    if known_speed(trainer) is None or known_speed(rollout) is None:
        return None
    branches = branches_of(sized.architecture, is_guided=config.sampler.guidance != 1.0)
    steps, profile = config.sampler.steps, config.exploration.profiles[0]
    decoded = decode_seconds(sized.size, rollout)

    def sampled(count: int, images: int) -> float:
        return count * pass_seconds(sized, images, rollout, branches=branches) / images + decoded

    return JobSeconds(
        model=sized.model,
        rollout=sampled(steps, config.runtime.shape),
        candidate=sampled(min(steps, profile.steps or steps), profile.shape),
        train=rows_of_an_image(config) * _row_seconds(config, sized, trainer, branches, rows),
        sources=_sources(config, sized, trainer, rollout),
    )


def rows_of_an_image(config: EngineConfig) -> int:
    """Return the training rows of an image: its trained steps, or the noise levels at which the image is trained."""
    sampler, images = config.sampler, config.algorithm.image_training
    if images is not None:
        return images.levels.of_image(sampler.steps)
    return sampler.steps - 1 if sampler.window is None else sampler.window.size


def _row_seconds(config: EngineConfig, sized: SizedModel, gpu: str, branches: int, rows: int | None) -> float:
    """Return the seconds of a row in a training pass: with gradients, and without under other weights.

    The old policy computes every row where images are trained. Elsewhere, with adapters, it computes the rows
    after the first optimiser step of a batch (engine/algorithm/choice.py). A reference policy computes every row.
    """
    algorithm, is_full = config.algorithm, config.model.weights == "full"
    count = min(algorithm.rows_per_forward, rows or algorithm.rows_per_forward)
    trained = step_seconds(sized, count, gpu, branches=branches, is_full=is_full) / count
    updates = algorithm.updates_per_batch
    after_first_step = 0.0 if is_full else (updates - 1) / updates
    old = after_first_step if algorithm.image_training is None else 1.0
    reference = float(algorithm.keeps_reference)
    beside = unmerged_seconds(sized, 1, gpu, branches=branches) / (UNMERGED.value if is_full else 1.0)
    return trained + (old + reference) * beside


def _sources(config: EngineConfig, sized: SizedModel, trainer: str, rollout: str) -> tuple[tuple[str, Source], ...]:
    _, timings = rate(sized.model, sized.tokens)
    passes = STEP_PASSES.get(sized.model, STEP_PASSES_OTHERWISE)
    sources = [("passes", timing.source) for timing in timings]
    if sized.model in LIKE:
        rule = f"by a rule: {sized.model} computes as many operations a second as {LIKE[sized.model]}"
        sources.insert(0, ("passes", Source(basis="assumed", text=rule)))
    sources.append(("training", (STEP_PASSES_FULL if config.model.weights == "full" else passes).source))
    for gpu in dict.fromkeys((trainer, rollout)):
        speed = known_speed(gpu)
        if speed is not None and gpu.upper() != MEASURED_ON:
            sources.append((f"speed of {gpu}", speed.source))
    return tuple(sources)
