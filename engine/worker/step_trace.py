"""Write a step trace: one line for every finished denoising step of a worker, to measure what is sampled twice.

`runtime.trace_steps` turns the trace on, for spot workers and the trainer's own worker. The trace is
`traces/WORKER.jsonl` in the node's folder, one JSON object a line. A step's line is written only by the leading worker,
alone or the first of `degree` workers sharing the images:

    {"at_ns": wall clock, "lease": number, "step": finished steps, "requests": [[batch, prompt, seed, kind], ...],
     "version": of the weights, "degree": number}

A regroup order's line is written before the worker follows the order; epoch 0 means to work alone:

    {"at_ns": wall clock, "epoch": number, "degree": number, "rank": number}
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.node_spec import NodeSpec
from engine.protocol.request import Regroup, Work


class StepTrace:
    """Writer of a worker's trace. Without a handle, nothing is written."""

    def __init__(self, handle: int | None, degree: Callable[[], int]) -> None:
        self._handle, self._degree = handle, degree

    def stepped(self, work: Work, step: int) -> None:
        requests = [[r.batch, r.prompt, r.seed, r.kind.value] for r in (attempt.request for attempt in work.attempts)]
        version = work.attempts[0].weights.version  # a lease has images of one version
        self._write(lease=work.lease, step=step, requests=requests, version=version, degree=self._degree())

    def regrouped(self, order: Regroup) -> None:
        self._write(epoch=order.epoch, degree=order.degree, rank=order.rank)

    def _write(self, **line: Any) -> None:
        if self._handle is None:
            return
        text = json.dumps({"at_ns": time.time_ns(), **line})
        with contextlib.suppress(OSError):  # a full disk loses lines, never a step
            os.write(self._handle, f"{text}\n".encode())


def step_trace(spec: NodeSpec, worker: str, degree: Callable[[], int]) -> StepTrace:
    """Return the trace of a worker; the trace writes nothing unless the job turns traces on.

    `degree`: returns the group's current degree.
    """
    if not spec.engine.runtime.trace_steps:
        return StepTrace(None, degree)
    path = Path(spec.folder) / "traces" / f"{worker}.jsonl"
    path.parent.mkdir(exist_ok=True)
    return StepTrace(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), degree)
