"""One command for a lent GPU: measure everything that no page has, those parts first that answer most.

    make gpu-proof                               on a GPU, 25 minutes at most; call it again to go on
    python -m tests.gpu.proof --narrow           all parts on the CPU with narrow models, in minutes: no figure counts
    python -m tests.gpu.proof --page             write the page again from the raw figures

Each part is a process with a time limit of its own (`measure.py`), and each figure is on the disk before the next is
measured. A part that this commit has measured on this kind of device is skipped, and one that was cut off goes on with
the cases that it lacks. A part that fails costs its own figures. At the end the lines are folded into
`results/gpu_proof.json`, figures that changed by more than `TOLD` since the last measurement on such a device are
told, and `results/gpu_proof.md` is written. Exit code 0: every part that this machine can run is measured.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.page import RESULTS, ROOT
from tests.gpu.figures import NARROW, describe_device, folded, keep_done, keep_error, lines_file, lines_of

TOTAL_S = 1500.0
"""Seconds that all parts have together: a lent machine goes back after half an hour."""
LEAST_S = 20.0
"""Seconds below which a part is not begun."""
TOLD = 0.10
"""Relative change of a figure that is told."""

RAW, PAGE = "gpu_proof.json", "gpu_proof.md"

NAMED = ("s_a_row", "images_per_gpu_second", "mfu", "peak_gib", "s", "s_an_iteration")
"""Figures that are compared with the last measurement; others, like counts of runs, are not."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the proof, which is one process."""

    name: str
    """Check of `measure.py`, or file of pytest's checks."""
    answers: str
    seconds: float
    gib: int = 75
    gpus: int = 1
    tests: str = ""
    """pytest's checks, for a part that is none of `measure.py`. They are skipped on the CPU."""

    def command(self, *, is_narrow: bool) -> list[str]:
        if self.tests:
            return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *self.tests.split()]
        return [sys.executable, "-m", "tests.gpu.measure", self.name, *(["--narrow"] if is_narrow else [])]


PARTS = (
    Part(name="20 B engine step, 512 px", answers="seconds of the engine's own training row", seconds=150),
    Part(name="20 B rollout passes, 512 px", answers="guidance in one or two passes, merged adapters", seconds=210),
    Part(name="20 B recipe, 512 px", answers="the published recipe whole: images a GPU-second, MFU", seconds=330),
    Part(
        name="20 B step with peft's own layers, 512 px",
        answers="what adapters in bf16 and fewer kernels gain",
        seconds=120,
    ),
    Part(name="20 B compiled passes, 512 px", answers="compiled blocks against uncompiled", seconds=240),
    Part(
        name="SD3.5-medium, a worker becomes the trainer",
        answers="CUDA start, base load, checkpoint read, first lease",
        seconds=90,
        gib=24,
    ),
    Part(
        name="two GPUs: NCCL and elastic SP",
        answers="regroups, abort after a death, two workers that share images",
        seconds=240,
        gib=24,
        gpus=2,
        tests="tests/gpu/test_nccl.py tests/gpu/test_node.py::test_two_workers_share_images_on_two_gpus_through_nccl",
    ),
    Part(name="20 B engine step, 1280 px", answers="a training row at the published size", seconds=120),
    Part(name="FLUX.1 passes and steps", answers="another family", seconds=120, gib=40),
    Part(name="SD3.5-medium passes and steps", answers="another family", seconds=90, gib=24),
    Part(name="Wan 1.3 B passes and steps", answers="video", seconds=90, gib=24),
)
"""All parts, in the order of their value."""

