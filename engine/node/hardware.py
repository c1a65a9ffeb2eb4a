"""The hardware of this machine in words, for the report: GPUs, CPU cores and memory as the node itself sees them.

A cloud may deliver another CPU than the catalog names, and a local run has no instance type at all. Standard library
only; nvidia-smi runs as a process of its own, because the agent stays without torch.
"""

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.node.self_check import gpus_on_the_bus

ASK_GPUS = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
"""Prints one line a GPU: its name, and its memory in MiB."""

ASK_SECONDS = 10.0
"""Longest time of nvidia-smi. A driver that starts with the call takes about two seconds."""

LONGEST = 200
"""Most characters of the text."""

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns its output. Raises OSError or subprocess.SubprocessError."""


def hardware(root: Path = Path("/"), run: Run | None = None) -> str:
    """Return like `1 NVIDIA L4 with 22.5 GiB, 8 CPU cores (Intel Xeon), 31.3 GiB of memory`. Never fails.

    `root`: of the system's files. What cannot be read is left out.
    """
    parts = [*_gpus(root, run or _run), _cpu(root), _memory(root)]
    return ", ".join(part for part in parts if part)[:LONGEST]


def _gpus(root: Path, run: Run) -> list[str]:
    count = gpus_on_the_bus(root)
    if count == 0:
        return []
    try:
        rows = [line.rpartition(",") for line in run(ASK_GPUS).strip().splitlines()]
        counts = Counter((name.strip(), int(mebibytes)) for name, _, mebibytes in rows)
    except (OSError, subprocess.SubprocessError, ValueError):
        return [f"{count} NVIDIA GPU{'s' if count > 1 else ''}"]
    return [f"{number} {name} with {mebibytes / 1024:.1f} GiB" for (name, mebibytes), number in counts.items()]


def _cpu(root: Path) -> str:
    cores = os.cpu_count() or 1
    lines = _read(root / "proc/cpuinfo").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{cores} CPU core{'s' if cores > 1 else ''} ({model or platform.machine()})"


def _memory(root: Path) -> str:
    lines = _read(root / "proc/meminfo").splitlines()
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemTotal:")), None)
    return f"{int(kibibytes) / 1024**2:.1f} GiB of memory" if kibibytes and kibibytes.isdecimal() else ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _run(command: Sequence[str]) -> str:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS, check=True
    ).stdout
