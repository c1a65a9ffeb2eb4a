"""Disturb a rank of a trainer at a chosen point of its sampling, or let only rank 0 sample.

    lease       before the rank asks for a lease
    denoise     between two denoising steps
    score       while the images of a lease are scored
    order       when an order of rank 0 has arrived, before the rank obeys
    collective  before the gradients are added; with full weights, before the passes that all ranks make together

A test puts stops into the environment of an agent that the nursery forks (`STOPS`). The first time that the rank comes
to the point of a stop, it leaves a file, and kills or freezes itself, or has an out-of-memory error. The next stop of
the list counts from then on. Only ranks that got two versions since their start come to a stop, so a batch is saved
between two stops: a node whose processes die without progress gives up.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STOPS = "SPOTRL_TEST_SAMPLING_STOPS"
"""Variable of the environment: the stops, as JSON."""

ALONE = "SPOTRL_TEST_RANK_0_SAMPLES_ALONE"
"""Variable of the environment: set if the other ranks do not sample."""

DELAYS = "SPOTRL_TEST_RANK_DELAYS"
"""Variable of the environment: a file for the time from an order's arrival at a sampling rank until it obeys."""

OUT_OF_MEMORY = 0
"""Instead of a signal: torch raises its out-of-memory error."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A disturbance of rank 1: a signal, or OUT_OF_MEMORY."""

    point: str
    signal: int


STOPPED = tuple(
    Stop(point=point, signal=number)
    for point in ("lease", "denoise", "score", "order", "collective")
    for number in (signal.SIGKILL, signal.SIGSTOP)
)
NO_MEMORY = tuple(Stop(point=point, signal=OUT_OF_MEMORY) for point in ("score", "denoise"))


def environment(folder: Path, stops: Sequence[Stop]) -> dict[str, str]:
    """Return the environment that plants the stops. `folder`: of the files that say which stops happened."""
    folder.mkdir()
    return {STOPS: json.dumps({"folder": str(folder), "stops": [asdict(stop) for stop in stops]})}


def happened(folder: Path) -> list[int]:
    """Return the places of the stops that happened."""
    return sorted(int(file.name) for file in folder.iterdir())


def plant(env: Mapping[str, str]) -> None:
    """Plant the stops of the environment into this process and its forks."""
    if ALONE in env:
        _let_rank_0_sample_alone()
    if DELAYS in env:
        _log_delays(Path(env[DELAYS]))
    if STOPS not in env:
        return
    # Import here only: the nursery has imported these modules, and another process needs none of them.
    import torch

    from engine.algorithm.lockstep import LockstepPasses
    from engine.trainer import ranks
    from engine.trainer.rank_sampling import RankSampler
    from engine.trainer.shards import ShardFollower
    from engine.worker.sampling import ImageSampler
    from engine.worker.scoring import ImageScorer

    planted = json.loads(env[STOPS])
    folder, stops = Path(planted["folder"]), [Stop(**stop) for stop in planted["stops"]]
    versions = set()

    def published(self: RankSampler, key: Any, digest: str) -> None:
        versions.add(key)
        plain_published(self, key, digest)

    def come(point: str) -> None:
        number = len(happened(folder))
        if len(versions) < 2 or number >= len(stops) or stops[number].point != point:
            return
        (folder / str(number)).touch()
        if stops[number].signal == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError("planted: out of memory")
        os.kill(os.getpid(), stops[number].signal)

    def before(call: Callable[..., Any], point: str) -> Callable[..., Any]:
        def stopping(*arguments: Any, **named: Any) -> Any:
            come(point)  # rank 0 and rollout workers get no `published` call, so they never stop
            return call(*arguments, **named)

        return stopping

    plain_published = RankSampler.published
    RankSampler.published = published  # type: ignore[method-assign]
    RankSampler.sample = before(RankSampler.sample, "lease")  # type: ignore[method-assign]
    ImageSampler._record = before(ImageSampler._record, "denoise")  # type: ignore[method-assign]
    ImageScorer.decode = before(ImageScorer.decode, "score")  # type: ignore[method-assign]
    ranks.Follower._carry_out = before(ranks.Follower._carry_out, "order")  # type: ignore[method-assign]
    ranks._sum_gradients = before(ranks._sum_gradients, "collective")
    ShardFollower._carry_out = before(ShardFollower._carry_out, "order")  # type: ignore[method-assign]
    LockstepPasses.train = before(LockstepPasses.train, "collective")  # type: ignore[method-assign]


def _let_rank_0_sample_alone() -> None:
    from engine.trainer.rank_sampling import RankSampler

    RankSampler.sample = lambda self, is_called: False  # type: ignore[method-assign]


def _log_delays(file: Path) -> None:
    """Log a JSON line [kind of order, seconds, denoising steps] for each order that arrives while the rank samples.

    The steps are those that ended meanwhile. Left out: orders for which no other rank waits (`_can_wait`), and orders
    that came before the rank had obeyed the last one: they wait for that work, not for sampling.
    """
    from engine.parallel.rank_group import RankGroup
    from engine.trainer.rank_sampling import RankSampler
    from engine.trainer.ranks import Follower
    from engine.trainer.shards import ShardFollower
    from engine.worker.sampling import ImageSampler

    arrived: list[tuple[float, bool, int]] = []
    samples, steps = False, 0

    def receive(self: RankGroup, rank: int, *, idle: bool = False) -> bytes:
        message = plain_receive(self, rank, idle=idle)
        if idle:
            arrived.append((time.monotonic(), samples, steps))
        return message

    def sample(self: RankSampler, is_called: Callable[[], bool]) -> bool:
        nonlocal samples
        samples = True
        try:
            return plain_sample(self, is_called)
        finally:
            samples = False

    def record(self: ImageSampler, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return plain_record(self, *arguments)

    def logged(carry_out: Callable[..., None]) -> Callable[..., None]:
        def carry_out_and_log(self: Any, order: Any) -> None:
            nonlocal number, done_at
            at, sampled, steps_before = arrived[number]
            number += 1
            if sampled and at > done_at and not self._can_wait(order):
                with file.open("a") as log:
                    log.write(json.dumps([type(order).__name__, time.monotonic() - at, steps - steps_before]) + "\n")
            carry_out(self, order)
            done_at = time.monotonic()

        return carry_out_and_log

    number, done_at = 1, 0.0  # the first message is `Start`
    plain_receive, plain_sample, plain_record = RankGroup.receive, RankSampler.sample, ImageSampler._record
    RankGroup.receive = receive  # type: ignore[method-assign]
    RankSampler.sample = sample  # type: ignore[method-assign]
    ImageSampler._record = record  # type: ignore[method-assign]
    for follower in (Follower, ShardFollower):
        follower._carry_out = logged(follower._carry_out)  # type: ignore[method-assign]
