"""What the checks on GPUs need and leave behind: enough devices, and a page of figures that says what made them.

    python -m pytest -m gpu tests/gpu

A check that ran keeps its figures in `tests/benchmarks/results/gpu.md`, each in a section of its own, so that a machine
with one GPU and one with two can both add theirs.
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
PAGE = RESULTS / "gpu.md"
TITLE = "# gpu: what the checks marked `gpu` measured when a GPU was at hand\n\n`python -m pytest -m gpu tests/gpu`\n"


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


def keep_figures(check: str, figures: Mapping[str, Any], device: Mapping[str, Any], page: Path = PAGE) -> None:
    """Write this check's section of the page, in place of an earlier one; the other sections and what stands before
    them stay."""
    opening, *sections = page.read_text().split("\n## ") if page.exists() else [TITLE]
    kept = {section.split("\n", 1)[0]: section for section in sections}
    whole = {**figures, "date": time.strftime("%Y-%m-%d"), **device}
    kept[check] = f"{check}\n\n```json\n{json.dumps(whole, indent=1)}\n```\n"
    page.write_text(opening.rstrip() + "\n" + "".join(f"\n## {kept[name].rstrip()}\n" for name in sorted(kept)))
