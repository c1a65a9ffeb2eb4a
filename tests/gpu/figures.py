"""Figures of GPU checks: a JSON line for each, written as soon as the figure is measured.

    python -m tests.gpu.figures [LINES.jsonl]    puts the lines into tests/benchmarks/results/gpu.json

A line holds the check, the case, the value, and the origin: date, device, versions and commit. A check that ended with
an error has a line with the error, and keeps the figures measured before it. gpu.json has a key for each check, so that
computers with one GPU and with two can both add figures. The page gpu.md beside the file is written by hand.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from engine.versions import installed_versions
from tests.benchmarks.page import RESULTS, ROOT

GPU_JSON = RESULTS / "gpu.json"

NARROW = {"device": "cpu, narrow models"}
"""Device of figures that only show that a measurement runs."""

LINES_VARIABLE = "SPOTRL_GPU_FIGURES"
"""Environment variable with the file of the lines. Without it: `test-results/gpu.jsonl`."""

KINDS = {"case", "error", "done_s"}
"""Key that tells what a line holds: a figure, an error, or the end of a check."""

HOLD_VARIABLE = "SPOTRL_GPU_HOLD"
"""Environment variable of tests: with it, a check stands still after its first figure, until it is killed. A narrow
check has all of its figures within a second, so a kill would come too late."""

COMMIT_VARIABLE = "SPOTRL_COMMIT"
"""Environment variable with the commit, for a copy of the code without its git folder."""


def lines_file() -> Path:
    """Return the file that gets the lines."""
    return Path(os.environ.get(LINES_VARIABLE) or ROOT / "test-results" / "gpu.jsonl")


@cache
def commit() -> str:
    """Return the commit of the code. In a copy without its git folder: a digest of the files that measure."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        digest = blake2b(digest_size=4)
        for file in sorted((*ROOT.glob("engine/**/*.py"), *ROOT.glob("tests/gpu/*.py"))):
            digest.update(file.read_bytes())
        return f"unknown-{digest.hexdigest()}"


def describe_device() -> dict[str, Any]:
    """Return the GPU, and the versions that decide its measurements."""
    if not torch.cuda.is_available():
        return {"device": "cpu", "torch": torch.__version__, "versions": installed_versions()}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return {
        "device": torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(),
        "gib": min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())) >> 30,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "torch": torch.__version__,
        "versions": installed_versions(),
    }


def keep_figure(check: str, case: Sequence[str], value: object, device: Mapping[str, Any]) -> None:
    """Append the line of one case of a check. `case`: the path of keys to the value."""
    _append({"check": check, "case": list(case), "value": value, **_origin(device)})
    while HOLD_VARIABLE in os.environ:
        time.sleep(1.0)


def keep_figures(check: str, figures: Mapping[str, Any], device: Mapping[str, Any]) -> None:
    """Append one line with all figures of a check."""
    keep_figure(check, (), dict(figures), device)


def keep_error(check: str, error: str, device: Mapping[str, Any]) -> None:
    """Append the line of a check that ended with an error."""
    _append({"check": check, "error": error, **_origin(device)})


def _origin(device: Mapping[str, Any]) -> dict[str, Any]:
    return {"date": time.strftime("%Y-%m-%d"), "commit": commit(), **device}


def keep_done(check: str, seconds: float, device: Mapping[str, Any]) -> None:
    """Append the line of a check that has measured all of its cases."""
    _append({"check": check, "done_s": round(seconds, 1), **_origin(device)})


def lines_of(check: str | None, device: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a check, or of all checks, that this commit wrote on a device of this kind."""
    origin = {"commit": commit(), "device": device["device"]} | ({"check": check} if check else {})
    return [line for line in read_lines(lines_file()) if origin.items() <= line.items()]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file. A line that is no figure counts as absent: it was cut off, or the file is damaged."""
    lines = []
    for text in file.read_text("utf-8", errors="replace").splitlines() if file.exists() else ():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and "check" in line and KINDS & line.keys()]


def _append(line: Mapping[str, Any]) -> None:
    file = lines_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    is_torn = file.exists() and file.read_bytes()[-1:] not in (b"", b"\n")  # its writer was killed
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" * is_torn + json.dumps(line) + "\n")
        out.flush()
        os.fsync(out.fileno())  # the machine may end at any moment


def folded(lines: Iterable[Mapping[str, Any]], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures by check, sorted. Lines of a check replace all its earlier figures in `kept`."""
    found: dict[str, Any] = {}
    for line in lines:
        origin = {
            name: part for name, part in line.items() if name not in ("check", "case", "value", "error", "done_s")
        }
        figures = found.setdefault(line["check"], {})
        if "error" in line:
            figures["error"] = line["error"]
        elif "done_s" in line:
            figures["done_s"] = line["done_s"]
            figures.pop("error", None)  # of a run before
        elif line["case"]:
            *path, last = line["case"]
            at = figures
            for name in path:
                at = at.setdefault(name, {})
            at[last] = line["value"]
        else:
            figures.update(line["value"])
        figures.update(origin)
    return dict(sorted((dict(kept) | found).items()))


def main(arguments: Sequence[str], file: Path = GPU_JSON) -> int:
    """Put the lines of a file into gpu.json."""
    source = Path(arguments[0]) if arguments else lines_file()
    lines = read_lines(source)
    kept = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(folded(lines, kept), indent=1) + "\n", "utf-8")
    print(f"{len(lines)} lines of {source} are in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
