"""Training metrics for people and their tools: JSON lines always, TensorBoard events if TensorBoard is installed.

No decision depends on the metrics. A full disk may delay or lose some metrics and stops no process.
"""

import contextlib
import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.events import Evaluated, IterationDone


class MetricsLog:
    """Appends to `metrics.jsonl` in a folder, and to TensorBoard's event files beside the file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a")
        self._board: Any = None
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def iteration(self, done: IterationDone) -> None:
        self._write({"kind": done.KIND, **asdict(done)})
        numbers = {"reward/mean": done.reward_mean, "reward/group_std": done.group_std_mean}
        numbers |= {f"rollouts/{k}": v for k, v in done.scores.items()}
        self._scalars(numbers | {f"health/{k}": v for k, v in done.health.items()}, done.iteration)

    def evaluation(self, evaluated: Evaluated) -> None:
        self._write({"kind": evaluated.KIND, **asdict(evaluated)})
        self._scalars({f"evaluation/{k}": v for k, v in evaluated.metrics.items()}, evaluated.iteration)

    def close(self) -> None:
        """End TensorBoard's thread, after it has written its queue. A later metric opens a new event file."""
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()

    def _write(self, row: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def _scalars(self, numbers: dict[str, float], step: int) -> None:
        if self._board is not None:
            with contextlib.suppress(OSError):
                for name, value in numbers.items():
                    self._board.add_scalar(name, value, step)
