"""The agent on a cloud instance: it must end the instance even if no controller is left."""

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
from engine.node import agent
from engine.node.agent import EXIT_BROKEN, EXIT_FINISHED, EXIT_MONEY, EXIT_REFUSED, other_setup
from engine.node.alone import LAST_ANSWER
from engine.node.spend_guard import boot_id
from engine.node_spec import ClockConfig, NodeSpec, role_token
from engine.storage.metadata import GCE_HOST
from tests.engine.fake_metadata import FakeCompute, FakeGceMetadata
from tests.engine.fleet import TOKEN, free_port, newest_pid
from tests.engine.nursery import nursery
from tests.engine.served import Served

HOUR_MS = 3_600_000

COORDINATOR = """
import sys, time
from pathlib import Path
from tests.engine.served import Served

Served(Path(sys.argv[1]), port=int(sys.argv[2]))
time.sleep(600)
"""
"""A coordinator in a process of its own."""


def spec_of(folder, **more):
    """Return the spec of a spot node on Google Cloud, with the given changes."""
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


class Instance:
    """One cloud instance with its agent. `end` kills all its processes, even frozen ones."""

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

    def read(self, name):
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def log(self, name="agent.log"):
        path = self.folder / "logs" / name
        return path.read_text() if path.exists() else ""

    def processes(self):
        """Return all processes of this agent: those of its session and those with its mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = os.getsid(process.pid) == self.agent.pid or marked(process.pid) == str(self.folder)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_for(self, what, seconds=240.0):
        until = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < until, self.log()
            time.sleep(0.02)
        return found

    def end(self):
        guard = self.read("guard.json")
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if guard is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(guard["pid"], signal.SIGKILL)
        self.agent.wait()


@pytest.fixture
def google(monkeypatch):
    """Fake the cloud's API; `metadata` is the metadata service of this instance."""
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
def instances(google, tmp_path):
    """Create instances, and end all of them after the test."""
    made = []

    def make(name="spot-0", **more):
        made.append(Instance(tmp_path / name, node=name, **more))
        return made[-1]

    yield make
    for instance in made:
        instance.end()


def test_an_instance_with_another_setup_is_refused_with_a_reason(instances):
    instance = instances(digest="wanted-digest", program=[sys.executable])
    assert instance.agent.wait() == EXIT_REFUSED
    report = instance.read("exit.json")
    assert report["code"] == EXIT_REFUSED
    assert "wanted-digest" in report["text"]
    assert str(os.path.join(sys.prefix, ".digest")) in report["text"]
    instance.wait_for(lambda: not instance.processes())


@pytest.mark.slow
def test_a_node_that_refuses_its_work_deletes_itself_without_a_controller(instances, google, monkeypatch):
    """Its logs are in the store before the deletion."""
    monkeypatch.setenv("SPOTRL_ALONE_SECONDS", "2")
    instance = instances(digest="wanted-digest", program=[sys.executable])
    assert instance.agent.wait() == EXIT_REFUSED
    instance.wait_for(lambda: google.deleted)
    kept = instance.folder / "store/logs/spot-0/agent.log"
    assert "wanted-digest" in kept.read_text()
    assert "the agent has ended, and no controller has called" in instance.log()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["agent", "coordinator", "frozen coordinator"])
def test_a_node_that_lost_its_work_deletes_itself_without_a_controller(instances, google, monkeypatch, tmp_path, lost):
    """The agent stays while a coordinator answers. A frozen coordinator accepts connections and answers none."""
    monkeypatch.setenv("SPOTRL_ALONE_SECONDS", "5")
    port = free_port()
    coordinator = subprocess.Popen([sys.executable, "-c", COORDINATOR, str(tmp_path / "coordinator"), str(port)])
    try:
        instance = instances(coordinator_port=port)
        instance.wait_for(lambda: (instance.folder / LAST_ANSWER).exists() and instance.log("worker-0.log"))
        time.sleep(6.0)
        assert google.deleted == []
        if lost == "agent":
            instance.agent.kill()
        else:
            coordinator.send_signal(signal.SIGSTOP if lost == "frozen coordinator" else signal.SIGKILL)
        instance.wait_for(lambda: google.deleted)
        why = "the agent has ended" if lost == "agent" else "no coordinator has answered"
        assert why in instance.log()
        assert (instance.folder / "store/logs/spot-0/worker-0.log").exists()
    finally:
        coordinator.kill()
        coordinator.wait()


def test_the_setup_of_an_instance_is_identified_by_its_environment_digest(tmp_path, monkeypatch):
    spec = spec_of(tmp_path, digest="wanted-digest")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "nothing" in (other_setup(spec) or "")
    (tmp_path / ".digest").write_text("wanted-digest\n")
    assert other_setup(spec) is None
    assert "another" in (other_setup(spec_of(tmp_path, digest="another")) or "")
    assert other_setup(spec_of(tmp_path, digest="another", cloud="local")) is None


