"""Record the rewards of many seeds of the same prompts, sampled with a task's shipped base.

    python -m tests.benchmarks.record_rewards --task digits-ocr

Writes `tests/data/rewards/TASK.csv` (prompt, seed, graded, strict), which the planner benchmark replays. The
rollouts are those of the task's job file: its sampler, its reward, counter-based noise; seeds and prompts are those of
a run's first batch.
"""

import argparse
import csv
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.diffusion.sampler import Plan, denoise, rollout_plan
from engine.models.load import load_adapter, trainable
from engine.models.weights import get_weights
from engine.prompts import prompt_source
from engine.protocol.request import Score, Stream, seed_of
from engine.rewards.load import load_reward
from engine.versions import installed_versions
from launcher.job.load import load_job
from tests.benchmarks.page import ROOT

REWARDS = ROOT / "tests/data/rewards"
JOBS = {"digits-ocr": "tests/benchmarks/learning.yaml", "shapes": "sky_yamls/shapes.yaml"}
PROMPTS = 36
"""Three rounds of the mix of shapes."""
SEEDS = 64
AT_ONCE = 48
"""Images per forward pass."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Graded and strict rewards of the same seeds, [prompts, seeds] each."""

    graded: Matrix
    strict: Matrix


class Task:
    """A built-in task as its job file has it: the shipped base, its sampler and its reward, in this process."""

    def __init__(self, name: str) -> None:
        self.config: EngineConfig = load_job(ROOT / JOBS[name]).job.engine()
        self.adapter = load_adapter(self.config.model)
        self.parameters = trainable(self.adapter)
        self.reward = load_reward(self.config.reward, None)

    def prompts(self, batch: int, count: int) -> list[str]:
        """Return the prompts of a training batch of this size."""
        algorithm = self.config.algorithm.model_copy(update={"prompts_per_batch": count})
        return prompt_source(self.config.model_copy(update={"algorithm": algorithm}), None).batch(batch)

    def seeds(self, batch: int, prompts: Sequence[str], count: int) -> list[list[int]]:
        """Return the first candidates of each prompt, [prompts, count]."""
        return [
            [seed_of(self.config.seed, Stream.TRAIN, batch, prompt, index) for index in range(count)]
            for prompt in prompts
        ]

    def rewards(
        self, plan: Plan, prompts: Sequence[str], seeds: Sequence[Sequence[int]], at_once: int = AT_ONCE
    ) -> Rewards:
        """Roll out every seed of every prompt with the weights as they are. seeds: [prompts, S]"""
        pairs = [(prompt, seed) for prompt, some in zip(prompts, seeds, strict=True) for seed in some]
        scores = [
            score for start in range(0, len(pairs), at_once) for score in self._score(plan, pairs[start:][:at_once])
        ]
        graded = np.array([score.reward for score in scores]).reshape(len(prompts), -1)
        strict = np.array([score.metrics["exact_match"] for score in scores]).reshape(len(prompts), -1)
        return Rewards(graded=graded, strict=strict)

    def _score(self, plan: Plan, pairs: Sequence[tuple[str, int]]) -> Sequence[Score]:
        prompts, seeds = zip(*pairs, strict=True)
        latents = denoise(self.adapter, plan, self.adapter.encode(prompts), seeds)
        return self.reward(self.adapter.decode(latents), prompts)


def recording(name: str, prompts: int, seeds: int) -> str:
    """Return the text of the file: comments with its origin, and the rewards."""
    task = Task(name)
    plan = rollout_plan(task.config.sampler, task.config.seed, 0)
    pairs = task.prompts(0, prompts)
    drawn = task.seeds(0, pairs, seeds)
    begun = time.perf_counter()
    found = task.rewards(plan, pairs, drawn)
    took = time.perf_counter() - begun
    versions = ", ".join(f"{package} {version}" for package, version in installed_versions().items())
    weights = blake2b(get_weights(task.parameters), digest_size=8).hexdigest()
    file = io.StringIO()
    file.write(
        f"# python -m tests.benchmarks.record_rewards --task {name} --prompts {prompts} --seeds {seeds}\n"
        f"# measured {time.strftime('%Y-%m-%d')} in {took:.0f} s on a CPU: {prompts} prompts of batch 0 x {seeds} "
        f"seeds (index 0 on) of run seed {task.config.seed}\n"
        f"# shipped base (weights {weights}), sampler {plan.signature} of {JOBS[name]}, "
        f"reward {task.config.reward.name}; strict is its exact_match\n"
        f"# {versions}\n"
    )
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(["prompt", "seed", "graded", "strict"])
    for prompt, some, graded, strict in zip(pairs, drawn, found.graded, found.strict, strict=True):
        rows.writerows((prompt, s, f"{g:.6g}", f"{e:g}") for s, g, e in zip(some, graded, strict, strict=True))
    return file.getvalue()


def read_rewards(path: Path) -> dict[str, Matrix]:
    """Return `graded` and `strict` of a recording, [prompts, seeds], cut to the smallest count of finite rewards."""
    found: dict[str, dict[str, list[float]]] = {"graded": {}, "strict": {}}
    with path.open(newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            for column, by_prompt in found.items():
                reward = float(row[column])
                if np.isfinite(reward):
                    by_prompt.setdefault(row["prompt"], []).append(reward)
    return {
        column: np.array([rewards[: min(map(len, by_prompt.values()))] for rewards in by_prompt.values()])
        for column, by_prompt in found.items()
        if by_prompt
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=list(JOBS), required=True)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    REWARDS.mkdir(parents=True, exist_ok=True)
    path = REWARDS / f"{options.task}.csv"
    path.write_text(recording(options.task, options.prompts, options.seeds))
    for column, matrix in read_rewards(path).items():
        print(f"{path.name} {column}: {matrix.shape}, mean {matrix.mean():.3f}, spread {matrix.std(axis=1).mean():.3f}")


if __name__ == "__main__":
    main()
