"""Time limits of the test tiers, compared with the last run.

    python -m tests.tiers    reads test-results/*.xml and prints a table; exits 1 if a tier took 3 times its limit

The Makefile makes pytest write `test-results/PART.xml` for each part of a tier. Parallel parts belong to one tier: its
time is that of the longest part. The limits hold on the reference computer: two idle cores. The speed of this computer
is measured first, and the limits grow on a slower one. Only `.ci/run` calls this, so a slow laptop fails no test.
"""

import hashlib
import multiprocessing
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "test-results"

TOLERANCE = 3.0
"""A run may exceed its limit by this factor. One small measurement predicts the time of a tier badly: `make test` took
615 s on one day. On another it took 1100 s, and `make test-slow` 1696 s instead of 827 s, on a machine that measured as
.93. The code of the first day was as slow there."""

REFERENCE_S = 1.0
"""Seconds that `computer_seconds` takes on the reference computer."""

ROUNDS = 1_000_000
"""Hashes that `computer_seconds` computes in each process."""

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
    Tier(name="test-long", parts=("test-long",), limit_s=3000),
    Tier(name="test-clouds", parts=("test-clouds-run", "test-clouds-parts"), limit_s=2400),
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


def computer_seconds() -> float:
    """Measure this computer: the seconds of two parallel processes for the same fixed work, best of three."""
    best = float("inf")
    for _ in range(3):
        processes = [multiprocessing.get_context("fork").Process(target=fixed_work) for _ in range(2)]
        begun = time.perf_counter()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        best = min(best, time.perf_counter() - begun)
    return best


def over_limit(tier: Tier, parts: list[Part], slower: float = 1.0) -> bool:
    """Return whether the tier exceeded its limit and the tolerance, on a computer this many times slower."""
    return max((part.seconds for part in parts), default=0.0) > tier.limit_s * TOLERANCE * max(1.0, slower)


def main(results: Path = RESULTS, measured_s: Callable[[], float] = computer_seconds) -> int:
    """Print one line per tier and its slowest tests. Return 1 if a tier is over its limit."""
    too_slow = []
    slower = measured_s() / REFERENCE_S
    print(f"this machine takes {slower:.2f} times as long as the reference machine")
    for tier in TIERS:
        parts = [part for name in tier.parts if (part := read_part(results / f"{name}.xml")) is not None]
        if not parts:
            print(f"{tier.name}: did not run")
            continue
        seconds = max(part.seconds for part in parts)
        print(f"{tier.name}: {sum(part.tests for part in parts)} tests, {seconds:.0f} s, limit {tier.limit_s:.0f} s")
        for took, test in sorted((one for part in parts for one in part.slowest), reverse=True)[:SLOWEST]:
            print(f"    {took:7.1f} s  {test}")
        if over_limit(tier, parts, slower):
            too_slow.append(tier)
    for tier in too_slow:
        print(f"{tier.name} took more than {TOLERANCE} times its limit of {tier.limit_s:.0f} s: see its slowest tests")
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
