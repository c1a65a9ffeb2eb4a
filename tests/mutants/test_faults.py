"""Every bug planted in the launcher or on a node is found by the test that its entry names."""

import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

from tests.mutants.faults import FOUND, MISSED, all_faults

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest) -> Iterator[IO[str]]:
    """Yield the lines that `python -m tests.mutants.faults` prints for the selected bugs, as it prints them."""
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    command = [sys.executable, "-m", "tests.mutants.faults", *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        yield process.stdout
        process.kill()


@pytest.mark.parametrize("name", all_faults())
def test_the_named_test_finds_the_planted_bug(name: str, lines: IO[str]):
    """The program plants the bugs in the order of these tests. It may print warnings in between."""
    printed = [""]
    for line in lines:
        printed.append(line)
        if line.startswith((FOUND, MISSED)):
            break
    assert printed[-1].startswith(f"{FOUND} {name}: "), "".join(printed)
