"""Which bugs do the tests with real processes find, and which test finds a bug that no other test finds?

    python -m tests.benchmarks.process_bugs --json    writes the page from the results of tests/mutants/processes.py

The results are in results/process_bugs.json, where `python -m tests.mutants.processes --matrix FILE ...` puts them.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.page import load_now, origin, write_page
from tests.mutants.processes import BUGS, RESULTS, Store, tests_that_find

MORE_TESTS = 2
"""Tests that a row of the page names before it only counts them."""


def short(test: str) -> str:
    """Return a test's id without the folders of its file."""
    return test.rpartition("/")[2].replace(".py::test_", ": ")


def only_finders(found: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return the bugs that one test alone finds, by test."""
    alone: dict[str, list[str]] = {}
    for bug, tests in found.items():
        if len(tests) == 1:
            alone.setdefault(next(iter(tests)), []).append(bug)
    return dict(sorted(alone.items()))


def files_alone(found: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return the bugs that the tests of one file alone find, by file."""
    alone: dict[str, list[str]] = {}
    for bug, tests in found.items():
        files = {test.partition("::")[0] for test in tests}
        if len(files) == 1:
            alone.setdefault(files.pop(), []).append(bug)
    return dict(sorted(alone.items()))


def rows_of(store: Store, found: Mapping[str, set[str]]) -> list[dict[str, Any]]:
    """Return a row for each bug: its process, and the tests that find it."""
    rows = []
    for bug in BUGS.values():
        named = [test for test in bug.found_by if test in found[bug.name]]
        others = sorted(found[bug.name] - set(named))
        shown = [*named, *others][:MORE_TESTS]
        text = "; ".join(map(short, shown)) or "none"
        more = len(found[bug.name]) - len(shown)
        mark = " (reader)" if bug.chosen_by_reader else ""
        rows.append(
            {
                "bug": f"{bug.name}{mark}",
                "process": bug.process,
                "found by": text + (f"; {more} more" if more > 0 else ""),
            }
        )
    return rows


def text_of(store: Store, found: Mapping[str, set[str]]) -> str:
    """Return what the table means, and a line for each test file that alone finds bugs."""
    undisturbed = store.values.get("undisturbed", {})
    complete = [file for file in sorted(undisturbed) if all(store.get(("matrix", bug, file)) for bug in found)]
    whole = ", ".join(f"{short(file)} ({undisturbed[file]['seconds']:.0f} s)" for file in complete) or "none"
    missed = ", ".join(bug for bug, tests in found.items() if not tests)
    text = (
        f"{sum(map(bool, found.values()))} of {len(found)} bugs are found{f'; not {missed}' if missed else ''}. Each "
        "bug is a change in the source of one module, in every process that a test starts and never in pytest's own. "
        "Tests of one process miss all of them: with the bugs planted in pytest's process alone, the files under `own` "
        "of the raw figures pass. The named tests pass without a bug. (reader): chosen from the code alone. "
        f"Whole test files that ran with every bug: {whole}. Of other files only the named tests ran, so a file of the "
        "list below is alone among the tests that ran."
    )
    alone = (f"- {short(file)}: {', '.join(bugs)}" for file, bugs in files_alone(found).items())
    return "\n".join(
        [
            "## What the figures mean",
            "",
            *textwrap.wrap(text, 120),
            "",
            "## Files that alone find a bug",
            "",
            *alone,
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, and print the figures as one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.process_bugs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line")
    chosen = parser.parse_args(arguments)
    store = Store(RESULTS)
    found = {bug: tests_that_find(store, bug) for bug in BUGS}
    figures = {
        "bugs": len(found),
        "found": sum(map(bool, found.values())),
        "found_by": {bug: sorted(tests) for bug, tests in found.items()},
        "alone_by_test": only_finders(found),
        "alone_by_file": files_alone(found),
    }
    write_page(
        "process_bugs",
        question="which planted bugs do only tests with real processes find?",
        command="python -m tests.mutants.processes --matrix FILE ... --json",
        whole={**store.values, **figures, **origin(load_now())},
        rows=rows_of(store, found),
        text=text_of(store, found),
    )
    if chosen.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
