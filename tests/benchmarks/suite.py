"""suite: where do the seconds of the tests go, which tests find which planted bugs, what does only one test cover?

    python -m tests.benchmarks.suite --before before.xml --json     after `make test`, whose seconds it reads

`--before`: pytest's JUnit file of an earlier commit, for the table of seconds per file. Each planted bug of the queue
meets the quick tests of the queue and the coordinator, which stop at the first test that fails, and the hunt of
`make test`. Each planted bug of launcher and nodes meets the test that its entry names. Lines that only one test runs
come from a run of the quick tests of engine and launcher with coverage's contexts. Code that runs in other processes
is not in them.
"""

import argparse
import contextlib
import io
import os
import sqlite3
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest

from tests.benchmarks.page import ROOT, load_now, publish
from tests.conftest import PROCESSOR_SECONDS
from tests.mutants.catalogue import MUTANTS
from tests.mutants.faults import all_faults, forget_tests
from tests.mutants.hunt import hunt
from tests.simulation.schedules import in_processes
from tests.tiers import RESULTS

UNIT_FILES = [
    f"tests/engine/test_{name}.py"
    for name in ("queue", "coordinator", "membership", "journal", "regrouping", "explorer", "server", "worker")
]
"""Files that drive the queue or the coordinator in the pytest process, the quickest first."""

FILES_SHOWN = 25


def seconds_by_file(junit: Path) -> Counter[str]:
    """Return the seconds that the tests of each file took, by its module name."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        seconds[_module(case)] += float(case.get("time", 0))
    return seconds


def run_of(junit: Path) -> str:
    """Return which run of pytest a JUnit file is of: the number of its tests and when it began."""
    suites = ElementTree.parse(junit).getroot().iter("testsuite")
    return ", ".join(f"{one.get('tests')} tests, begun {str(one.get('timestamp'))[:16]}" for one in suites)


def waits_by_file(junit: Path) -> Counter[str]:
    """Return the seconds in which neither pytest's process nor children that it reaped computed, by test file.

    The tests waited then: for a timer, a lease, or processes that still run, such as the agents of nodes.
    """
    waits: Counter[str] = Counter()
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        taken = next((p.get("value") for p in case.iter("property") if p.get("name") == PROCESSOR_SECONDS), None)
        if taken is not None:
            waits[_module(case)] += max(0.0, float(case.get("time", 0)) - float(taken))
    return waits


def _module(case: ElementTree.Element) -> str:
    name = str(case.get("classname"))
    return name.rpartition(".")[0] if name.rpartition(".")[2][:1].isupper() else name


def found_by(mutant: str) -> str | None:
    """Plant one bug in a forked process. Return the first unit test that fails there, or None."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "found.xml"
        pid = os.fork()
        if pid == 0:
            try:
                forget_tests()
                with MUTANTS[mutant].planted(), contextlib.redirect_stdout(io.StringIO()):
                    # A planted bug may make a test wait for ever: a minute without an answer is a finding.
                    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--timeout", "60", f"--junitxml={junit}"]
                    pytest.main([*arguments, *UNIT_FILES])
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        cases = list(ElementTree.parse(junit).getroot().iter("testcase")) if junit.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return f"{_module(failed[0])}::{failed[0].get('name')}" if failed else None


