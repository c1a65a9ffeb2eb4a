"""Pytest plugin that plants one bug of the catalogue for a whole test run.

    pytest -p tests.mutants.plugin --plant no_fence_on_finish tests/engine/test_queue.py

A test that fails now finds this bug. The bug is planted in the pytest process only: tests that start real processes
run the code as it is.
"""

from collections.abc import Iterator

import pytest

from tests.mutants.catalogue import MUTANTS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", choices=sorted(MUTANTS), required=True, help="name of the bug to plant")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Run all tests with the bug in place."""
    with MUTANTS[session.config.getoption("--plant")].planted():
        return (yield)
