"""Stop a rank of a trainer's node at a chosen point: in the middle of a step, of a checkpoint or of a publish.

A test puts stops into the environment of an agent that the nursery forks (`STOPS`). The first time that the rank comes
to the point of a stop, the rank leaves a file and sends itself the signal. The next stop of the list counts from then
on, so every stop happens once and in order. Only ranks that started after the stop before come to the next one, and
they save a batch first, because a node whose processes die without progress gives up.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STOPS = "SPOTRL_TEST_RANK_STOPS"
"""Variable of the environment: the stops, as JSON."""

POINTS = ("step", "checkpoint", "publish")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A signal to a rank, at a point of POINTS."""

    rank: int
    point: str
    signal: int

    @property
    def words(self) -> str:
        return f"{signal.Signals(self.signal).name} of rank {self.rank} in the middle of a {self.point}"


def environment(folder: Path, stops: Sequence[Stop]) -> dict[str, str]:
    """Return the environment that plants the stops. `folder`: of the files that say which stops happened."""
    folder.mkdir()
    return {STOPS: json.dumps({"folder": str(folder), "stops": [asdict(stop) for stop in stops]})}


def happened(folder: Path) -> dict[int, float]:
    """Return the stops that happened by place in the list, with the time of their file."""
    return {int(file.name): file.stat().st_mtime for file in folder.iterdir()}


def plant(env: Mapping[str, str]) -> None:
    """Plant the stops of the environment into this process and its forks: full weights, divided over ranks."""
    if STOPS not in env:
        return
    # Import here only: the nursery has imported these modules, and another process needs none of them.
    from engine.algorithm.lockstep import LockstepPasses
    from engine.trainer.shards import Shard

    planted = json.loads(env[STOPS])
    folder, stops = Path(planted["folder"]), [Stop(**stop) for stop in planted["stops"]]

    trained, begun = 0, 0.0

    def follow(self: Shard, decay: float) -> None:
        nonlocal trained, begun
        if trained == 0:
            begun = time.time()
        trained += 1
        plain_follow(self, decay)

    def come(rank: int, point: str) -> None:
        before = happened(folder)
        number = len(before)
        if trained < (1 if point == "step" else 2) or begun < max(before.values(), default=0.0):
            return
        if number < len(stops) and (stops[number].rank, stops[number].point) == (rank, point):
            (folder / str(number)).touch()
            os.kill(os.getpid(), stops[number].signal)

    def before(call: Callable[..., Any], point: Callable[..., str | None]) -> Callable[..., Any]:
        def stopping(self: Any, *arguments: Any, **named: Any) -> Any:
            found = point(*arguments)
            if found is not None:
                come(_rank_of(self), found)
            return call(self, *arguments, **named)

        return stopping

    plain_follow = Shard.follow
    Shard.follow = follow  # type: ignore[method-assign]
    # A step: between two gradients. A checkpoint: the moments. A publish: the weights that make the next rollouts.
    Shard.give = before(  # type: ignore[method-assign]
        Shard.give, lambda order: {"moments": "checkpoint", "old": "publish"}.get(order.part)
    )
    LockstepPasses._pass = before(LockstepPasses._pass, lambda *_: "step")  # type: ignore[method-assign]


def _rank_of(_: Any) -> int:
    import torch.distributed as dist

    return dist.get_rank()
