"""`spotrl launch` as users run it: a real engine on local nodes that a trace preempts, with a user's own reward."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.main import run
from launcher.decide.facts import OVER
from launcher.exit_codes import ExitCode
from launcher.ledger.store import open_ledger
from launcher.provision.local.processes import is_alive
from launcher.runs.views import RunView, run_view

pytestmark = pytest.mark.timeout(600)  # a run with timed preemptions buys more nodes on a slow computer

JOB = """
name: {name}
infra: local
clock_factor: {factor}
preemptions: {{trace: {trace}}}
iterations: {iterations}
prompts: prompts.txt
reward: {reward}
algorithm: {{prompts_per_batch: 4, images_per_prompt: 4}}
exploration: {{mode: stale, wait: all, budget: {{candidates: 32}}, profiles: [{{shape: 16}}]}}
evaluation: {{prompts: 16, every: 10}}
runtime: {{shape: 8, lease_seconds: 2, heartbeat_seconds: 0.5, step_seconds: {step}}}
resources:
  trainer: {{accelerators: L40S:1, use_spot: false}}
  rollout: {{accelerators: L40S:1, use_spot: true, num_nodes: {spot}}}
budget: {{max_total: $100, max_hourly: $20}}
"""

REWARD = """
from engine.rewards.ocr import OcrReward

read = OcrReward("ocr")


def share_of_digits_read(pictures, prompts):
    return [score.metrics["similarity"] for score in read(pictures, prompts)]
