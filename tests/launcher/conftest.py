import shutil
from importlib.resources import files

import pytest

from launcher.cli.main import run
from launcher.exit_codes import ExitCode
from launcher.replay import of_plan


@pytest.fixture
def few_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay each plan twice, and not up to 30 times, which takes most of the time of a dry run.

    tests/launcher/replay tests the replays.
    """
    monkeypatch.setattr(of_plan, "NODE_HOURS", 0)
    monkeypatch.setattr(of_plan, "LEAST_STARTS", 2)


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys, few_replays):
    """Call `spotrl launch --dry-run` on copies of the example jobs, in a temporary home."""
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.chdir(tmp_path)
    for file in files("sky_yamls").iterdir():
        if file.name.endswith((".yaml", ".txt", ".jsonl")):
            shutil.copy(str(file), tmp_path / file.name)

    def dry_run(name: str, *arguments: str) -> list[str]:
        assert run(["launch", f"{name}.yaml", "--dry-run", *arguments]) == ExitCode.OK
        return capsys.readouterr().out.splitlines()

    return dry_run
