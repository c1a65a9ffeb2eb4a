"""Puts the GPU checks into the order of `order.py`."""

from pathlib import Path

import pytest

from tests.gpu.order import UnknownCheck, place

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the checks of this folder behind all other tests. A check without a place stops pytest."""
    checks = [item for item in items if item.path.parent == FOLDER and item.get_closest_marker("gpu")]
    chosen = set(checks)
    others = [item for item in items if item not in chosen]
    try:
        checks.sort(key=lambda item: place(item.nodeid))
    except UnknownCheck as error:
        raise pytest.UsageError(str(error)) from None
    items[:] = [*others, *checks]
