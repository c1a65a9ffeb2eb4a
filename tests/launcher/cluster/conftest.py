import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.provision.local.processes import kill_all


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a temporary SPOTRL_HOME. At the end, kill every process that carries the mark of one of its folders."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    yield tmp_path
    if [*tmp_path.glob("starter.log"), *tmp_path.glob("runs/*/starter.log")]:
        end_starters()
    for folder in [*tmp_path.glob("nodes/*"), *tmp_path.glob("runs/*/nodes/*")]:
        kill_all(folder, None)


def end_starters() -> None:
    """End this process's starters of agents, with the agents that bear no mark yet.

    A test that fails may leave an order to its starter, which would start the agent after the kills by marks.
    """
    for starter in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "engine.node.starter" not in starter.cmdline():
                continue
            starter.suspend()
            for process in (*starter.children(), starter):
                process.kill()
            starter.wait()
