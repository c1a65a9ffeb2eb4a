"""Score some images of a job on this machine, and estimate what scoring costs the run.

The engine samples, scores and times (engine/entrypoints/check_reward.py). Here the times become a verdict: workers
score beside sampling, so scoring costs node time only if it takes longer than sampling.
"""

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launcher.checks.preflight import answer_of_engine
from launcher.engine_process import engine_command
from launcher.job.checked import CheckedJob
from launcher.job.schema import Job
from launcher.money import HOUR_MS

MOST_LINES = 3
"""Lines of the scorer that are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardCheck:
    """Scores of some images, the times of an image in wall milliseconds on this machine, and the estimate of a run."""

    images: list[dict[str, Any]]
    """Prompt, seed, reward and metrics of each image. A reward or metric is null if there is none."""
    printed: list[str]
    """Last lines that the scorer printed, such as the last answer of a server without a score."""
    sheet: str
    device: str
    """Device that sampled, such as `cpu`."""
    sampling_ms: float
    """Sampling and decoding of an image."""
    first_score_ms: float
    """Scoring of the first image, with what the scorer does once, such as loading a model."""
    score_ms: float
    """Scoring of a later image."""
    bottleneck: Literal["sampling", "scoring"]
    """`scoring`: a worker waits for scores. With a pool, its processes share the work."""
    judge_micro_usd: int
    """Bill of the paid judges for these images. It is spent."""
    run_images: int
    """Trained images of the whole run, without evaluations and exploration."""
    run_judge_micro_usd: int
    """Estimate of the judges' bill for `run_images`. The run stops at the judges' budget."""
    run_node_micro_usd: int | None
    """Estimate of the rollout nodes' price while they wait for scores, at the speed of this machine. Null on the local
    infra, which buys nothing."""
    warnings: list[str] = field(default_factory=list)
    """Sentences about prompts of the run that the model or the OCR reader cannot take whole."""

    @property
    def unscored(self) -> int:
        """Return the number of images without a score."""
        return sum(image["reward"] is None for image in self.images)


def score_some(
    checked: CheckedJob, *, images: int, sheet: Path, start: Path | None, micro_usd_per_gpu_hour: float | None
) -> RewardCheck:
    """Score images of the job. `start`: the file with the start weights. Raises JobError and Failure.

    `micro_usd_per_gpu_hour`: price of a rollout GPU; None on the local infra.
    """
    job = checked.job
    request = {
        "engine": job.engine().model_dump(mode="json"),
        "workdir": str(checked.workdir),
        "start": None if start is None else str(start),
        "images": images,
        "sheet": str(sheet),
    }
    command = engine_command("engine.entrypoints.check_reward")
    done = subprocess.run(
        command,
        input=json.dumps(request),
        cwd=checked.workdir,
        capture_output=True,
        text=True,
        errors="replace",  # a reward may print any bytes
        check=False,
    )
    answer = answer_of_engine(checked, done)
    printed = done.stdout.strip().splitlines()[:-1][-MOST_LINES:]
    return estimate(job, answer, printed, sheet, micro_usd_per_gpu_hour)


def estimate(
    job: Job, answer: dict[str, Any], printed: list[str], sheet: Path, micro_usd_per_gpu_hour: float | None
) -> RewardCheck:
    """Return the check with its verdict and its estimate of the run. `answer`: the engine's answer."""
    pool = job.reward.scoring_pool
    share = 1.0 if pool is None else job.rollout_workers / pool.processes  # the workers of a node share its processes
    waits_ms = answer["score_ms"] * share - answer["sampling_ms"]
    run_images = job.iterations * job.algorithm.prompts_per_batch * job.algorithm.images_per_prompt
    node = None
    if micro_usd_per_gpu_hour is not None:
        node = round(micro_usd_per_gpu_hour * max(0.0, waits_ms) * run_images / HOUR_MS)
    return RewardCheck(
        images=answer["images"],
        warnings=answer["warnings"],
        printed=printed,
        sheet=str(sheet),
        device=answer["device"],
        sampling_ms=answer["sampling_ms"],
        first_score_ms=answer["first_score_ms"],
        score_ms=answer["score_ms"],
        bottleneck="scoring" if waits_ms > 0 else "sampling",
        judge_micro_usd=answer["judge_micro_usd"],
        run_images=run_images,
        run_judge_micro_usd=round(answer["judge_micro_usd"] * run_images / len(answer["images"])),
        run_node_micro_usd=node,
    )
