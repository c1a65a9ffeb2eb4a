"""Pytest plugin that plants bugs into processes of tests, and writes each test's outcome to a file.

    pytest -p tests.mutants.process_plugin --bugs FILE --where children --outcomes FILE tests/engine/test_agent.py

With `--where children`, pytest's own process has no bug, and every process that it starts has the bugs. A test that
fails now finds a bug in a process. With `--where own`, the caller starts pytest with the environment of `planted_in`,
and the plugin removes it: only pytest's own process has the bugs.
"""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

SITE = Path(__file__).parent / "planted_site"
VARIABLE = "SPOTRL_PLANTED_BUG"
PATH = "PYTHONPATH"

ENDED = "all tests have ended"
"""Stands for a test in the last line of the outcomes. Pytest may then still wait for a process that a test left."""


def planted_in(environment: Mapping[str, str], bugs: Path) -> dict[str, str]:
    """Return the environment of a process that has the bugs of a file."""
    path = os.pathsep.join(filter(None, (str(SITE), environment.get(PATH, ""))))
    return {**environment, PATH: path, VARIABLE: str(bugs)}


def without_bugs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process without planted bugs."""
    path = os.pathsep.join(one for one in environment.get(PATH, "").split(os.pathsep) if one not in ("", str(SITE)))
    kept = {name: value for name, value in environment.items() if name not in (PATH, VARIABLE)}
    return {**kept, PATH: path} if path else kept


def inherited() -> dict[str, str]:
    """Return the variables that plant this process's bugs, for a server that gives its sessions no others."""
    return {name: os.environ[name] for name in (PATH, VARIABLE)} if VARIABLE in os.environ else {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bugs", type=Path, required=True, help="file with the edits of the bugs")
    parser.addoption("--where", choices=("children", "own"), required=True, help="processes that have the bugs")
    parser.addoption("--outcomes", type=Path, required=True, help="file to which each outcome is appended")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("workers of pytest-xdist are processes too, and would have the bugs: leave out -n")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # processes inherit an ignored signal, for example of nohup
    children = config.getoption("--where") == "children"
    environment = planted_in(os.environ, config.getoption("--bugs")) if children else without_bugs(os.environ)
    for name in (PATH, VARIABLE):
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]
    config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


class _Outcomes:
    """Appends a JSON line when a test starts, and one for each of its phases: [test, phase, outcome, seconds]."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write([nodeid, "start", "", 0.0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write([report.nodeid, report.when, report.outcome, round(report.duration, 3)])

    def pytest_sessionfinish(self) -> None:
        self._write([ENDED, "end", "", 0.0])

    def _write(self, line: list[object]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
