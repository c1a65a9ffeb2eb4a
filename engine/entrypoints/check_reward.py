"""Sample some images of a job, score them, and time both: `python -m engine.entrypoints.check_reward < REQUEST.json`.

    prompts of the first batch -> sampled like a worker's rollout -> scored -> a sheet, and one JSON line (`Found`)

The first image is scored alone: its time includes what a scorer does once, such as loading a model. The others are
timed. A paid judge is paid with real money, at most `max_usd` of the job; the bill is in the answer. Exit code 3:
{"field", "found", "remedy"}, like the check before a launch.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import cycle, islice
from math import isfinite
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor

from engine.config import EngineConfig
from engine.coordinator.judge_turns import JudgeTurns
from engine.diffusion.images import as_bytes
from engine.diffusion.sampler import denoise, rollout_plan
from engine.entrypoints.preflight import JobUnfit
from engine.entrypoints.prompt_warnings import prompt_warnings
from engine.models.load import load_adapter, load_start, trainable
from engine.prompts import prompt_source
from engine.protocol.messages import PaidCall
from engine.protocol.request import Score
from engine.reward_config import RewardConfig
from engine.rewards.load import load_reward_of_job
from engine.rewards.purse import BudgetUsedUp
from engine.rewards.reward import Reward, RewardError
from engine.rewards.scorable import scores_of
from engine.strict import Strict
from engine.trainer.evaluation import contact_sheet
from engine.worker.device import device_of


class CheckRequest(Strict):
    """Order to check the reward of a job."""

    engine: EngineConfig
    workdir: Path
    start: Path | None
    """Weights to start from; None: the base model."""
    images: Annotated[int, Field(ge=2)]
    sheet: Path
    """PNG to write."""


class ScoredImage(msgspec.Struct, frozen=True):
    """`reward`: None if the image has no score."""

    prompt: str
    seed: int
    reward: float | None
    metrics: dict[str, float | None]


class Found(msgspec.Struct, frozen=True):
    """Result of a check. Times are wall milliseconds of one image."""

    images: list[ScoredImage]
    device: str
    sampling_ms: float
    """Of an image, sampled `shape` at a time; decoding included."""
    shape: int
    first_score_ms: float
    """Of the first image, with what a scorer does once."""
    score_ms: float
    """Of each later image, all scored in one call."""
    judge_micro_usd: int
    """What the paid judges charged for all images."""
    warnings: list[str] = []
    """Sentences about prompts that the model or the reader cannot take whole."""


class Till:
    """A purse for a check: it holds at most the job's budget of judges, and adds the bills up."""

    def __init__(self, micro_usd: int) -> None:
        self._left, self.paid, self._holds = micro_usd, 0, 0
        self._held: dict[int, int] = {}
        """Held money by the number of the hold."""
        self._lock = threading.Lock()
        self._turns = JudgeTurns()

    def turn(self, judge: str, gap_seconds: float) -> float:
        with self._lock:
            return self._turns.take(judge, gap_seconds)

    def hold(self, micro_usd: int, *, wait: bool) -> int | None:
        with self._lock:
            if micro_usd > self._left:
                raise BudgetUsedUp(
                    f"the check may cost ${micro_usd / 1e6:g}, and ${self._left / 1e6:g} of max_usd is left"
                )
            self._left -= micro_usd
            self._holds += 1
            self._held[self._holds] = micro_usd
            return self._holds

    def bill(self, hold: int, calls: Sequence[PaidCall]) -> None:
        with self._lock:
            if hold in self._held:
                cost = sum(call.micro_usd for call in calls)
                self._left += self._held.pop(hold) - cost
                self.paid += cost


