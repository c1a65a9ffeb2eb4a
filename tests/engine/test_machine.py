"""The agent on a cloud's machine: the node is the machine, and nobody may be left to ask it for anything."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from engine.config import EngineConfig, RuntimeConfig
from engine.events import Market
from engine.mark import MARK, marked
from engine.node.agent import EXIT_BROKEN, EXIT_MONEY, EXIT_REFUSED, other_setup
from engine.node.spend_guard import boot_id
from engine.node_spec import ClockConfig, NodeSpec, role_token
from engine.storage.metadata import GCE_HOST
from tests.engine.fleet import TOKEN, free_port, newest_pid
from tests.engine.metadata_faces import FakeCompute, FakeGceMetadata
from tests.engine.nursery import nursery
from tests.engine.served import Served

HOUR_MS = 3_600_000


def spec_of(folder, **more):
    """Of a spot node on Google's cloud, but for what is said."""
    given = {
        "run": "run",
        "node": "spot-0",
        "role": "rollout",
        "market": Market.SPOT,
        "folder": str(folder),
        "store": f"file://{folder}/store",
        "coordinator_port": free_port(),
        "token": TOKEN if more.get("role") == "trainer" else role_token(TOKEN, "rollout"),
        "clock": ClockConfig(origin_ms=0),
        "engine": EngineConfig(),
        "cloud": "gcp",
        "money_left_ms": HOUR_MS,
        **more,
    }
    return NodeSpec.model_validate(given)


