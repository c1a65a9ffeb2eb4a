"""After which batches there is a checkpoint."""

from engine.config import EngineConfig
from engine.queue.pace import commit_interval

LONGEST_BATCHES = 64
"""Most batches between two checkpoints with `auto`: `spotrl pull` and a stand-in that is given back wait for one."""

ON_DEMAND_HOURS = 720.0
"""Assumed mean life of a node on demand: a machine fails once in a month."""


def batches_between(cost_ms: float, life_ms: float, work_ms: float) -> int:
    """Return the batches between two checkpoints with `auto` and full weights, from 1 to LONGEST_BATCHES.

    Milliseconds of a checkpoint, of the mean life of the trainer's node, and of a batch without its checkpoint.
    """
    return min(LONGEST_BATCHES, commit_interval(cost_ms, life_ms, max(1.0, work_ms)))


class Cadence:
    """Decides after which batches there is a checkpoint: every so many, or by `auto`; and after the run's last.

    With `auto` and full weights the interval is that of Young's formula, from the seconds of a batch and of a
    checkpoint since this trainer started, and the mean life of its node. The first batch after a start has a
    checkpoint, which measures both.
    """

    def __init__(self, config: EngineConfig, *, life_hours: float) -> None:
        """`life_hours`: mean life of the trainer's node, in hours of the engine's clock."""
        self._every, self._last = config.checkpoint.every, config.iterations
        self._is_cheap = config.model.weights == "lora"
        self._life_ms = life_hours * 3_600_000
        self._saved: int | None = None
        self._batches = 0
        self._work_ms = self._cost_ms = 0.0

    @property
    def longest(self) -> int:
        """Return the most batches between two checkpoints."""
        return LONGEST_BATCHES if self._every == "auto" else self._every

    def is_due(self, iteration: int) -> bool:
        """Return True if a checkpoint is due after batch `iteration`."""
        if iteration == self._last or (self._every == "auto" and (self._is_cheap or self._saved is None)):
            return True
        if self._every != "auto":
            return iteration % self._every == 0
        assert self._saved is not None
        return iteration - self._saved >= batches_between(self._cost_ms, self._life_ms, self._work_ms)

    def trained(self, iteration: int, work_ms: float, cost_ms: float | None) -> None:
        """Record the time of batch `iteration` without its checkpoint, and that of its checkpoint. None: it has none.

        Milliseconds of the engine's clock. The time of a batch is a mean over all, that of a checkpoint a moving
        average, because checkpoints are few.
        """
        self._batches += 1
        self._work_ms += (work_ms - self._work_ms) / self._batches
        if cost_ms is not None:
            self._cost_ms = 0.5 * (self._cost_ms + cost_ms) if self._saved is not None else cost_ms
            self._saved = iteration