def check_reward(request: CheckRequest) -> Found:
    """Sample, score, time and write the sheet. Raises JobUnfit for a job that cannot be sampled or scored."""
    config, workdir = request.engine, str(request.workdir)
    device = device_of(config.runtime.device, 0)
    try:
        source = prompt_source(config, workdir)
        prompts = list(islice(cycle(source.batch(0)), request.images))
        warnings = prompt_warnings(config, source)
        adapter = load_adapter(config.model, device)
        if request.start is not None:
            load_start(trainable(adapter), request.start.read_bytes())
    except (ValueError, OSError, KeyError) as error:
        raise JobUnfit("model", str(error), "`spotrl launch JOB --dry-run` names the field") from error
    plan, seeds = rollout_plan(config.sampler, config.seed, 0, adapter.schedule), list(range(request.images))
    shape = min(config.runtime.shape, request.images)
    parts, sampling_seconds, sampled = [], 0.0, 0
    with torch.no_grad():
        for first in range(0, request.images, shape):
            begun = time.perf_counter()
            some = slice(first, first + shape)
            parts.append(adapter.decode(denoise(adapter, plan, adapter.encode(prompts[some]), seeds[some])).cpu())
            if first or request.images <= shape:  # the first pass warms up, if there is another
                sampling_seconds += time.perf_counter() - begun
                sampled += len(parts[-1])
    images = torch.cat(parts)
    till = Till(config.reward.judge_micro_usd)
    begun = time.perf_counter()
    try:
        reward = load_reward_of_job(config, workdir, device=device, purse=till)
        scores = _in_time(config.reward, reward, images[:1], prompts[:1])
        loaded = time.perf_counter()
        scores += _in_time(config.reward, reward, images[1:], prompts[1:])
    except RewardError as error:
        raise JobUnfit("reward", str(error), "see docs/rewards.md for what this reward needs") from error
    score_seconds = (time.perf_counter() - loaded) / (request.images - 1)
    request.sheet.parent.mkdir(parents=True, exist_ok=True)
    request.sheet.write_bytes(sheet_of(images, prompts, scores))
    return Found(
        images=[_scored(*result) for result in zip(prompts, seeds, scores, strict=True)],
        device=device,
        sampling_ms=1000 * sampling_seconds / sampled,
        shape=shape,
        first_score_ms=1000 * (loaded - begun),
        score_ms=1000 * score_seconds,
        judge_micro_usd=till.paid,
        warnings=warnings,
    )


def _in_time(config: RewardConfig, reward: Reward, images: Tensor, prompts: Sequence[str]) -> list[Score]:
    """Score like a worker: within the reward's time limit, and without a score for images that are not finite.

    Raises JobUnfit if the scorer does not return. Its thread then runs on until this process ends.
    """
    pool = config.scoring_pool
    seconds = pool.timeout_seconds if pool is not None else config.limit_seconds(len(prompts))
    answer: Future[list[Score]] = Future()

    def score() -> None:
        try:
            answer.set_result(scores_of(reward, images, prompts))
        except BaseException as error:  # raised again by `result`
            answer.set_exception(error)

    threading.Thread(target=score, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():
            raise  # the scorer's own
        setting = "reward.timeout_seconds" if pool is None else "reward.pool.timeout_seconds"
        raise JobUnfit(
            "reward",
            f"{config.label} gave no score for {len(prompts)} images in {seconds:g} s, first {prompts[0]!r}",
            f"see what the scorer waits for; if it is only slow, raise {setting}",
        ) from None


def sheet_of(images: Tensor, prompts: Sequence[str], scores: Sequence[Score]) -> bytes:
    """Return a PNG with the images under their scores and prompts."""
    captions = [f"{score.reward:.3f}  {prompt}" for score, prompt in zip(scores, prompts, strict=True)]
    pictures = [save({"picture": as_bytes(image)}) for image in images]
    return contact_sheet(list(zip(captions, pictures, strict=True)))


def _scored(prompt: str, seed: int, score: Score) -> ScoredImage:
    def finite(value: float) -> float | None:
        return value if isfinite(value) else None

    metrics = {name: finite(value) for name, value in score.metrics.items()}
    return ScoredImage(prompt=prompt, seed=seed, reward=finite(score.reward), metrics=metrics)


def main() -> int:
    torch.set_num_threads(1)
    try:
        result = check_reward(CheckRequest.model_validate_json(sys.stdin.read()))
    except JobUnfit as unfit:
        print(json.dumps({"field": unfit.field, "found": unfit.found, "remedy": unfit.remedy}))
        return 3
    print(msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a scorer that does not return keeps its threads, for which Python would wait
