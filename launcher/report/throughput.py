"""Images per GPU-second, and the share of the GPUs' arithmetic that a run used (MFU), in all and by phase.

GPU-seconds are those that were paid, on the run's clock. Images are the trained ones, once for each iteration: images
that were sampled again, candidates and evaluations take GPU-seconds and count for nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import SHIPPED
from engine.events import Phase
from engine.memory.job import sized_model
from engine.timing.utilisation import peak_of, rollout_operations, training_operations
from launcher.job.schema import Job
from launcher.ledger.accounting import NodeCost
from launcher.ledger.models import Node, Run

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Images by GPU time. `mfu` is None where the GPU's peak or the model's operations are not known."""

    gpu_seconds: float
    images_per_gpu_second: float
    mfu: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Trained images and the GPU time of all nodes, failed starts included."""

    images: int
    run: Rate
    phases: Mapping[str, Rate]
    """Rollouts and training alone: the GPU time that nodes reported as that phase."""


def throughput_of(
    run: Run, iterations: Sequence[Event], costs: Sequence[NodeCost], nodes: Sequence[Node], devices: str
) -> Throughput | None:
    """Return the throughput of a run, or None before its first trained iteration.

    iterations  IterationDone events, one for each iteration
    devices     of the trainer's last start; without a CUDA device there is no MFU
    """
    images = sum(sum(event.get("made_by", {}).values()) for event in iterations)
    by_name = {node.name: node for node in nodes}
    if not images or not any(cost.ms for cost in costs):
        return None
    rollout, training = _operations(run) if "cuda" in devices else (0, 0)

    def rate(ms: Mapping[str, float], operations: int) -> Rate:
        seconds = {name: part * by_name[name].gpus / 1000 for name, part in ms.items()}
        peaks = {name: peak_of(by_name[name].accelerator) for name, part in seconds.items() if part}
        possible = sum(seconds[name] * (peak or 0.0) for name, peak in peaks.items())
        whole = sum(seconds.values())
        return Rate(
            gpu_seconds=whole,
            images_per_gpu_second=images / whole if whole else 0.0,
            mfu=images * operations / possible if operations and possible and all(peaks.values()) else None,
        )

    phases = {
        phase.value: rate({cost.node: cost.phase_ms.get(phase.value, 0) for cost in costs}, operations)
        for phase, operations in ((Phase.ROLLOUT, rollout), (Phase.TRAINING, training))
    }
    return Throughput(
        images=images,
        run=rate({cost.node: cost.ms for cost in costs}, rollout + training),
        phases={name: part for name, part in phases.items() if part.gpu_seconds},
    )


def _operations(run: Run) -> tuple[int, int]:
    """Return the operations of one image's rollout and training. Zeros: they are not known."""
    if run.model.name in SHIPPED:
        return 0, 0
    try:
        config, sized = Job.model_validate(run.job).engine(), sized_model(run.model)
    except ValueError:  # a job of an older version, or a model whose sizes are not known here
        return 0, 0
    return rollout_operations(config, sized), training_operations(config, sized)


def throughput_words(throughput: Throughput | None) -> str:
    """Return a sentence on the throughput; empty before the first trained iteration."""
    if throughput is None:
        return ""
    parts = [f"{throughput.run.images_per_gpu_second:.3g} images a GPU-second{_used(throughput.run)}"]
    parts += [
        f"{phase} alone {rate.images_per_gpu_second:.3g}{_used(rate)}" for phase, rate in throughput.phases.items()
    ]
    return f"Throughput: {'; '.join(parts)}, over {throughput.images} trained images."


def _used(rate: Rate) -> str:
    return "" if rate.mfu is None else f" (MFU {rate.mfu:.1%})"
