"""Seconds that each tier of the tests may take, held against its last run.

    python -m tests.tiers    reads test-results/*.xml, prints a table, exits 1 if a tier took 20 % more than its limit

The Makefile has pytest write `test-results/PART.xml` for each part of a tier. Parts that run side by side belong to one
tier, whose time is the time of its longest part. The limits hold on the reference machine: two cores, nothing else
running. A machine that is slower just now is measured first, and the limits grow with it. `.ci/run` is the only place
that calls this, so a slow laptop fails no test.
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

TOLERANCE = 1.2
"""A run may take so many times its limit: the reference machine is a virtual one, and its speed varies."""

REFERENCE_S = 1.0
"""Seconds that `machine_seconds` takes on the reference machine."""

SLOWEST = 12
"""Tests that the table names for each part."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One `make` target. `parts`: names of its result files. `limit_s`: of pytest, without the environment's set-up."""

    name: str
    parts: tuple[str, ...]
    limit_s: float


TIERS = (
    Tier(name="test", parts=("test",), limit_s=600),
    Tier(name="test-slow", parts=("test-slow",), limit_s=1200),
    Tier(name="test-clouds", parts=("test-clouds-run", "test-clouds-parts"), limit_s=2400),
    Tier(name="test-clouds-faults-runs", parts=("test-clouds-faults-runs",), limit_s=2400),
    Tier(name="test-clouds-faults-parts", parts=("test-clouds-faults-parts",), limit_s=1200),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a pytest run's JUnit file that is used here. `slowest`: (seconds, test), longest first."""

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


def _work() -> None:
    digest = b""
    for number in range(1_000_000):
        digest = hashlib.blake2b(digest + number.to_bytes(4, "big"), digest_size=16).digest()


def machine_seconds() -> float:
    """Measure this machine: the seconds that two processes take for the same fixed work side by side, best of three."""
    best = float("inf")
    for _ in range(3):
        processes = [multiprocessing.get_context("fork").Process(target=_work) for _ in range(2)]
        begun = time.perf_counter()
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        best = min(best, time.perf_counter() - begun)
    return best


def over_limit(tier: Tier, parts: list[Part], slower: float = 1.0) -> bool:
    """Return whether the tier took more than its limit and the tolerance, on a machine so many times slower."""
    return max((part.seconds for part in parts), default=0.0) > tier.limit_s * TOLERANCE * max(1.0, slower)


def main(results: Path = RESULTS, measured_s: Callable[[], float] = machine_seconds) -> int:
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
