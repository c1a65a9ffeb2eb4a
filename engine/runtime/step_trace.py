"""A step trace: one line for every denoising step that a worker finished, to see what a lost node cost.

Asked for by `runtime.trace_steps`; `traces/WORKER.jsonl` in the node's folder, one JSON object a line:

    {"at_ns": wall clock, "lease": number, "step": steps that are done, "requests": [[batch, prompt, seed, kind], ...]}
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from engine.config import NodeSpec
from engine.rollout.request import Work

Trace = Callable[[Work, int], None]


def step_trace(spec: NodeSpec, worker: str) -> Trace:
    """What a worker calls after every step; does nothing unless the job asks for it."""
    if not spec.engine.runtime.trace_steps:
        return lambda work, step: None
    path = Path(spec.folder) / "traces" / f"{worker}.jsonl"
    path.parent.mkdir(exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def trace(work: Work, step: int) -> None:
        requests = [[r.batch, r.prompt, r.seed, r.kind.value] for r in (attempt.request for attempt in work.attempts)]
        line = json.dumps({"at_ns": time.time_ns(), "lease": work.lease, "step": step, "requests": requests})
        with contextlib.suppress(OSError):  # a full disk loses lines, never a step
            os.write(handle, f"{line}\n".encode())

    return trace