def quick_tests(files: Iterable[str]) -> list[str]:
    """Return the node ids of the tests of these files that `make test` runs."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    return [line for line in printed.splitlines() if "::" in line]


def lines_of_one_test(paths: list[str]) -> tuple[int, Counter[str]]:
    """Run tests under coverage. Return the lines that were run, and how many of them each file's tests run alone."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "coverage"
        rc = Path(folder) / "rc"
        rc.write_text(f"[run]\ndata_file = {data}\nsource = engine,launcher\ndynamic_context = test_function\n")
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={rc}", "-m", "pytest", "-q", *paths]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        with contextlib.closing(sqlite3.connect(data)) as connection:
            rows = connection.execute(
                "select context.context, line_bits.file_id, line_bits.numbits from line_bits"
                " join context on context.id = line_bits.context_id where context.context != ''"
            ).fetchall()
    tests_of: dict[tuple[int, int], set[str]] = {}
    for context, file, bits in rows:
        for at, byte in enumerate(bits):
            for bit in range(8):
                if byte & (1 << bit):
                    tests_of.setdefault((file, at * 8 + bit), set()).add(context)
    alone = Counter(next(iter(tests)).rpartition(".")[0] for tests in tests_of.values() if len(tests) == 1)
    return len(tests_of), alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="JUnit file of an earlier commit")
    parser.add_argument("--after", type=Path, default=RESULTS / "test.xml", help="JUnit file of `make test` now")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    before, after = seconds_by_file(options.before), seconds_by_file(options.after)
    for file in UNIT_FILES:
        import_module(file.removesuffix(".py").replace("/", "."))  # what tests import, once for all bugs
    by_unit_tests = {name: found_by(name) for name in MUTANTS}
    faults = all_faults()
    quick = quick_tests({fault.found_by.partition("::")[0] for fault in faults.values()})
    by_named_tests = {
        name: fault.is_found()
        for name, fault in faults.items()
        if any(test.partition("[")[0] == fault.found_by.partition("[")[0] for test in quick)
    }
    by_hunt = {one.mutant: one.after for one in in_processes(hunt, list(MUTANTS))}
    lines, alone = lines_of_one_test(["tests/engine", "tests/launcher"])
    found = [name for name in MUTANTS if by_unit_tests[name] or by_hunt[name] is not None]
    slowest, waits = [file for file, _ in (before | after).most_common(FILES_SHOWN)], waits_by_file(options.after)
    publish(
        "test_suite",
        question="where do the seconds of the tests go, which find which bugs, what does only one test cover?",
        command="python -m tests.benchmarks.suite --before before.xml --json",
        result={
            "before": run_of(options.before),
            "after": run_of(options.after),
            "seconds_before": round(before.total()),
            "seconds_after": round(after.total()),
            "seconds_waited_after": round(waits.total()),
            "planted_bugs_of_the_queue": len(MUTANTS),
            "found_by_make_test": len(found),
            "found_by_unit_tests_alone": sum(test is not None for test in by_unit_tests.values()),
            "unit_test_that_finds": by_unit_tests,
            "schedules_to_find": by_hunt,
            "planted_bugs_of_launcher_and_nodes": len(faults),
            "whose_test_is_in_make_test": len(by_named_tests),
            "found_by_it": sum(by_named_tests.values()),
            "lines_run": lines,
            "lines_of_one_test": alone.total(),
            "lines_of_one_test_by_file": dict(alone.most_common(FILES_SHOWN)),
        },
        runs=1,
        seeds=[],
        load1=load1,
        rows=[
            {
                "file": file,
                "s before": round(before[file], 1),
                "s after": round(after[file], 1),
                "s waited": round(waits[file], 1),
                "lines only one of its tests runs": alone[file],
            }
            for file in slowest
        ],
        text=f"""
Before: {run_of(options.before)}. After: {run_of(options.after)}.
Seconds are those of each test with its fixtures; with several worker processes they overlap. "Waited" are seconds in
which neither pytest's process nor children that ended computed: timers, leases, and agents that compute by themselves.
`make test` finds {len(found)} of {len(MUTANTS)} planted bugs of the queue:
{sum(test is not None for test in by_unit_tests.values())} by unit tests of the queue and the coordinator,
{sum(after is not None for after in by_hunt.values())} by the simulator. Of {len(faults)} planted bugs of launcher and
nodes {len(by_named_tests)} have their test in `make test`, which finds {sum(by_named_tests.values())}.
{alone.total()} of {lines} lines that run in the pytest process are run by one test alone.
""",
    )


if __name__ == "__main__":
    main()
