"""Helpers of the GPU checks: they require devices, and run a measurement in a process of its own.

    python -m pytest -m gpu tests/gpu

The order of the checks is in `order.py`, their figures go through `figures.py`.
"""

import shutil
import subprocess
from collections import deque
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from tests.benchmarks.page import ROOT
from tests.gpu.figures import describe_device, keep_error

GIB = 1 << 30

KEPT_LINES = 30
"""Last lines of a failed process's output that are kept."""


def needs_gpus(count: int, *, gib: int = 0) -> pytest.MarkDecorator:
    """Skip with the reason unless there are this many CUDA GPUs with this much memory each."""
    found = torch.cuda.device_count()
    if found < count:
        return pytest.mark.skip(reason=f"needs {count} CUDA GPU{'s' if count > 1 else ''}, found {found}")
    smallest = min(memory_gib()[:count]) if gib else 0
    reason = f"needs {count} CUDA GPU{'s' if count > 1 else ''} of {gib} GiB, found {smallest} GiB"
    return pytest.mark.skipif(smallest < gib, reason=reason)


@cache
def memory_gib() -> list[int]:
    """Return the memory of each GPU, from the driver if its program is there.

    Asking torch creates a CUDA context, which would keep memory in pytest's process while others measure.
    """
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        return [int(mib) // 1024 for mib in found]
    return [torch.cuda.get_device_properties(i).total_memory // GIB for i in range(torch.cuda.device_count())]


def run_alone(command: Sequence[str], check: str, seconds: float) -> None:
    """Run a measurement as a process of its own. An error costs this check's figures only, and is kept with them.

    Raises AssertionError with the end of the output if the process fails, dies or takes longer than `seconds`.
    """
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        output, problem = done.stdout, f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
        problem = f"not finished after {seconds:g} s"
    if problem:
        end = "\n".join(deque(output.splitlines(), KEPT_LINES))
        keep_error(check, f"{problem}\n{end}", describe_without_context())
        raise AssertionError(f"{check}: {problem}\n{end}")


def describe_without_context() -> dict[str, object]:
    """Return the GPU's name from the driver. `describe_device` would create a CUDA context."""
    if not shutil.which("nvidia-smi"):
        return describe_device()
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {"device": names[0], "torch": torch.__version__}
