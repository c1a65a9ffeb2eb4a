"""One command for a lent GPU: measure everything that no page has, those parts first that answer most.

    make gpu-proof                               on a GPU, 25 minutes at most; call it again to go on
    python -m tests.gpu.proof --narrow           all parts on the CPU with narrow models, in minutes: no figure counts
    python -m tests.gpu.proof --page             write the page again from the raw figures

Each part is a process with a time limit of its own (`measure.py`), and each figure is on the disk before the next is
measured. A part that this commit has measured on this kind of device is skipped, and one that was cut off goes on with
the cases that it lacks. A part that fails costs its own figures. At the end, and after SIGTERM or Ctrl-C, the lines are
folded into `results/gpu_proof.json`, figures that changed by more than `TOLD` since other code was measured on such a
device are told, and `results/gpu_proof.md` is written. Exit code 0: every part that this machine can run is measured.

The promises: a killed proof leaves no part running, and the files of the last one whole; a part that hangs, with all
processes of its group, ends at its limit.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.whole_file import whole_file
from tests.benchmarks.page import PAGE_LINES, RESULTS, ROOT
from tests.gpu.device import KEPT_LINES
from tests.gpu.figures import NARROW, folded, keep_done, keep_error, lines_file, lines_of
from tests.gpu.measure import FAMILIES

TOTAL_S = 1500.0
"""Seconds that all parts have together: a lent machine goes back after half an hour."""
LEAST_S = 20.0
"""Seconds below which a part is not begun."""
GRACE_S = 5.0
"""Seconds between SIGINT and SIGKILL for a part that is cut off."""
TOLD = 0.10
"""Relative change of a figure that is told."""

RAW, PAGE = "gpu_proof.json", "gpu_proof.md"

NAMED = (
    *("s_a_row", "images_per_gpu_second", "mfu", "peak_gib", "s", "s_an_iteration", "models_s", "merge_s"),
    *("cuda_start_s", "base_load_s", "checkpoint_read_s", "first_lease_s"),
    *("next_s", "again_ms", "abort_s", "shared_again_s"),
)
"""Figures that are on the page and are compared with the last measurement; others, like counts of runs, are not."""

DESCRIBE = "import json; from tests.gpu.figures import describe_device; print(json.dumps(describe_device()))"

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


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
        answers="regroups, abort after a death, parity, two workers that share images",
        seconds=240,
        gib=24,
        gpus=2,
        tests="tests/gpu/test_nccl.py tests/gpu/test_node.py::test_two_workers_share_images_on_two_gpus_through_nccl"
        " tests/gpu/test_half_parity.py::test_two_ranks_on_two_gpus_share_a_pass_in_bf16",
    ),
    Part(name="20 B engine step, 1280 px", answers="a training row at the published size", seconds=120),
    *(
        Part(name=check.name, answers="another family", seconds=check.seconds, gib=check.gib)
        for check in FAMILIES
        if check.gib <= 40  # the larger ones answer little beside the 20 B
    ),
)
"""All parts, in the order of their value. A family is added by its row in `published.py`."""


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
    kept = read_raw(folder / RAW)
    if given.page:
        write_results(folder, kept)
        return 0
    device = NARROW
    if not given.narrow:
        # In a process of its own: a CUDA context of this one would keep memory while the parts measure.
        described = subprocess.run(
            [sys.executable, "-c", DESCRIBE], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        )
        device = json.loads(described.stdout.splitlines()[-1])
    if device["device"] == "cpu":
        print("there is no CUDA GPU here; `--narrow` tries every part on the CPU, without a figure that counts")
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        missing = run_parts(device, is_narrow=given.narrow, seconds=given.seconds)
    finally:
        raw = with_previous(folded(lines_of(None, device), kept), kept)  # pytest's checks have names of their own
        for change in changes(raw):
            print(change)
        write_results(folder, raw)
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
        if why := _not_for(part, device, is_narrow=is_narrow):
            print(f"{part.name}: left out, {why}", flush=True)
            continue
        limit = min(part.seconds, ends - time.monotonic())
        if limit < LEAST_S or not _run(part, device, limit, is_narrow=is_narrow):
            missing.append(part.name)
    return missing


def _not_for(part: Part, device: Mapping[str, Any], *, is_narrow: bool) -> str:
    """Return the reason why this machine cannot run a part, or nothing."""
    if is_narrow:
        return "it needs GPUs" if part.tests else ""
    if device["devices"] < part.gpus:
        return f"it needs {part.gpus} GPUs, and {device['devices']} are here"
    return f"it needs {part.gib} GiB, and the GPU has {device['gib']}" if device["gib"] < part.gib else ""


def _run(part: Part, device: Mapping[str, Any], limit: float, *, is_narrow: bool) -> bool:
    """Run a part within a time limit. Return True if it measured all of its cases."""
    print(f"{part.name}: at most {limit:.0f} s", flush=True)
    begun, problem, tail = time.monotonic(), "", deque[str](maxlen=KEPT_LINES)
    process = subprocess.Popen(
        part.command(is_narrow=is_narrow),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group that can be killed whole
        preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # a killed proof ends its part
    )

    def pass_on() -> None:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            tail.append(line)

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    try:
        if code := process.wait(limit):
            problem = f"exit code {code}"
    except subprocess.TimeoutExpired:
        problem = f"not finished after {limit:.0f} s"
    finally:
        process.send_signal(signal.SIGINT)  # lets pytest end nodes outside the group, and others delete their files
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(5.0)  # longer only if a process outside the group keeps the output open
    if problem:
        print(f"{part.name}: {problem}", flush=True)
        keep_error(part.name, "\n".join((problem, *map(str.rstrip, tail))), device)
        return False
    keep_done(part.name, time.monotonic() - begun, device)
    return True


def read_raw(file: Path) -> dict[str, Any]:
    """Return the raw figures by part. A file that is no JSON object is renamed, and told."""
    if not file.exists():
        return {}
    try:
        raw = json.loads(file.read_text("utf-8"))
    except ValueError:  # of the text or of the JSON
        raw = None
    if not isinstance(raw, dict):
        aside = file.replace(file.with_name(f"{file.name}.unreadable"))
        print(f"{file} is no JSON object: renamed to {aside.name}; the figures of this commit's lines are kept")
        return {}
    return {name: figures for name, figures in raw.items() if isinstance(figures, dict)}


def with_previous(raw: dict[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures, each part with those of other code that it replaces, of the same device, as "previous"."""
    for name, figures in raw.items():
        before = kept.get(name, figures)
        if before is figures or before.get("device") != figures["device"]:
            continue
        if before.get("commit") == figures["commit"] or not list(_numbers(before)):
            before = before.get("previous")
        if before:
            figures["previous"] = {key: value for key, value in before.items() if key != "previous"}
    return raw


