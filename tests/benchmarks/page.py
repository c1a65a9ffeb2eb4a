"""What every benchmark does with its result: one JSON object as the last line, and a page that is kept.

A figure says how it was made: runs, seeds, versions, processor, load before it began, date and commit.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.versions import installed_versions

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]


def publish(
    name: str,
    *,
    question: str,
    command: str,
    result: Mapping[str, Any],
    runs: int,
    seeds: Sequence[int],
    load1: float,
    rows: Sequence[Mapping[str, Any]],
    text: str,
) -> None:
    """Print the JSON line and write `results/NAME.md`. `rows`: the table; `text`: what it means and what it changed."""
    whole = {
        **result,
        "runs": runs,
        "seeds": list(seeds),
        "versions": installed_versions(),
        "cpu": f"{_processor()}, {os.cpu_count()} cores",
        "load1": load1,
    }
    page = [
        f"# {name}: {question}",
        "",
        f"`{command}`",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {_commit()}, {whole['cpu']}, load before it began {load1:.2f}; "
        + ", ".join(f"{package} {version}" for package, version in whole["versions"].items()),
        "",
        *_table(rows),
        "",
        text.strip(),
        "",
        "```json",
        json.dumps(whole, indent=1),
        "```",
        "",
    ]
    (RESULTS / f"{name}.md").write_text("\n".join(page))
    print(json.dumps(whole), flush=True)


def load_now() -> float:
    """Load of the machine over the last minute: take it before the benchmark begins."""
    return os.getloadavg()[0]


def spread(values: Sequence[float]) -> str:
    """Median and range, for a table."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return lines + [f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