NOT_HERE = "klein-4B and Z-Image: the engine has no such family."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are missing, write raw figures and page, and tell what changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--narrow", action="store_true", help="narrow models on the CPU")
    parser.add_argument("--page", action="store_true", help="write the page only")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="time of all parts together")
    parser.add_argument("--to", type=Path, default=None, help="folder of raw figures and page")
    given = parser.parse_args(arguments)
    folder: Path = given.to or (lines_file().parent if given.narrow else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    kept = json.loads((folder / RAW).read_text("utf-8")) if (folder / RAW).exists() else {}
    if given.page:
        write_page(folder, kept, [])
        (folder / RAW).write_text(json.dumps(with_missing(kept), indent=1) + "\n", "utf-8")
        return 0
    if not given.narrow and not torch.cuda.is_available():
        print("there is no CUDA GPU here; `--narrow` tries every part on the CPU, without a figure that counts")
        return 2
    device = describe_device() | (NARROW if given.narrow else {})
    missing = run_parts(device, is_narrow=given.narrow, seconds=given.seconds)
    lines = [line for part in PARTS for line in lines_of(part.name, device)]
    now = folded(lines, kept)
    told = list(changes(kept, now))
    for change in told:
        print(change)
    (folder / RAW).write_text(json.dumps(with_missing(now), indent=1) + "\n", "utf-8")
    write_page(folder, now, told)
    print(f"{len(PARTS) - len(missing)} of {len(PARTS)} parts are measured or not for this machine; {folder / PAGE}")
    for name in missing:
        print(f"missing: {name}; call the command again")
    return 1 if missing else 0


def run_parts(device: Mapping[str, Any], *, is_narrow: bool, seconds: float) -> list[str]:
    """Run the parts that are not measured yet, while there is time. Return the names of those that are missing."""
    ends, missing = time.monotonic() + seconds, []
    for part in PARTS:
        if any("done_s" in line for line in lines_of(part.name, device)):
            print(f"{part.name}: measured before", flush=True)
            continue
        if why := _not_for(part, is_narrow=is_narrow):
            print(f"{part.name}: left out, {why}", flush=True)
            continue
        limit = min(part.seconds, ends - time.monotonic())
        if limit < LEAST_S or not _run(part, device, limit, is_narrow=is_narrow):
            missing.append(part.name)
    return missing


def _not_for(part: Part, *, is_narrow: bool) -> str:
    """Return the reason why this machine cannot run a part, or nothing."""
    if is_narrow:
        return "it needs GPUs" if part.tests else ""
    gpus = torch.cuda.device_count()
    gib = min(torch.cuda.get_device_properties(number).total_memory for number in range(gpus)) >> 30
    if gpus < part.gpus:
        return f"it needs {part.gpus} GPUs, and {gpus} are here"
    return f"it needs {part.gib} GiB, and the GPU has {gib}" if gib < part.gib else ""


def _run(part: Part, device: Mapping[str, Any], limit: float, *, is_narrow: bool) -> bool:
    """Run a part within a time limit. Return True if it measured all of its cases."""
    print(f"{part.name}: at most {limit:.0f} s", flush=True)
    begun, problem = time.monotonic(), ""
    process = subprocess.Popen(part.command(is_narrow=is_narrow), cwd=ROOT)
    try:
        if code := process.wait(limit):
            problem = f"exit code {code}"
    except subprocess.TimeoutExpired:
        problem = f"not finished after {limit:.0f} s"
    finally:
        process.kill()
        process.wait()
    if problem:
        print(f"{part.name}: {problem}", flush=True)
        keep_error(part.name, problem, device)
        return False
    keep_done(part.name, time.monotonic() - begun, device)
    return True


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each figure that changed by more than `TOLD` since the last measurement on such a device."""
    for check, figures in now.items():
        old = before.get(check)
        if not isinstance(old, Mapping) or old.get("device") != figures.get("device"):
            continue
        was = dict(_numbers(old))
        for path, value in _numbers(figures):
            if path in was and was[path] and abs(value / was[path] - 1) > TOLD:
                yield f"{check}, {path}: {was[path]:.4g} before, now {value:.4g} ({value / was[path] - 1:+.0%})"


def _numbers(figures: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the compared figures with their paths."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{name}, ")
        elif name in NAMED and isinstance(value, int | float):
            yield f"{path}{name}", float(value)


def with_missing(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the raw figures with the names of the parts that have none."""
    return {**raw, "not_run": [part.name for part in PARTS if part.name not in raw]}


def write_page(folder: Path, raw: Mapping[str, Any], told: Sequence[str]) -> None:
    """Write the page of the raw figures."""
    measured = {part.name: raw[part.name] for part in PARTS if part.name in raw}
    head = "No figure is of this code: no GPU ran it."
    if measured:
        origins = sorted(
            {
                f"{one.get('date')}, commit {one.get('commit')}, {one.get('device')}, torch {one.get('torch')}"
                for one in measured.values()
            }
        )
        head = "; ".join(origins) + ". Each part says below what it measured."
    lines = [
        "# gpu_proof: what does the engine reach on a GPU, part by part?",
        "",
        "`make gpu-proof`",
        "",
        f"{head} Targets: a training row at 512 px at .35 of an H100's peak or more, rollouts at .40, the recipe whole",
        "at .45 images a GPU-second. Earlier code reached .19 and .38 there ([gpu](gpu.md)).",
        "",
        "| part | answers | limit, s | state |",
        "| --- | --- | --- | --- |",
        *(f"| {part.name} | {part.answers} | {part.seconds:.0f} | {_state(raw.get(part.name))} |" for part in PARTS),
        "",
        f"{NOT_HERE} All parts together have {TOTAL_S / 60:.0f} minutes; a part that no time is left for is run by the",
        "next call. The same parts run on the CPU with narrow models (`python -m tests.gpu.proof --narrow`).",
    ]
    for name, figures in measured.items():
        rows = [f"| {path} | {value:.4g} |" for path, value in _numbers(figures)]
        if rows and len(lines) + len(rows) < 74:
            lines += ["", f"## {name}", "", "| case | figure |", "| --- | --- |", *rows]
    if told:
        lines += ["", f"Changed by more than {TOLD:.0%} since the last measurement: {'; '.join(told)}."]
    lines += ["", f"Raw figures: [{RAW}]({RAW})."]
    (folder / PAGE).write_text("\n".join(lines) + "\n", "utf-8")


def _state(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "not run"
    if "done_s" in figures:
        return f"whole, {figures['done_s']:.0f} s"
    return f"cut off: {figures.get('error', 'its process was killed')}"


if __name__ == "__main__":
    sys.exit(main())
