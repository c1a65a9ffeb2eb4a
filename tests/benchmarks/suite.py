"""suite: where do the seconds of the tests go, which tests find which planted bugs, what does only one test cover?

    python -m tests.benchmarks.suite --before before.xml --json     after `make test`, whose seconds it reads

`--before`: pytest's JUnit file of an earlier commit, for the table of seconds per file. Bugs are planted one at a time
(tests/mutants/plugin.py) under the quick tests of the queue and the coordinator, and under the hunt of `make test`.
Lines that only one test runs come from a run of the quick tests of engine and launcher with coverage's contexts; code
that runs in other processes is not in them.
"""

import argparse
import contextlib
import sqlite3
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from tests.benchmarks.page import ROOT, load_now, publish
from tests.mutants.catalogue import MUTANTS
from tests.mutants.hunt import hunt
from tests.simulation.schedules import in_processes
from tests.tiers import RESULTS

UNIT_TESTS = ("queue", "coordinator", "membership", "journal", "server", "worker", "regrouping", "explorer")
"""Files of tests/engine that drive the queue or the coordinator in the pytest process."""

FILES_SHOWN = 25


def seconds_by_file(junit: Path) -> Counter[str]:
    """Return the seconds that the tests of each file took, by its module name."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        name = str(case.get("classname"))
        module = name.rpartition(".")[0] if name.rpartition(".")[2][:1].isupper() else name
        seconds[module] += float(case.get("time", 0))
    return seconds


def found_by(mutant: str) -> list[str]:
    """Plant one bug and return the unit tests that fail."""
    files = [f"tests/engine/test_{name}.py" for name in UNIT_TESTS]
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "found.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.plugin", "--plant", mutant]
        # A planted bug may make a test wait for ever: a minute without an answer is a finding.
        subprocess.run([*command, "--timeout", "60", "--junitxml", junit, *files], cwd=ROOT, stdout=subprocess.DEVNULL)
        cases = list(ElementTree.parse(junit).getroot().iter("testcase")) if junit.exists() else []
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


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
    by_unit_tests = {name: found_by(name) for name in MUTANTS}
    by_hunt = {one.mutant: one.after for one in in_processes(hunt, list(MUTANTS))}
    lines, alone = lines_of_one_test(["tests/engine", "tests/launcher"])
    found = [name for name in MUTANTS if by_unit_tests[name] or by_hunt[name] is not None]
    slowest = [file for file, _ in (before | after).most_common(FILES_SHOWN)]
    publish(
        "test_suite",
        question="where do the seconds of the tests go, which find which bugs, what does only one test cover?",
        command="python -m tests.benchmarks.suite --before before.xml --json",
        result={
            "seconds_before": round(before.total()),
            "seconds_after": round(after.total()),
            "planted_bugs": len(MUTANTS),
            "found_by_make_test": len(found),
            "found_by_unit_tests_alone": sum(bool(tests) for tests in by_unit_tests.values()),
            "unit_tests_that_find": {name: len(tests) for name, tests in by_unit_tests.items()},
            "schedules_to_find": by_hunt,
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
                "lines only one of its tests runs": alone[file],
            }
            for file in slowest
        ],
        text=f"""
Seconds are those of each test with its fixtures; with two worker processes they overlap. `make test` finds
{len(found)} of {len(MUTANTS)} planted bugs: {sum(bool(tests) for tests in by_unit_tests.values())} by unit tests of the
queue and the coordinator, {sum(after is not None for after in by_hunt.values())} by the simulator.
{alone.total()} of {lines} lines that run in the pytest process are run by one test alone.
""",
    )


if __name__ == "__main__":
    main()