class Machine:
    """One machine with its agent. `end` leaves nothing of it, frozen or not."""

    def __init__(self, folder, *, program=None, **more):
        """Start the agent as a program, or fork it from a process that has imported what it needs.

        `program`: the beginning of the command line that starts it, for example another program that runs it elsewhere.
        """
        self.folder = folder
        (folder / "logs").mkdir(parents=True)
        (folder / "node.json").write_text(spec_of(folder, **more).model_dump_json())
        if program is None:
            self.agent = nursery().fork("engine.node.agent", folder / "node.json")
            return
        with (folder / "logs/agent.log").open("ab") as log:
            self.agent = subprocess.Popen(
                [*program, "-m", "engine.node.agent", str(folder / "node.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, MARK: str(folder)},
            )

    def says(self, name):
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def log(self, name="agent.log"):
        path = self.folder / "logs" / name
        return path.read_text() if path.exists() else ""

    def processes(self):
        """Everything that runs for this machine's agent: of its session, or with its mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = os.getsid(process.pid) == self.agent.pid or marked(process) == str(self.folder)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_for(self, what, seconds=60.0):
        until = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < until, self.log()
            time.sleep(0.02)
        return found

    def end(self):
        guard = self.says("guard.json")
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if guard is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(guard["pid"], signal.SIGKILL)
        self.agent.wait()


@pytest.fixture
def google(monkeypatch):
    """The clouds' API; `metadata` is this machine's."""
    metadata, compute = FakeGceMetadata(), FakeCompute()
    metadata.is_instance("a-machine")
    monkeypatch.setenv(GCE_HOST, metadata.address)
    monkeypatch.setenv("SPOTRL_GCP_COMPUTE_ENDPOINT", compute.url)
    monkeypatch.setenv("SPOTRL_SHUTDOWN", "true")
    compute.metadata = metadata
    yield compute
    metadata.close()
    compute.close()


@pytest.fixture
def machines(google, tmp_path):
    """Makes machines; none is left."""
    made = []

    def make(name="spot-0", **more):
        made.append(Machine(tmp_path / name, node=name, **more))
        return made[-1]

    yield make
    for machine in made:
        machine.end()


def test_a_machine_that_was_set_up_otherwise_is_refused_in_words(machines):
    machine = machines(digest="wanted-digest", program=[sys.executable])
    assert machine.agent.wait(30) == EXIT_REFUSED
    said = machine.says("exit.json")
    assert said["code"] == EXIT_REFUSED
    assert "wanted-digest" in said["text"]
    assert str(os.path.join(sys.prefix, ".digest")) in said["text"]
    machine.wait_for(lambda: not machine.processes(), seconds=10)


def test_a_node_that_refuses_its_work_is_deleted_when_no_controller_comes(machines, google, monkeypatch):
    """Its logs are in the store by then."""
    monkeypatch.setenv("SPOTRL_ALONE_SECONDS", "2")
    machine = machines(digest="wanted-digest", program=[sys.executable])
    assert machine.agent.wait(30) == EXIT_REFUSED
    machine.wait_for(lambda: google.deleted)
    kept = machine.folder / "store/logs/spot-0/agent.log"
    assert "wanted-digest" in kept.read_text()
    assert "the agent has ended, and no controller has called" in machine.log()


def test_a_node_whose_agent_was_killed_is_deleted_when_no_controller_comes(machines, google, monkeypatch):
    monkeypatch.setenv("SPOTRL_ALONE_SECONDS", "2")
    machine = machines()
    machine.wait_for(lambda: machine.says("guard.json") and machine.log("worker-0.log"))
    time.sleep(3.0)
    assert google.deleted == []  # it works, controller or not
    machine.agent.kill()
    machine.wait_for(lambda: google.deleted)
    assert (machine.folder / "store/logs/spot-0/worker-0.log").exists()


def test_what_a_machine_was_set_up_as_is_named_by_its_environment(tmp_path, monkeypatch):
    spec = spec_of(tmp_path, digest="wanted-digest")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "nothing" in (other_setup(spec) or "")
    (tmp_path / ".digest").write_text("wanted-digest\n")
    assert other_setup(spec) is None
    assert "another" in (other_setup(spec_of(tmp_path, digest="another")) or "")
    assert other_setup(spec_of(tmp_path, digest="another", cloud="local")) is None


def test_the_clouds_notice_drains_the_node_and_reaches_the_coordinator(machines, google, tmp_path):
    served = Served(tmp_path / "coordinator", RuntimeConfig())
    try:
        machine = machines(coordinator_port=served.port)
        machine.wait_for(lambda: machine.says("ready.json"))
        began = time.monotonic()
        google.metadata.says("instance/preempted", "TRUE")
        machine.wait_for(lambda: served.of("notice"), seconds=10)
        heard = time.monotonic() - began
        print(f"notice: coordinator told {heard:.3f} s after the metadata service said so")
        assert heard < 2.0
        assert served.of("notice")[0][1]["deadline_ms"] == machine.says("notice.json")["deadline_ms"]
        assert google.deleted == []  # whoever drains leaves the end to the cloud
        assert machine.agent.poll() is None
    finally:
        served.close()


def test_an_on_demand_machine_asks_for_no_notice(machines, google):
    machine = machines(market=Market.ON_DEMAND)
    machine.wait_for(lambda: machine.says("ready.json") or machine.log("worker-0.log"))
    assert google.metadata.asked == []


def test_its_money_spent_it_deletes_itself_and_leaves_a_word_why(machines, google):
    machine = machines()
    machine.wait_for(lambda: machine.says("guard.json") and machine.log("worker-0.log"))
    assert machine.says("agent.json")["boot_id"] == boot_id()
    (machine.folder / "money.json").write_text('{"left_ms": 0, "told": 1}')
    machine.wait_for(lambda: google.deleted, seconds=10)
    said = machine.says("exit.json")
    assert (said["code"], said["text"]) == (EXIT_MONEY, "the money deadline has come")
    assert newest_pid(machine.folder / "logs/worker-0.log") not in {process.pid for process in machine.processes()}
    assert "Compute Engine deletes a-machine" in machine.log()


@pytest.mark.parametrize("frozen", [False, True])
def test_told_to_end_it_leaves_no_process_but_the_guard(machines, frozen):
    machine = machines()
    machine.wait_for(lambda: machine.log("worker-0.log"))
    machine.agent.send_signal(signal.SIGHUP)  # its connection ends, and it goes on
    if frozen:
        os.kill(newest_pid(machine.folder / "logs/worker-0.log"), signal.SIGSTOP)
    assert len(machine.processes()) > 1
    machine.agent.terminate()
    assert machine.agent.wait(20) == EXIT_BROKEN
    machine.wait_for(lambda: not machine.processes(), seconds=10)
    assert machine.says("exit.json")["text"] == "ended by SIGTERM"
    assert psutil.pid_exists(machine.says("guard.json")["pid"])


@pytest.mark.slow
def test_told_to_end_rays_processes_go_too(machines):
    pytest.importorskip("ray")
    engine = EngineConfig(runtime=RuntimeConfig(name="ray"))
    port = free_port()
    trainer = machines(
        "trainer", role="trainer", market=Market.ON_DEMAND, engine=engine, coordinator_port=port, token=TOKEN
    )
    spot = machines("spot-0", engine=engine, coordinator_port=port)
    spot.wait_for(lambda: "worker" in spot.log("worker-0.log"))
    for machine in (spot, trainer):
        names = {process.name() for process in machine.processes()}
        assert "raylet" in names
        machine.agent.terminate()
        began = time.monotonic()
        assert machine.agent.wait(20) == EXIT_BROKEN
        machine.wait_for(lambda machine=machine: not machine.processes(), seconds=10)
        print(f"{machine.folder.name}: {sorted(names)} gone {time.monotonic() - began:.2f} s after SIGTERM")
