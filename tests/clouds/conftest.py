"""One world of fake clouds for all tests here. If it cannot start, the tests skip with the reason."""

from collections.abc import Iterator

import pytest

from tests.fakes.clouds.world import World, why_not


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Start the fake clouds. Tests share them: each test clears its faults and removes its resources."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with World().up() as world:
        yield world


@pytest.fixture(autouse=True)
def _no_fault_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    world = request.getfixturevalue("world") if "world" in request.fixturenames else None
    yield
    if world is not None:
        world.clear()