def changes(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each figure that changed by more than `TOLD` since other code was measured on such a device."""
    for part, figures in raw.items():
        if not isinstance(figures, Mapping):
            continue
        old = {(case, name): value for case, name, value in _numbers(figures.get("previous", {}))}
        for case, name, value in _numbers(figures):
            if (was := old.get((case, name))) and abs(value / was - 1) > TOLD:
                yield f"{part}, {case}{name}: {was:.4g} before, now {value:.4g} ({value / was - 1:+.0%})"


def _numbers(figures: Mapping[str, Any], case: str = "") -> Iterator[tuple[str, str, float]]:
    """Yield the figures of the page: case, name, value."""
    for name, value in figures.items():
        if isinstance(value, Mapping) and name != "previous":
            yield from _numbers(value, f"{case}{name}, ")
        elif name in NAMED and isinstance(value, int | float):
            yield case, name, float(value)


def write_results(folder: Path, raw: Mapping[str, Any]) -> None:
    """Write the raw figures, with the names of parts that have none, and their page. Each file is replaced whole."""
    missing = [part.name for part in PARTS if part.name not in raw]
    with whole_file(folder / RAW) as file:
        file.write(json.dumps({**raw, "not_run": missing}, indent=1) + "\n")
    with whole_file(folder / PAGE) as file:
        file.write(page(raw))


def page(raw: Mapping[str, Any]) -> str:
    """Return the page of the raw figures."""
    names = dict.fromkeys((*(part.name for part in PARTS), *raw))  # pytest's checks come last
    measured = {name: raw[name] for name in names if isinstance(raw.get(name), Mapping)}
    origins = sorted(
        {
            f"{figures.get('date')}, commit {figures.get('commit')}, {figures['device']}, torch {figures.get('torch')}"
            for figures in measured.values()
            if figures.get("device") != NARROW["device"]
        }
    )
    head = "; ".join(origins) + ". Each part says below what it measured."
    if not origins:
        head = "No figure is of this code: no GPU ran it."
    if not origins and measured:
        head += " All figures are of narrow models on the CPU, and only show that each part runs."
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
        f"All parts together have {TOTAL_S / 60:.0f} minutes; a part that no time is left for is run by the next call.",
        "The same parts run on the CPU with narrow models (`python -m tests.gpu.proof --narrow`).",
    ]
    if told := list(changes(raw)):
        lines += ["", f"Changed by more than {TOLD:.0%} since other code was measured: {'; '.join(told)}."]
    cases: dict[str, list[str]] = {}
    for part, figures in measured.items():
        for case, name, value in _numbers(figures):
            cases.setdefault(f"| {part} | {case.removesuffix(', ')} |", []).append(f"{name} {value:.4g}")
    rows = [f"{case} {', '.join(figures)} |" for case, figures in cases.items()]
    shown = rows[: PAGE_LINES - len(lines) - 5]
    if shown:
        lines += ["", "| part | case | figures |", "| --- | --- | --- |", *shown]
    more = f", with {len(rows) - len(shown)} cases more" if len(rows) > len(shown) else ""
    lines += ["", f"Raw figures: [{RAW}]({RAW}){more}."]
    return "\n".join(lines) + "\n"


def _state(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "not run"
    if "done_s" in figures:
        return f"whole, {figures['done_s']:.0f} s"
    return f"cut off: {figures.get('error', 'its process was killed').partition(chr(10))[0]}"


if __name__ == "__main__":
    sys.exit(main())