@pytest.mark.slow
def test_a_preemption_notice_drains_the_node_and_reaches_the_coordinator(instances, google, tmp_path):
    served = Served(tmp_path / "coordinator", RuntimeConfig())
    try:
        instance = instances(coordinator_port=served.port)
        instance.wait_for(lambda: instance.read("ready.json"))
        began = time.monotonic()
        google.metadata.set_text("instance/preempted", "TRUE")
        instance.wait_for(lambda: served.of("notice"))
        reached = time.monotonic() - began
        print(f"notice: coordinator received it {reached:.3f} s after the metadata service reported it")
        assert reached < 10.0
        assert served.of("notice")[0][1]["deadline_ms"] == instance.read("notice.json")["deadline_ms"]
        assert google.deleted == []  # a draining node waits for the cloud to end it
        assert instance.agent.poll() is None
    finally:
        served.close()


@pytest.mark.slow
def test_an_on_demand_node_does_not_poll_for_a_notice(instances, google):
    instance = instances(market=Market.ON_DEMAND)
    instance.wait_for(lambda: instance.read("ready.json") or instance.log("worker-0.log"))
    assert google.metadata.requests == []


@pytest.mark.slow
def test_a_node_past_its_spend_deadline_deletes_itself_and_records_why(instances, google):
    instance = instances()
    instance.wait_for(lambda: instance.read("guard.json") and instance.log("worker-0.log"))
    assert instance.read("agent.json")["boot_id"] == boot_id()
    (instance.folder / "money.json").write_text('{"left_ms": 0, "told": 1}')
    instance.wait_for(lambda: google.deleted)
    report = instance.read("exit.json")
    assert (report["code"], report["text"]) == (EXIT_MONEY, "the money deadline has come")
    assert newest_pid(instance.folder / "logs/worker-0.log") not in {process.pid for process in instance.processes()}
    instance.wait_for(lambda: "Compute Engine deletes a-machine" in instance.log())  # written after the call


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_terminated_agent_leaves_no_process_but_the_guard(instances, frozen):
    instance = instances()
    instance.wait_for(lambda: instance.read("guard.json") and instance.log("worker-0.log"))
    instance.agent.send_signal(signal.SIGHUP)  # the end of the SSH connection must not end the agent
    if frozen:
        os.kill(newest_pid(instance.folder / "logs/worker-0.log"), signal.SIGSTOP)
    assert len(instance.processes()) > 1
    instance.agent.terminate()
    assert instance.agent.wait() == EXIT_BROKEN
    instance.wait_for(lambda: not instance.processes())
    assert instance.read("exit.json")["text"] == "ended by SIGTERM"
    assert psutil.pid_exists(instance.read("guard.json")["pid"])


@pytest.mark.slow
def test_a_guard_that_dies_beside_its_agent_is_started_again(instances):
    instance = instances()
    first = instance.wait_for(lambda: instance.read("guard.json"))["pid"]
    os.kill(first, signal.SIGKILL)
    second = instance.wait_for(lambda: (pid := instance.read("guard.json")["pid"]) != first and pid)
    assert psutil.pid_exists(second)


@pytest.mark.slow
def test_a_second_agent_of_an_instance_exits_and_leaves_the_first_alone(instances):
    instance = instances()
    instance.wait_for(lambda: instance.read("guard.json") and instance.log("worker-0.log"))
    running = instance.read("agent.json")
    second = nursery().fork("engine.node.agent", instance.folder / "node.json")
    try:
        assert second.wait() == EXIT_FINISHED
    finally:
        if second.poll() is None:
            second.kill()
    assert instance.read("agent.json") == running
    assert instance.agent.poll() is None


@pytest.mark.slow
def test_a_terminated_agent_ends_the_processes_of_ray(instances):
    pytest.importorskip("ray")
    engine = EngineConfig(runtime=RuntimeConfig(name="ray"))
    port = free_port()
    trainer = instances(
        "trainer", role="trainer", market=Market.ON_DEMAND, engine=engine, coordinator_port=port, token=TOKEN
    )
    spot = instances("spot-0", engine=engine, coordinator_port=port)
    spot.wait_for(lambda: "worker" in spot.log("worker-0.log"))
    for instance in (spot, trainer):
        names = {process.name() for process in instance.processes()}
        assert "raylet" in names
        instance.agent.terminate()
        began = time.monotonic()
        assert instance.agent.wait() == EXIT_BROKEN
        instance.wait_for(lambda instance=instance: not instance.processes())
        print(f"{instance.folder.name}: {sorted(names)} gone {time.monotonic() - began:.2f} s after SIGTERM")


class _Reached(Exception):
    """The agent came so far."""


@pytest.mark.parametrize(("digest", "looks"), [("wanted-digest", True), ("", False)])
def test_only_a_machine_of_our_set_up_looks_for_local_disks(tmp_path, monkeypatch, digest, looks):
    """Other machines, like one of a developer in a cloud, may have local disks of their own."""
    seen = []

    def reached(_):
        raise _Reached

    monkeypatch.setattr(agent, "other_setup", lambda _: None)
    monkeypatch.setattr(agent, "watch_notice", lambda *_: None)
    monkeypatch.setattr(agent, "unfit", lambda *_: None)
    monkeypatch.setattr(agent, "use_local_disk", lambda folder: seen.append(folder) or "local NVMe: none")
    monkeypatch.setattr(agent.Agent, "_prepare", reached)
    bare = object.__new__(agent.Agent)  # a made agent changes the environment of this process
    bare.spec, bare.folder, bare.on_cloud = spec_of(tmp_path, digest=digest), tmp_path, True
    with pytest.raises(_Reached):
        bare.run()
    assert seen == ([tmp_path] if looks else [])
