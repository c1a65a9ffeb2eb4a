"""Report a run's events and metrics."""

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.algorithm.health import Health
from engine.events import UNLEARNED, Evaluated, IterationDone, Phase, ProgressEvent, Warned
from engine.protocol.request import Manifest
from engine.storage.progress import ProgressLog
from engine.trainer.metrics import MetricsLog
from engine.trainer.rollouts import Rollouts
from engine.trainer.state import TrainerState
from engine.worker.usage import Usage


class Reporter:
    """Writes events under the run's current lineage, and figures to the metrics log."""

    def __init__(self, progress: ProgressLog, metrics: MetricsLog, state: TrainerState) -> None:
        self._progress = progress
        self._metrics = metrics
        self._state = state

    def write(self, event: ProgressEvent) -> None:
        self._progress.write(self._state.lineage, event)

    def warn(self, text: str) -> None:
        self.write(Warned(text=text))

    def evaluated(self, event: Evaluated) -> None:
        self.write(event)
        self._metrics.evaluation(event)

    def iteration_done(self, event: IterationDone) -> None:
        self.write(event)
        self._metrics.iteration(event)

    def flush(self) -> bool:
        """Return True once every event is on the disk."""
        return self._progress.flush()

    def close(self) -> None:
        """End the thread that writes metrics."""
        self._metrics.close()


class IterationReports:
    """Reports trained batches with their wall seconds, and the milliseconds of each phase of the trainer's process.

    Seconds after an iteration's report count towards the next iteration's report.
    """

    def __init__(
        self, reporter: Reporter, usage: Usage, *, ranks: int, possible_images_a_second: float | None = None
    ) -> None:
        """Begin without a batch. `ranks`: of the trainer.

        `possible_images_a_second`: of a GPU that computes at its peak all the time; None: not known.
        """
        self._possible = possible_images_a_second
        self._reporter = reporter
        self._usage, self._ranks = usage, ranks
        self._usage_before: dict[str, float] = {}
        self._begun = self._reported = 0.0
        self._unreported_seconds = 0.0

    def begin(self) -> None:
        self._begun = time.perf_counter() - self._unreported_seconds

    def report(
        self,
        manifest: Manifest,
        rewards: Tensor,
        explored: int,
        health: Sequence[Health],
        rollouts: Rollouts,
        schedule: Mapping[str, float],
        unlearned: int,
        other_ranks_ms: Mapping[str, float],
        gpus: int,
    ) -> None:
        """Report a trained batch. rewards [P, K]: rewards of the finite groups. `explored`: number of candidates.

        `schedule`: of the event. `unlearned`: batches in a row that taught nothing. `other_ranks_ms`: milliseconds of
        the other ranks by phase; empty: there are none, or they report no times. `gpus`: of trainer and workers.
        """
        stale_share = len(rollouts.early) / len(manifest.groups)
        spent = dict(self._usage.total)
        phase_ms = {phase: round(ms - self._usage_before.get(phase, 0.0)) for phase, ms in spent.items()}
        self._usage_before = spent
        self._reported = time.perf_counter()
        wall_seconds = self._reported - self._begun
        gpu_shares = gpu_time(phase_ms, wall_seconds * self._usage.ms_per_second, other_ranks_ms)
        done = IterationDone(
            iteration=manifest.batch,
            reward_mean=float(rewards.mean()) if len(rewards) else 0.0,
            reward_std=float(rewards.std(correction=0)) if len(rewards) else 0.0,
            group_std_mean=float(rewards.std(dim=1, correction=0).mean()) if len(rewards) else 0.0,
            explored=explored,
            manifest_digest=manifest.digest,
            phase_ms=phase_ms,
            wall_seconds=wall_seconds,
            health={
                **_merge(health),
                "staleness": stale_share,
                UNLEARNED: float(unlearned),
                **early_figures(stale_share, health),
                **gpu_shares,
                **throughput(sum(rollouts.made_by.values()), wall_seconds * gpus, self._possible),
            },
            made_by=dict(rollouts.made_by),
            scores=rollouts.metrics(),
            schedule=dict(schedule),
            ranks=self._ranks,
        )
        self._reporter.iteration_done(done)

    def end(self) -> None:
        self._unreported_seconds = time.perf_counter() - self._reported


def gpu_time(phase_ms: Mapping[str, float], whole_ms: float, others_ms: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of the time of all ranks' GPUs in which they neither sampled nor trained, by cause.

    phase_ms, whole_ms   rank 0's time by phase, and in all: the rest is idle
    others_ms            of the other ranks, added up; empty: no figures
    idle_gpu_share       nothing to sample or to train
    collective_gpu_share exchanging gradients and weights, and waiting for the slowest rank
    """
    if not others_ms:
        return {}
    own_idle = max(0.0, whole_ms - sum(ms for phase, ms in phase_ms.items() if phase != Phase.IDLE))
    whole = whole_ms + sum(others_ms.values())
    collective = phase_ms.get(Phase.COLLECTIVE, 0.0) + others_ms.get(Phase.COLLECTIVE, 0.0)
    return {
        "idle_gpu_share": (own_idle + others_ms.get(Phase.IDLE, 0.0)) / whole,
        "collective_gpu_share": collective / whole,
    }


def throughput(images: int, gpu_seconds: float, possible_images_a_second: float | None) -> dict[str, float]:
    """Return the images of a batch by the GPU time of its iteration.

    gpu_seconds               wall seconds of all GPUs, idle ones too
    possible_images_a_second  of a GPU at its peak; None: not known
    images_per_gpu_second     images that were sampled and trained
    mfu                       share of the GPUs' arithmetic that they used (engine/timing/utilisation.py), if known
    """
    rate = images / gpu_seconds if gpu_seconds > 0 else 0.0
    share = {} if possible_images_a_second is None else {"mfu": rate / possible_images_a_second}
    return {"images_per_gpu_second": rate, **share}


def early_figures(stale_share: float, health: Sequence[Health]) -> dict[str, float]:
    """Return the health of a batch's early groups. Empty without early groups.

    stale_share           share of the groups that were sampled one version early
    early_outside_share   share of their training rows outside the clip range; absent if all rewards were equal
    """
    if not stale_share:
        return {}
    outside = outside_share(health)
    return {"stale_share": stale_share, **({} if outside is None else {"early_outside_share": outside})}


def outside_share(health: Sequence[Health]) -> float | None:
    """Return the share of the training rows of early groups outside the clip range. None: no such row."""
    rows = sum(step.early_rows for step in health)
    return sum(step.early_outside for step in health) / rows if rows else None


BEFORE_UPDATE = {"dlogp_abs_mean": "dlogp_before_update", "velocity_change": "velocity_change_before_update"}
"""Health figures that compare the trained weights with the weights that made the rollouts, and their later names."""


def _merge(steps: Sequence[Health]) -> dict[str, float]:
    """Return the health of a batch: means over its optimiser steps, the largest `..._max`, the count of skipped groups.

    `rows_per_forward`: of the last step.

    `..._before_update`: a figure of the first step, whose rollouts were made with the same weights. The figure is then
    0, up to rounding.
    """
    summaries = [step.summary() for step in steps]
    merged = {name: sum(summary[name] for summary in summaries) / len(summaries) for name in summaries[0]}
    merged |= {name: max(summary[name] for summary in summaries) for name in merged if name.endswith("_max")}
    merged["rows_per_forward"] = summaries[-1]["rows_per_forward"]
    merged["skipped_groups"] = sum(summary["skipped_groups"] for summary in summaries)
    merged |= {later: summaries[0][name] for name, later in BEFORE_UPDATE.items() if name in merged}
    return merged
