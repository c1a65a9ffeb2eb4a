"""What the checks on GPUs need and leave behind: enough devices, and a page of figures that says what made them.

    python -m pytest -m gpu tests/gpu

A check that ran keeps its figures under a key of its own in `tests/benchmarks/results/gpu.json`, so that a machine with
one GPU and one with two can both add theirs. The page gpu.md beside the file is written by hand.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.versions import installed_versions
from tests.benchmarks.page import RESULTS

GIB = 1 << 30
FIGURES = RESULTS / "gpu.json"


def needs_gpus(count: int, *, gib: int = 0) -> pytest.MarkDecorator:
    """Skip, saying what is missing, unless there are so many CUDA GPUs, each with so much memory."""
    found = torch.cuda.device_count()
    if found < count:
        return pytest.mark.skip(reason=f"needs {count} CUDA GPU{'s' if count > 1 else ''}, found {found}")
    smallest = min(torch.cuda.get_device_properties(i).total_memory // GIB for i in range(count))
    reason = f"needs {count} CUDA GPU{'s' if count > 1 else ''} of {gib} GiB, found {smallest} GiB"
    return pytest.mark.skipif(smallest < gib, reason=reason)


def describe_device() -> dict[str, Any]:
    """The GPU, and the versions that decide what it measures."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return {
        "device": torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "versions": installed_versions(),
    }


def keep_figures(check: str, figures: Mapping[str, Any], device: Mapping[str, Any], file: Path = FIGURES) -> None:
    """Write this check's figures, in place of earlier ones. The figures of other checks stay."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept[check] = {**figures, "date": time.strftime("%Y-%m-%d"), **device}
    file.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
