"""A step trace: one line for every denoising step that a worker finished, to see what a lost node cost.

Asked for by `runtime.trace_steps`; `traces/WORKER.jsonl` in the node's folder, one JSON object a line. A step, written
by the one worker that leads it, alone or as the first of `degree` workers that share the pictures:

    {"at_ns": wall clock, "lease": number, "step": steps that are done, "requests": [[batch, prompt, seed, kind], ...],
     "degree": number}

and what a worker was told of groups, before it did it; epoch 0 is to work alone:

    {"at_ns": wall clock, "epoch": number, "degree": number, "rank": number}
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config import NodeSpec
from engine.rollout.request import Regroup, Work


class StepTrace:
    """What a worker tells; without a handle nothing is written."""

    def __init__(self, handle: int | None, degree: Callable[[], int]) -> None:
        self._handle, self._degree = handle, degree

    def stepped(self, work: Work, step: int) -> None:
        requests = [[r.batch, r.prompt, r.seed, r.kind.value] for r in (attempt.request for attempt in work.attempts)]
        self._write(lease=work.lease, step=step, requests=requests, degree=self._degree())

    def regrouped(self, order: Regroup) -> None:
        self._write(epoch=order.epoch, degree=order.degree, rank=order.rank)

    def _write(self, **line: Any) -> None:
        if self._handle is None:
            return
        text = json.dumps({"at_ns": time.time_ns(), **line})
        with contextlib.suppress(OSError):  # a full disk loses lines, never a step
            os.write(self._handle, f"{text}\n".encode())


def step_trace(spec: NodeSpec, worker: str, degree: Callable[[], int]) -> StepTrace:
    """The trace of a worker; writes nothing unless the job asks for it. `degree`: of its group, now."""
    if not spec.engine.runtime.trace_steps:
        return StepTrace(None, degree)
    path = Path(spec.folder) / "traces" / f"{worker}.jsonl"
    path.parent.mkdir(exist_ok=True)
    return StepTrace(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), degree)