"""


class Bench:
    """A folder with a job, a separate state folder, and the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SPOTRL_HOME": str(folder / "state"), "NO_COLOR": "1"}
        (folder / "mine.py").write_text(REWARD)
        for name in (
            "engine",
            "launcher",
            "torch",
        ):  # a user's own modules: no process of ours may import them in place of ours
            (folder / f"{name}.py").write_text("raise AssertionError('the wrong one')\n")
        (folder / "prompts.txt").write_text("\n".join(f"{n * 137 % 10000:04d}" for n in range(100)))

    def job(self, name: str, iterations: int, **more: object) -> str:
        """Write the job file. `more`: fields of `JOB` that differ from a run with one spot node and no preemption."""
        fields: dict[str, object] = {"spot": 1, "reward": "ocr", "factor": 300, "trace": "none", "step": 0.0, **more}
        path = self.folder / f"{name}.yaml"
        path.write_text(JOB.format(name=name, iterations=iterations, **fields))
        return path.name

    def spotrl(self, *arguments: str, exit_code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "launcher.cli.main", *arguments],  # like the installed program
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == exit_code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def spotrl_here(self, *arguments: str) -> None:
        """Run a command in this process, which has done the imports that take a new process ten seconds."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setenv("SPOTRL_HOME", self.environment["SPOTRL_HOME"])
            assert run(arguments) == ExitCode.OK

    def view(self, name: str) -> RunView:
        """Read the ledger in this process, because frequent `spotrl status` commands would slow down the run."""
        return run_view(self._sessions, name)

    @functools.cached_property
    def _sessions(self) -> sessionmaker[Session]:
        return open_ledger(self.folder / "state" / "ledger.sqlite")

    def wait_for(self, name: str, what: Callable[[RunView], bool], seconds: float = 300.0) -> RunView:
        until = time.monotonic() + seconds
        while not what(view := self.view(name)):
            assert time.monotonic() < until, view
            time.sleep(0.1)
        return view

    def processes(self) -> list[psutil.Process]:
        """Return every process of this state folder."""
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


def test_a_preempted_launch_recovers_and_accounts_for_every_micro_dollar(
    bench: Bench, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    # The first node is preempted with notice 33 minutes after it is ready; its successor after 8, without notice. On
    # every machine the run takes 1 h 25 min of its own clock.
    more = {"spot": 2, "reward": "mine:share_of_digits_read", "factor": 200, "trace": "bamboo-p3"}
    job = bench.job("taken", iterations=24, **more)
    bench.spotrl("launch", job, "--yes", "--result", "result.json", "--html", "report.html", "--on-exit", "down")
    result = json.loads((bench.folder / "result.json").read_text())
    assert {taken["notice"] for taken in result["preemptions"]} == {True, False}
    assert all(taken["replaced_after_s"] > 0 for taken in result["preemptions"][:2])
    amounts = result["micro_usd"]
    assert amounts["total"] > 0
    for split in ("by_phase", "by_node", "by_market"):
        assert sum(amounts[split].values()) == amounts["total"], split
    assert amounts["by_phase"]["exploration"] > 0
    assert result["money_basis"] == "assumed"
    assert result["leftovers"] == {"processes": []}
    assert bench.processes() == []
    page = (bench.folder / "report.html").read_text()
    assert "<svg" in page
    assert "data:image/png;base64," in page
    capsys.readouterr()
    bench.spotrl_here("report", "taken", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["costs"]["total"] == amounts["total"]
    origin = report["provenance"]
    assert [one["command"].partition(" --result")[0] for one in origin["commands"]] == [
        "spotrl launch taken.yaml --yes"
    ]
    assert len(origin["hardware"]) >= 3
    assert all("CPU core" in one["hardware"] and "GiB of memory" in one["hardware"] for one in origin["hardware"])
    request.getfixturevalue("forked_engine")  # now: the processes of the launch were started like a user's
    bench.spotrl_here("pull", "taken", "--to", "weights")
    assert (bench.folder / "weights" / "ema.safetensors").stat().st_size > 1_000_000
    assert (bench.folder / "weights" / "transformer" / "config.json").exists()


@pytest.mark.slow  # tests/launcher/cluster/test_runs.py kills controllers and resumes runs without an engine
def test_a_run_survives_its_controller_and_resumes_from_its_checkpoint(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controller freezes, then dies; another one resumes the run, which is stopped and resumed again."""
    bench.spotrl("launch", bench.job("orphan", iterations=6), "--yes", "--detach")
    bench.wait_for("orphan", lambda run: run.iteration >= 1)
    (controller,) = [process for process in bench.processes() if "controller" in process.cmdline()]
    controller.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    controller.send_signal(signal.SIGCONT)
    bench.wait_for("orphan", lambda run: run.iteration >= 2)
    started = controller.create_time()
    controller.kill()
    while is_alive(controller.pid, started):  # the kernel takes some milliseconds to free the memory
        time.sleep(0.01)
    bench.spotrl_here("resume", "orphan")
    bench.wait_for("orphan", lambda run: run.iteration >= 3)
    bench.spotrl_here("down", "orphan")
    until = time.monotonic() + 60.0
    while bench.processes():  # the controller itself ends one pass later, which takes long on a busy computer
        assert time.monotonic() < until
        time.sleep(0.1)
    capsys.readouterr()
    bench.spotrl_here("status", "orphan", "--json")
    stopped = json.loads(capsys.readouterr().out)
    assert stopped["status"] == "stopped"
    bench.spotrl_here("ls")
    assert "orphan" in capsys.readouterr().out
    bench.spotrl_here("resume", "orphan")
    run = bench.wait_for("orphan", lambda run: run.status in OVER)
    assert (run.status, run.iteration) == ("finished", 6)
    assert run.spent_micro_usd > stopped["spent_micro_usd"]


@pytest.mark.long  # tests/launcher/cluster/test_controller.py stops runs by their budget in seconds
def test_a_budget_stops_a_run_before_it_is_exceeded(bench: Bench) -> None:
    # The budget lasts half a minute: both nodes are up before that, even on a cold computer.
    job = bench.job("poor", iterations=500, step=0.3, factor=100)
    bench.spotrl("launch", job, "--yes", "--max-total", "$3", "--result", "result.json", exit_code=7)
    result = json.loads((bench.folder / "result.json").read_text())
    assert 0 < result["micro_usd"]["total"] <= 3_000_000
    assert result["leftovers"] == {"processes": []}
    assert bench.processes() == []
