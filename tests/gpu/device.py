"""Helpers of the GPU checks: they require devices, and store figures with their origin.

    python -m pytest -m gpu tests/gpu

A check stores its figures under its own key in `tests/benchmarks/results/gpu.json`, so that computers with one GPU and
with two can both add figures. The page gpu.md beside the file is written by hand.
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
    """Skip with the reason unless there are this many CUDA GPUs with this much memory each."""
    found = torch.cuda.device_count()
    if found < count:
        return pytest.mark.skip(reason=f"needs {count} CUDA GPU{'s' if count > 1 else ''}, found {found}")
    smallest = min(torch.cuda.get_device_properties(i).total_memory // GIB for i in range(count))
    reason = f"needs {count} CUDA GPU{'s' if count > 1 else ''} of {gib} GiB, found {smallest} GiB"
    return pytest.mark.skipif(smallest < gib, reason=reason)


def describe_device() -> dict[str, Any]:
    """Return the GPU, and the versions that decide its measurements."""
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
