"""Keep a benchmark's result: one JSON object as the last line, a page of at most 80 lines, raw figures beside the page.

A figure records its origin: runs, seeds, versions, processor, load before the start, date and commit.
"""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.versions import installed_versions

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]

PAGE_LINES = 80
"""Maximum lines of a page. Further sections are in the JSON file, under `sections`."""


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
    shown: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> None:
    """Print the JSON line, and write `results/NAME.md` and `results/NAME.json`.

    `rows`: the table; the page has the rows that are `shown`. `text`: what the table means and what it changed, in
    sections (`## ...`).
    """
    whole = {**result, "runs": runs, "seeds": list(seeds), **origin(load1)}
    write_page(name, question=question, command=command, whole=whole, rows=rows, text=text, shown=shown)
    print(json.dumps(whole), flush=True)


def origin(load1: float) -> dict[str, Any]:
    """Return what a figure was measured on. `load1`: of `load_now`, before the benchmark began."""
    return {"versions": installed_versions(), "cpu": f"{processor()}, {os.cpu_count()} cores", "load1": load1}


def write_page(
    name: str,
    *,
    question: str,
    command: str,
    whole: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    text: str,
    shown: Callable[[Mapping[str, Any]], bool] = lambda row: True,
) -> None:
    """Write `results/NAME.md` and `results/NAME.json`. `whole`: the raw figures, with their `origin`."""
    head = [
        f"# {name}: {question}",
        "",
        f"`{command}`",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit_now()}, {whole['cpu']}, "
        f"load before it began {whole['load1']:.2f}; "
        + ", ".join(f"{package} {version}" for package, version in whole["versions"].items()),
        "",
        *_table([row for row in rows if shown(row)]),
        "",
    ]
    page, later = fitted("\n".join(head) + "\n" + text.strip(), name)
    (RESULTS / f"{name}.md").write_text(page)
    raw = {**whole, "table": [dict(row) for row in rows], "sections": later}
    (RESULTS / f"{name}.json").write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n")


def fitted(text: str, name: str) -> tuple[str, dict[str, str]]:
    """Return a page of at most PAGE_LINES lines, and the sections that do not fit, by heading.

    Raises ValueError if the part before the first section does not fit.
    """
    opening, *sections = text.strip().split("\n## ")
    page, later = [opening.rstrip()], {}
    for section in sections:
        heading, _, body = section.partition("\n")
        candidate = [*page, f"## {section.rstrip()}"]
        if later or _lines(candidate) + 2 > PAGE_LINES:
            later[heading] = body.strip()
        else:
            page = candidate
    more = f", with the sections {', '.join(later)}" if later else ""
    page.append(f"Raw figures: [{name}.json]({name}.json){more}.")
    if _lines(page) > PAGE_LINES:
        raise ValueError(f"the page of {name} has {_lines(page)} lines before its first section; show fewer rows")
    return "\n\n".join(page) + "\n", later


def _lines(parts: Sequence[str]) -> int:
    return len("\n\n".join(parts).splitlines())


def load_now() -> float:
    """Return the load of the computer over the last minute. Call this before the benchmark begins."""
    return os.getloadavg()[0]


def spread(values: Sequence[float]) -> str:
    """Return median and range as text for a table."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return lines + [f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows]


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit_now() -> str:
    """Return the short id of the checked out commit."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
