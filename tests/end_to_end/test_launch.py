"""`spotrl launch` as users run it: a real engine on local nodes, taken back by the trace, with a user's own reward."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

JOB = """
name: {name}
infra: local
clock_factor: 300
iterations: {iterations}
prompts: prompts.txt
reward: mine:share_of_digits_read
algorithm: {{prompts_per_batch: 4, images_per_prompt: 4}}
exploration: {{mode: stale, budget: {{candidates: 32}}, profiles: [{{shape: 16}}]}}
evaluation: {{prompts: 16, every: 10}}
runtime: {{shape: 8, lease_seconds: 2, heartbeat_seconds: 0.5}}
resources:
  trainer: {{accelerators: L40S:1, use_spot: false}}
  rollout: {{accelerators: L40S:1, use_spot: true, num_nodes: 2}}
budget: {{max_total: $100, max_hourly: $20}}
"""

REWARD = """
from engine.rewards.ocr import OcrReward

read = OcrReward("ocr")


def share_of_digits_read(pictures, prompts):
    return [score.metrics["similarity"] for score in read(pictures, prompts)]
"""


class Bench:
    """A folder with a job, a state folder of its own, and the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SPOTRL_HOME": str(folder / "state"), "NO_COLOR": "1"}
        (folder / "mine.py").write_text(REWARD)
        (folder / "prompts.txt").write_text("\n".join(f"{n * 137 % 10000:04d}" for n in range(100)))

    def job(self, name: str, iterations: int) -> str:
        path = self.folder / f"{name}.yaml"
        path.write_text(JOB.format(name=name, iterations=iterations))
        return path.name

    def spotrl(self, *arguments: str, exit_code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli.main", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == exit_code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def status(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.spotrl("status", name, "--json")))

    def wait_for(self, name: str, what: Any, seconds: float = 120.0) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while not what(status := self.status(name)):
            assert time.monotonic() < until, status
            time.sleep(0.3)
        return status

    def processes(self) -> list[psutil.Process]:
        """Everything that was started for this state folder."""
        mark = str(self.folder / "state")
        found = []
        for process in psutil.process_iter():
            try:
                if any(mark in part for part in process.cmdline()) or process.environ().get("SPOTRL_HOME") == mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for process in bench.processes():
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def test_a_launch_is_preempted_recovers_and_accounts_for_every_micro_dollar(bench: Bench) -> None:
    job = bench.job("taken", iterations=20)
    bench.spotrl("launch", job, "--yes", "--result", "result.json", "--html", "report.html", "--on-exit", "down")
    result = json.loads((bench.folder / "result.json").read_text())
    assert {taken["notice"] for taken in result["preemptions"]} == {True, False}
    assert all(taken["replaced_after_s"] > 0 for taken in result["preemptions"][:2])
    money = result["micro_usd"]
    assert money["total"] > 0
    for split in ("by_phase", "by_node", "by_market"):
        assert sum(money[split].values()) == money["total"], split
    assert money["by_phase"]["exploration"] > 0
    assert result["money_basis"] == "assumed"
    assert result["leftovers"] == {"processes": []}
    assert bench.processes() == []
    page = (bench.folder / "report.html").read_text()
    assert "<svg" in page
    assert "data:image/png;base64," in page
    shown = json.loads(bench.spotrl("report", "taken", "--json"))
    assert str(money["total"]) in json.dumps(shown)
    bench.spotrl("pull", "taken", "--to", "weights")
    assert (bench.folder / "weights" / "ema.safetensors").stat().st_size > 1_000_000


def test_a_run_whose_controller_freezes_and_then_dies_is_resumed_and_ends_well(bench: Bench) -> None:
    bench.spotrl("launch", bench.job("orphan", iterations=10), "--yes", "--detach")
    bench.wait_for("orphan", lambda status: status["iteration"] >= 1)
    (controller,) = [process for process in bench.processes() if "controller" in process.cmdline()]
    controller.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    controller.send_signal(signal.SIGCONT)
    bench.wait_for("orphan", lambda status: status["iteration"] >= 3)
    controller.kill()
    bench.spotrl("resume", "orphan")
    status = bench.wait_for("orphan", lambda status: status["status"] in ("finished", "failed", "stopped"))
    assert (status["status"], status["iteration"]) == ("finished", 10)
    assert "orphan" in bench.spotrl("ls")


def test_a_stopped_run_goes_on_from_its_checkpoint_when_it_is_resumed(bench: Bench) -> None:
    bench.spotrl("launch", bench.job("paused", iterations=8), "--yes", "--detach")
    bench.wait_for("paused", lambda status: status["iteration"] >= 3)
    bench.spotrl("down", "paused")
    until = time.monotonic() + 5.0
    while bench.processes():  # the controller itself ends a pass later
        assert time.monotonic() < until
        time.sleep(0.1)
    stopped = bench.status("paused")
    assert stopped["status"] == "stopped"
    bench.spotrl("resume", "paused")
    status = bench.wait_for("paused", lambda status: status["status"] in ("finished", "failed"))
    assert (status["status"], status["iteration"]) == ("finished", 8)
    assert status["spent_micro_usd"] > stopped["spent_micro_usd"]


def test_a_budget_stops_a_run_before_it_is_exceeded(bench: Bench) -> None:
    job = bench.job("poor", iterations=500)
    bench.spotrl("launch", job, "--yes", "--max-total", "$6", "--result", "result.json", exit_code=7)
    result = json.loads((bench.folder / "result.json").read_text())
    assert 0 < result["micro_usd"]["total"] <= 6_000_000
    assert result["leftovers"] == {"processes": []}
    assert bench.processes() == []
