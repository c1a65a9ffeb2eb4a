"""Stop the trainer's process at a chosen point of a batch with early groups, and log the groups that it trains.

    draft    after the draft is durable, before its first rollout
    commits  between the two optimiser steps of a batch with early groups
    help     between two denoising steps of the trainer's own rollouts
    publish  after a checkpoint with early groups, before the next weights are published

A test puts stops into the environment of an agent that the nursery forks (`STOPS`). The first time that the trainer
comes to the point of a stop, it leaves a file and sends itself the signal. The next stop of the list counts from then
on. A restarted trainer saves a batch before it stops again, because a node whose processes die without progress gives
up. All trained groups are logged to a file.
"""

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STOPS = "SPOTRL_TEST_TRAINER_STOPS"
"""Variable of the environment: the stops, as JSON."""

POINTS = ("draft", "commits", "help", "publish")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A signal to the trainer, at a point of POINTS."""

    point: str
    signal: int


@dataclass(frozen=True, kw_only=True)
class TrainedGroup:
    """A group of an optimiser step that was taken, in the order of the steps."""

    batch: int
    number: int
    prompt: str
    seeds: tuple[int, ...]
    is_early: bool


def environment(folder: Path, stops: Sequence[Stop]) -> dict[str, str]:
    """Return the environment that plants the stops. `folder`: of the log, and of the files of stops that happened."""
    (folder / "happened").mkdir(parents=True)
    return {STOPS: json.dumps({"folder": str(folder), "stops": [asdict(stop) for stop in stops]})}


def happened(folder: Path) -> int:
    """Return the number of stops that happened."""
    return len(list((folder / "happened").iterdir()))


def trained_groups(folder: Path) -> list[TrainedGroup]:
    """Return the groups of all optimiser steps. A step whose trainer died before the checkpoint is there twice."""
    lines = [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]
    return [TrainedGroup(**{**line, "seeds": tuple(line["seeds"])}) for line in lines]


def plant(env: Mapping[str, str]) -> None:
    """Plant the stops of the environment into this process and its forks."""
    if STOPS not in env:
        return
    # Import here only: the nursery has imported these modules, and another process needs none of them.
    from engine.algorithm.transaction import Transaction
    from engine.trainer.checkpoints import Checkpoints
    from engine.trainer.loop import Loop
    from engine.trainer.rollouts import Rollouts

    planted = json.loads(env[STOPS])
    folder, stops = Path(planted["folder"]), [Stop(**stop) for stop in planted["stops"]]
    saved = 0

    def come(point: str) -> None:
        number = happened(folder)
        if saved and number < len(stops) and stops[number].point == point:
            (folder / "happened" / str(number)).touch()
            os.kill(os.getpid(), stops[number].signal)

    def save(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal saved
        plain_save(self, *arguments, **named)
        saved += 1

    def put_draft(self: Any, draft: Any) -> None:
        plain_put_draft(self, draft)
        come("draft")

    def commit(self: Any) -> Any:
        health = plain_commit(self)
        _log(folder, self)
        if self._manifest.early and self._step == self._manifest.minibatches[0]:
            come("commits")
        return health

    def help_(self: Any, stop: Callable[[], bool]) -> bool:
        def stopping() -> bool:
            come("help")
            return stop()

        return plain_help(self, stopping)

    def publish(self: Any, file: Any) -> None:
        if self.state.next_batch.early:
            come("publish")
        plain_publish(self, file)

    plain_save, plain_put_draft, plain_commit = Checkpoints.save, Checkpoints.put_draft, Transaction.commit
    plain_help, plain_publish = Rollouts.help, Loop._publish
    Checkpoints.save = save  # type: ignore[method-assign]
    Checkpoints.put_draft = put_draft  # type: ignore[method-assign]
    Transaction.commit = commit  # type: ignore[method-assign]
    Rollouts.help = help_  # type: ignore[method-assign]
    Loop._publish = publish  # type: ignore[method-assign]


def _log(folder: Path, step: Any) -> None:
    with (folder / "trained.jsonl").open("a") as file:
        for number, group in step._groups.items():
            trained = TrainedGroup(
                batch=step._manifest.batch,
                number=number,
                prompt=group.prompt,
                seeds=group.seeds,
                is_early=group.is_early,
            )
            file.write(json.dumps(asdict(trained)) + "\n")


KILL, FREEZE = signal.SIGKILL, signal.SIGSTOP
EVERY_POINT = [
    Stop(point=point, signal=number)
    for signals in ((KILL, FREEZE, KILL, FREEZE), (FREEZE, KILL, FREEZE, KILL))
    for point, number in zip(POINTS, signals, strict=True)
]
"""Both signals at every point, one after the other."""
