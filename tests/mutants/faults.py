"""Possible bugs of the launcher and of a node, planted one at a time, each with the test that finds it.

The simulator finds the bugs of the queue (catalogue.py). Usual tests find these:

    python -m tests.mutants.faults             plant each of them in turn and run its test
    python -m tests.mutants.faults NAME ...    only these; the name of an area, like safety, stands for all of its bugs

The test runs in a forked process, so that the bug is planted only there. This program starts no thread, while pytest's
own process has threads of many libraries and must not be forked. A bug that no test finds is an error.
"""

import contextlib
import importlib
import io
import os
import sys
from dataclasses import dataclass

import pytest

from tests.mutants.planted_bug import PlantedBug

AREAS = (
    "money",
    "bills",
    "placement",
    "node",
    "data",
    "scores",
    "early",
    "ranks",
    "learning",
    "clouds",
    "secrets",
    "safety",
)
"""Modules of this folder that hold a dict FAULTS."""

FOUND, MISSED = "found", "MISSED"
"""The first word of a bug's line."""


SKIPPED_CODE = 71
"""Exit code of the forked process if the test was skipped."""


class _Skips:
    """A plugin of pytest that keeps why a test was skipped."""

    why = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.why = report.longrepr[2]


@dataclass(frozen=True, kw_only=True)
class Fault(PlantedBug):
    """`found_by`: node id of a test that fails with the bug."""

    found_by: str

    def is_found(self) -> bool:
        """Plant the bug in a forked process, and return whether its test fails there.

        Raises RuntimeError if the test could not be run at all.
        """
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                forget_tests()
                with self.planted(), contextlib.redirect_stdout(io.StringIO()):
                    # This program has imported plugins' modules before pytest could rewrite them.
                    imported = "ignore::pytest.PytestAssertRewriteWarning"
                    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--timeout", "120", "-W", imported]
                    skips = _Skips()
                    code = int(pytest.main([*arguments, "-m", "", self.found_by], plugins=[skips]))
                if code == pytest.ExitCode.OK and skips.why:
                    print(f"{self.found_by}: {skips.why}", file=sys.stderr, flush=True)
                    code = SKIPPED_CODE
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == SKIPPED_CODE:
            raise RuntimeError(f"{self.found_by} was skipped, which finds nothing; `make tools` installs what it needs")
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"{self.found_by} could not be run with {self.name} planted: exit code {code}")
        return code == pytest.ExitCode.TESTS_FAILED


def forget_tests() -> None:
    """Drop the tests' own modules, so that they are imported again and see the planted bug."""
    for name in [name for name in sys.modules if name.startswith("tests.") and not name.startswith("tests.mutants")]:
        del sys.modules[name]


def all_faults() -> dict[str, Fault]:
    """Return the bugs of all areas by name."""
    return {name: fault for area in AREAS for name, fault in faults_of(area).items()}


def faults_of(area: str) -> dict[str, Fault]:
    """Return the bugs of one area by name. Raises ModuleNotFoundError for a name that is no area."""
    faults: dict[str, Fault] = importlib.import_module(f"tests.mutants.{area}").FAULTS
    return faults


def main(names: list[str]) -> int:
    """Print one line for each bug. Return 1 if one was not found."""
    faults = all_faults()
    chosen = [one for name in names for one in ([name] if name in faults else faults_of(name))] or list(faults)
    for file in {faults[name].found_by.partition("::")[0] for name in chosen}:
        importlib.import_module(
            file.removesuffix(".py").replace("/", ".")
        )  # modules that tests import, loaded once for all of them
    missed = 0
    for name in chosen:
        is_found = faults[name].is_found()
        missed += not is_found
        print(f"{FOUND if is_found else MISSED} {name}: it forgets {faults[name].forgets}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
