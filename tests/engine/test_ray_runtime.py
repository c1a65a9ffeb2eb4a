"""A run on a Ray cluster with real agents, raylets and signals; one cluster for the whole file."""

import os
import signal
import time
from dataclasses import dataclass, field

import psutil
import pytest

from engine.config import CandidateBudget, EngineConfig, RuntimeConfig
from tests.end_to_end.test_survival import CANDIDATES, CONFIG
from tests.engine.fleet import Fleet
from tests.engine.nursery import NurseryFleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

pytest.importorskip("ray")

ITERATIONS = 8
PACE_SECONDS = 0.1
"""Minimum seconds of a step in the disturbed run, so that nodes are lost in the middle of their work."""

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


@dataclass
class Record:
    """Manifests and weights of a run, and observations during it."""

    manifests: dict[int, str] = field(default_factory=dict)
    digest: str = ""
    reason: str = ""
    explored: set[int] = field(default_factory=set)
    exits: dict[str, int] = field(default_factory=dict)
    listening: set[tuple[str, str]] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    supervisor: str = ""
    logs: str = ""


def with_runtime(name: str, *, step_seconds: float = 0.0) -> EngineConfig:
    more = {"name": name, "step_seconds": step_seconds}
    runtime = RuntimeConfig.model_validate({**CONFIG.runtime.model_dump(), **more})
    # Patience long enough that a run without a spot node waits for the next one, even on a busy computer.
    exploration = CONFIG.exploration.model_copy(
        update={"budget": CandidateBudget(candidates=CANDIDATES, patience_seconds=200), "wait": "all"}
    )
    return CONFIG.model_copy(update={"iterations": ITERATIONS, "runtime": runtime, "exploration": exploration})


def finish(fleet: Fleet, record: Record) -> None:
    record.reason = fleet.wait_until_finished(seconds=240).reason
    record.manifests = fleet.manifests()
    record.digest = fleet.events("checkpoint_saved")[-1].digest
    record.explored = {e.explored for e in fleet.events("iteration_done") if e.iteration < ITERATIONS - 1}


def listeners(fleet: Fleet) -> set[tuple[str, str]]:
    """Return (process, address) of every listening socket of the fleet."""
    found = set()
    for node in fleet.agents:
        for pid in fleet.pids(node):
            try:
                process = psutil.Process(pid)
                sockets = process.net_connections("inet")
            except psutil.NoSuchProcess:
                continue
            found |= {(process.name(), s.laddr.ip) for s in sockets if s.status == psutil.CONN_LISTEN}
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Record:
    record, fleet = Record(), NurseryFleet(tmp_path_factory.mktemp("local"), with_runtime("local"))
    try:
        for node in ("trainer", "spot-0"):
            fleet.start(node)
        finish(fleet, record)
    finally:
        fleet.close()
    return record


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Run while the coordinator, a worker, a frozen node that comes back and a killed node are lost in turn."""
    record, fleet = (
        Record(),
        NurseryFleet(tmp_path_factory.mktemp("ray"), with_runtime("ray", step_seconds=PACE_SECONDS)),
    )
    supervisor = fleet.folder / "nodes/trainer/logs/supervisor.log"
    try:
        for node in ("trainer", "spot-0", "spot-1"):
            fleet.start(node)
        fleet.wait_for(lambda: all((fleet.folder / f"nodes/{node}/ready.json").exists() for node in fleet.agents))
        record.listening = listeners(fleet)
        os.kill(fleet.pid_of("trainer", "coordinator"), signal.SIGKILL)
        fleet.wait_for_iteration(len(fleet.manifests()))
        os.kill(fleet.pid_of("spot-1", "worker-0"), signal.SIGKILL)
        fleet.wait_for_iteration(len(fleet.manifests()))
        fleet.signal_node("spot-0", signal.SIGSTOP)
        fleet.wait_for(lambda: "spot-0 is gone" in supervisor.read_text())
        fleet.signal_node("spot-0", signal.SIGCONT)
        fleet.wait_for_iteration(len(fleet.manifests()))
        fleet.signal_node("spot-1", signal.SIGKILL)
        finish(fleet, record)
        record.exits = {node: fleet.agents[node].wait(timeout=120) for node in ("trainer", "spot-0")}
        record.supervisor = supervisor.read_text()
        record.logs = fleet.logs()
    finally:
        folder = str(fleet.folder)
        mine = {pid for node in fleet.agents for pid in fleet.pids(node)}
        fleet.close()
        mine |= {p.pid for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or [])}
        until = time.monotonic() + 30.0  # a killed process may need a moment to end
        while (left := [pid for pid in mine if _runs(pid)]) and time.monotonic() < until:
            time.sleep(0.05)
        record.left = [f"{pid} {psutil.Process(pid).name()}" for pid in left]
    return record


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_losses_during_a_ray_run_change_no_bit_of_the_weights(local: Record, disturbed: Record) -> None:
    """Manifests and weights equal those of an undisturbed run on local processes."""
    assert (disturbed.reason, disturbed.explored) == ("iterations", {CANDIDATES}), disturbed.logs
    assert (disturbed.manifests, disturbed.digest) == (local.manifests, local.digest)


def test_ray_detects_every_loss(disturbed: Record) -> None:
    for text in ("spot-1/0 died", "spot-0 is gone", "spot-1 is gone"):
        assert text in disturbed.supervisor
    assert disturbed.supervisor.count("spot-0 is here") == 2  # the node came back under another id


def test_nothing_listens_outside_loopback(disturbed: Record) -> None:
    processes = {process for process, _ in disturbed.listening}
    assert {"gcs_server", "raylet"} <= processes
    assert any(process.startswith("ray::Coord") for process in processes)
    assert {address for _, address in disturbed.listening} <= set(LOOPBACK)


def test_a_finished_ray_run_ends_its_nodes_and_leaves_no_process(disturbed: Record) -> None:
    assert disturbed.exits == {"trainer": 0, "spot-0": 0}
    assert disturbed.left == []
