"""Run tests whose processes have planted bugs, one pytest at a time, and leave no process behind.

bugs -> a file of edits -> pytest with process_plugin.py -> planted_site/sitecustomize.py in every process it starts
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.mutants.process_plugin import ENDED, planted_in

ROOT = Path(__file__).parents[2]
MEMORY_DISK = Path("/dev/shm")
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)

LOOK_SECONDS = 0.02
"""Interval of looks for ended processes."""

LONGEST_END_SECONDS = 20.0
"""Longest time until pytest ends after its last test, and until killed processes have ended."""

QUICK = "not gpu and not clouds and not slow and not long"
"""Marks of the tests that `make test` runs."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """`old` occurs once in the source of `module`, and `new` takes its place."""

    module: str
    old: str
    new: str


@dataclass(kw_only=True)
class TestRun:
    """Outcome of tests with planted bugs.

    `failed`: tests that failed. `unfinished`: tests that did not end in time. `planted`: modules with a bug that were
    imported, by number of processes. `seconds`: of the whole run; `test_seconds`: of each test with its fixtures.
    """

    __test__ = False

    failed: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    planted: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    test_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def found_by(self) -> list[str]:
        """Return the tests that find the bug."""
        return [*self.failed, *self.unfinished]

    def as_dict(self, *, whole: bool = False) -> dict[str, Any]:
        """Return JSON values; without `whole`, numbers stand for the tests that did not fail."""
        values = asdict(self)
        if not whole:
            values |= {"passed": len(self.passed), "skipped": len(self.skipped)}
            del values["test_seconds"]
        return values


def run_tests(
    edits: Sequence[Edit],
    tests: Sequence[str],
    *,
    where: Literal["children", "own"] = "children",
    marks: str = "",
    limit_seconds: float = 600.0,
    more: Sequence[str] = (),
) -> TestRun:
    """Run tests with bugs in the processes that they start, or only in pytest's own.

    `limit_seconds`: after this time, pytest and its processes are killed. `more`: further arguments of pytest.

    Raises RuntimeError if pytest could not run the tests.
    """
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    place = MEMORY_DISK if MEMORY_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="bugs", dir=place, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        bugs, outcomes = folder / "bugs.json", folder / "outcomes"
        bugs.write_text(json.dumps([asdict(edit) for edit in edits]))
        arguments = ["-q", "-p", "no:cacheprovider", "-p", "tests.mutants.process_plugin", "-m", marks]
        options = ["--bugs", str(bugs), "--where", where, "--outcomes", str(outcomes), "--basetemp", str(folder / "t")]
        began = time.monotonic()
        with (folder / "output").open("w+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *arguments, *options, *more, *tests],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=planted_in(os.environ, bugs) if where == "own" else None,
            )
            try:
                code = _wait(process, limit_seconds, outcomes)
            finally:
                _kill_descendants()
            seconds = time.monotonic() - began
            output.seek(0)
            text = output.read().decode(errors="replace")
        if code not in (None, 0, 1, 5) or not (outcomes.exists() or code == 5):
            raise RuntimeError(f"pytest ended with {code}: {text[-3000:]}")
        run = _run_of(outcomes)
        run.seconds = round(seconds, 1)
        log = Path(f"{bugs}.planted")
        for line in log.read_text().splitlines() if log.exists() else []:
            module = line.split(" ")[1]
            run.planted[module] = run.planted.get(module, 0) + 1
        return run


def _run_of(outcomes: Path) -> TestRun:
    run = TestRun()
    ended: dict[str, str] = {}
    begun: list[str] = []
    for line in outcomes.read_text().splitlines() if outcomes.exists() else []:
        test, phase, outcome, seconds = json.loads(line)
        if test == ENDED:
            continue
        if phase == "start":
            begun.append(test)
            continue
        run.test_seconds[test] = round(run.test_seconds.get(test, 0.0) + seconds, 3)
        if outcome == "failed":
            ended[test] = "failed"
        elif outcome == "skipped":
            ended.setdefault(test, "skipped")
        elif phase == "teardown":
            ended.setdefault(test, "passed")
    for test in begun:
        {"failed": run.failed, "skipped": run.skipped, "passed": run.passed}.get(
            ended.get(test, ""), run.unfinished
        ).append(test)
    return run


def _wait(process: "subprocess.Popen[bytes]", limit_seconds: float, outcomes: Path) -> int | None:
    """Return the exit code of pytest, or None if pytest takes too long. Reap the orphans that end meanwhile.

    Tests look for processes that have ended, and must find no zombies.
    """
    until = time.monotonic() + limit_seconds
    looked, is_over = time.monotonic(), False
    while (now := time.monotonic()) < until:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            time.sleep(LOOK_SECONDS)
        elif ended.si_pid == process.pid:
            return process.wait()
        else:
            os.waitpid(ended.si_pid, 0)
        if not is_over and now - looked > 1.0:
            looked = now
            if outcomes.exists() and ENDED in outcomes.read_text():
                is_over, until = True, min(until, now + LONGEST_END_SECONDS)
    return None


def _kill_descendants() -> None:
    """Kill what pytest left. This process adopts orphans, so all of them are its descendants."""
    until = time.monotonic() + LONGEST_END_SECONDS
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(LOOK_SECONDS)
