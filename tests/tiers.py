"""Time limits of the test tiers, compared with the last run.

    python -m tests.tiers    reads test-results/ and prints a table; exits 1 if a tier took 2.5 times its limit

The Makefile makes pytest write `test-results/PART.xml` for each part of a tier. Parallel parts belong to one tier: its
time is that of the longest part. The limits hold on the reference machine: two idle cores on which the suite of commit
8ff64c3 takes 522 s. A fixed load runs beside each part every few seconds (`LoadWatch`, tests/conftest.py). Its median
time over that beside `make test` on the reference machine is the machine's factor, and the limits grow with it.
A measurement before or after a tier predicted badly: machines get slower and quicker within minutes. Only `.ci/run`
calls this, so a slow laptop fails no test.
"""

import hashlib
import statistics
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "test-results"

TOLERANCE = 2.5
"""A run may exceed its limit by this factor, beside the machine's own factor. The load was measured beside `make test`
alone until now, so the factor of the other tiers is not known well."""

LOAD = """
import asyncio, hashlib, http.client, json
digest = b""
for number in range(60_000):
    digest = hashlib.blake2b(digest + number.to_bytes(4, "big"), digest_size=16).digest()
for _ in range(200):
    json.loads(json.dumps({str(number): [number, str(digest)] for number in range(100)}))
"""
"""The fixed load: a process that imports, hashes and writes JSON, as most tests do."""

LOAD_EVERY_S = 10.0

REFERENCE_LOAD_S = 0.48
"""Median wall seconds of the load beside `make test` on the reference machine: 0.68 on one whose factor is 1.43."""

REFERENCE_S = 1.0
"""CPU seconds of `fixed_work` on the reference machine."""

ROUNDS = 1_000_000
"""Hashes that `fixed_work` computes."""

SLOWEST = 12
"""Number of tests that the table names for each part."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One `make` target. `parts`: names of its result files. `limit_s`: of pytest, without the environment's set-up."""

    name: str
    parts: tuple[str, ...]
    limit_s: float


TIERS = (
    Tier(name="test", parts=("test",), limit_s=600),
    Tier(name="test-slow", parts=("test-slow",), limit_s=900),
    Tier(name="test-sinks", parts=("test-sinks",), limit_s=60),
    # The sum of its tests: it never ran whole, and most of its launches use both cores by themselves.
    Tier(name="test-long", parts=("test-long",), limit_s=3600),
    Tier(name="test-clouds", parts=("test-clouds-run", "test-clouds-parts"), limit_s=2400),
    Tier(name="test-clouds-long", parts=("test-clouds-long",), limit_s=1200),
    Tier(
        name="test-clouds-everything",
        parts=("test-clouds-everything-aws", "test-clouds-everything-gcp"),
        limit_s=2400,
    ),
    Tier(name="test-clouds-faults-runs", parts=("test-clouds-faults-runs",), limit_s=2400),
    Tier(name="test-clouds-faults-parts", parts=("test-clouds-faults-parts",), limit_s=2200),
    Tier(name="test-clouds-selftest", parts=("test-clouds-selftest",), limit_s=1200),
    Tier(name="test-clouds-selftest-faults", parts=("test-clouds-selftest-faults",), limit_s=3000),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The used part of a pytest run's JUnit file. `slowest`: (seconds, test), longest first."""

    tests: int
    seconds: float
    slowest: tuple[tuple[float, str], ...]


def read_part(path: Path) -> Part | None:
    """Read pytest's JUnit file, or return None if there is none."""
    if not path.exists():
        return None
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    tests = [
        (float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in suite.iter("testcase")
    ]
    return Part(
        tests=len(tests),
        seconds=float(suite.get("time", 0)),
        slowest=tuple(sorted(tests, reverse=True)[:SLOWEST]),
    )


def fixed_work(rounds: int = ROUNDS) -> None:
    """Compute hashes: the same work on every computer, so its time measures the computer."""
    digest = b""
    for number in range(rounds):
        digest = hashlib.blake2b(digest + number.to_bytes(4, "big"), digest_size=16).digest()


class LoadWatch:
    """Runs the fixed load every few seconds beside a tier, in a thread, and writes the median of its wall seconds."""

    def __init__(self, file: Path) -> None:
        self._file, self._ended = file, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="load", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        seconds: list[float] = []
        while not self._ended.wait(LOAD_EVERY_S):
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-S", "-c", LOAD], check=True)
            seconds.append(time.perf_counter() - begun)
        if seconds:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(f"{statistics.median(seconds):.3f}\n")


def load_file(part: Path) -> Path:
    """Return the file with the load beside a part, from the part's JUnit file."""
    return part.with_suffix(".load")


def factor_of(parts: Sequence[Path]) -> float | None:
    """Return how many times slower than the reference machine this one was beside the parts; None if not measured."""
    loads = [float(load_file(part).read_text()) for part in parts if load_file(part).exists()]
    return statistics.mean(loads) / REFERENCE_LOAD_S if loads else None


def over_limit(tier: Tier, parts: list[Part], factor: float = 1.0) -> bool:
    """Return whether the tier exceeded its limit and the tolerance. A quicker machine tightens no limit."""
    return max((part.seconds for part in parts), default=0.0) > tier.limit_s * TOLERANCE * max(1.0, factor)


def main(results: Path = RESULTS) -> int:
    """Print one line per tier and its slowest tests. Return 1 if a tier is over its limit."""
    too_slow = []
    factors = [factor for tier in TIERS if (factor := factor_of(_files(tier, results))) is not None]
    if factors:
        print(f"factor of this machine: {statistics.mean(factors):.2f} (1: the suite of 8ff64c3 takes 522 s)")
    for tier in TIERS:
        files = _files(tier, results)
        parts = [part for file in files if (part := read_part(file)) is not None]
        if not parts:
            print(f"{tier.name}: did not run")
            continue
        seconds, factor = max(part.seconds for part in parts), factor_of(files) or 1.0
        tests = sum(part.tests for part in parts)
        print(
            f"{tier.name}: {tests} tests, {seconds:.0f} s, factor {factor:.2f}, {seconds / factor:.0f} s on the "
            f"reference machine, limit {tier.limit_s:.0f} s"
        )
        for took, test in sorted((test for part in parts for test in part.slowest), reverse=True)[:SLOWEST]:
            print(f"    {took:7.1f} s  {test}")
        if over_limit(tier, parts, factor):
            too_slow.append(tier)
    for tier in too_slow:
        print(f"{tier.name} took more than {TOLERANCE} times its limit of {tier.limit_s:.0f} s: see its slowest tests")
    return 1 if too_slow else 0


def _files(tier: Tier, results: Path) -> list[Path]:
    return [results / f"{name}.xml" for name in tier.parts]


if __name__ == "__main__":
    sys.exit(main())
