from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.provision.local.processes import kill_all


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a temporary SPOTRL_HOME, and kill every process that carries the mark of one of its folders."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    yield tmp_path
    for folder in [*tmp_path.glob("nodes/*"), *tmp_path.glob("runs/*/nodes/*")]:
        kill_all(folder, None)
