"""Full weights over two ranks, each stopped inside a step, a checkpoint and a publish: real processes."""

import signal
from pathlib import Path

import pytest

from engine.config import ModelConfig
from tests.end_to_end.test_rank_survival import CONFIG
from tests.engine.nursery import NurseryFleet
from tests.rank_stops import POINTS, Stop, environment, happened

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FULL = CONFIG.model_copy(
    update={
        "model": ModelConfig(weights="full"),
        "iterations": 9,
        "algorithm": CONFIG.algorithm.model_copy(update={"rows_per_forward": 16}),
    }
)

KILL, FREEZE = signal.SIGKILL, signal.SIGSTOP
SIGNALS = {"step": (KILL, FREEZE), "checkpoint": (FREEZE, KILL), "publish": (KILL, FREEZE)}
"""Signals to rank 0 and to rank 1, by point."""

STOPPED = [Stop(rank=rank, point=point, signal=SIGNALS[point][rank]) for point in POINTS for rank in (0, 1)]


def test_divided_ranks_stopped_inside_steps_and_files_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks and signals at every point in turn: each batch is trained once, from the last whole checkpoint."""
    calm = trained_in_full(tmp_path / "calm")
    for name, value in environment(tmp_path / "stops", STOPPED).items():
        monkeypatch.setenv(name, value)
    assert trained_in_full(tmp_path / "disturbed") == calm
    assert sorted(happened(tmp_path / "stops")) == list(range(len(STOPPED)))


def trained_in_full(folder: Path) -> tuple[dict[int, str], str]:
    """Train full weights with two ranks. Return the manifests by batch and the last checkpoint's digest."""
    fleet = NurseryFleet(folder, FULL)
    try:
        for node in ("trainer", "spot-0"):
            fleet.start(node)
        assert fleet.wait_until_finished(seconds=600).reason == "iterations", fleet.logs()
        assert sorted({event.iteration for event in fleet.events("iteration_done")}) == list(range(FULL.iterations))
        return fleet.manifests(), fleet.events("checkpoint_saved")[-1].digest
    finally:
        fleet.close()
