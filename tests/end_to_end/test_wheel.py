"""The wheel works outside a checkout: it contains all files that the program reads, and no tests."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # builds and installs the wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel to a folder like pip, and return the folder."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("spotrl-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.startswith("tests/")]
    target = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return target


def run(installed: Path, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "SPOTRL_HOME": str(folder / "state")}
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_contains_the_base_model_the_catalog_and_the_trace(installed: Path, tmp_path: Path) -> None:
    code = """
import engine, launcher
from engine.config import ModelConfig
from engine.models.load import load_adapter, trainable
from launcher.market.offers import read_catalog
from launcher.provision.local.preemptions import preemption_schedule
from launcher.job.schema import Job
print(launcher.__path__[0], len(trainable(load_adapter(ModelConfig()))) > 0, len(read_catalog()) > 0)
print(preemption_schedule(Job(name="x").preemptions).describe())
"""
    out = run(installed, tmp_path, "-c", code)
    assert out.startswith(str(installed))
    assert "True True" in out


@pytest.mark.long
def test_the_wheel_can_write_and_plan_a_job_and_store_it_in_a_ledger(installed: Path, tmp_path: Path) -> None:
    run(installed, tmp_path, "-m", "launcher.cli.main", "init", "job.yaml")
    plan = run(installed, tmp_path, "-m", "launcher.cli.main", "launch", "job.yaml", "--dry-run")
    assert "nothing was bought" in plan
    run(installed, tmp_path, "-m", "launcher.cli.main", "ls")
    assert list((tmp_path / "state").glob("*.db")) or list((tmp_path / "state").glob("ledger*"))
