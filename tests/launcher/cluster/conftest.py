from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.provision.local.processes import kill_all


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A SPOTRL_HOME of its own, and no process left behind: those that carry the mark of a folder in here."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    yield tmp_path
    for folder in [*tmp_path.glob("nodes/*"), *tmp_path.glob("runs/*/nodes/*")]:
        kill_all(folder, None)
