"""A lost coordinator on Ray, without a spot node: Ray restarts a dead actor, and does not notice a frozen one."""

import os
import signal
from pathlib import Path

import pytest

from engine.config import ExplorationConfig, RuntimeConfig
from tests.end_to_end.test_survival import CONFIG
from tests.engine.nursery import NurseryFleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

pytest.importorskip("ray")

ITERATIONS = 4


def log_of_supervisor(folder: Path, number: signal.Signals) -> str:
    """Run a trainer alone, and send the signal to its coordinator after a batch. Return the supervisor's log."""
    runtime = RuntimeConfig.model_validate({**CONFIG.runtime.model_dump(), "name": "ray"})
    alone = {"iterations": ITERATIONS, "runtime": runtime, "exploration": ExplorationConfig(mode="none")}
    fleet = NurseryFleet(folder, CONFIG.model_copy(update=alone))
    try:
        fleet.start("trainer")
        fleet.wait_for_iteration(1)
        os.kill(fleet.pid_of("trainer", "coordinator"), number)
        assert fleet.wait_until_finished(seconds=100).reason == "iterations", fleet.logs()
        assert sorted(fleet.manifests()) == list(range(ITERATIONS))
        return (folder / "nodes/trainer/logs/supervisor.log").read_text()
    finally:
        fleet.close()


def test_a_killed_coordinator_on_ray_is_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    assert "frozen" not in log_of_supervisor(tmp_path, signal.SIGKILL)


def test_a_frozen_coordinator_on_ray_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    assert "the coordinator is frozen: killed" in log_of_supervisor(tmp_path, signal.SIGSTOP)
