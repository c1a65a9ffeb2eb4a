"""A run on hosts with their own addresses, with Ray or HTTP between them; one host disappears.

Hosts are network namespaces, so this needs root. A host that disappears sends nothing, not even the end of a
connection: its link goes down and its processes freeze.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from engine.config import CandidateBudget, EngineConfig
from engine.events import CheckpointSaved, IterationDone, Market, Progress
from engine.node.child import MEETING_FILE
from engine.node_spec import role_token
from tests.end_to_end.test_rank_survival import CONFIG as RANKS
from tests.end_to_end.test_rank_survival import trained_by
from tests.end_to_end.test_survival import CONFIG
from tests.engine.fleet import TOKEN
from tests.engine.test_node_agent_on_cloud import Instance

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.clouds,
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare"))),
        reason="needs root, ip, nsenter and unshare, to give hosts addresses of their own",
    ),
]

ITERATIONS = 6
PORT = 4711
TRAINER = "10.77.0.1"


class Hosts:
    """Network namespaces; the trainer's one forwards between the others. `close` removes all of them."""

    def __init__(self, names):
        self._sleepers = {}
        try:
            self._make(names)
        except BaseException:
            self.close()
            raise

    def _make(self, names):
        for number, name in enumerate(names):
            sleeper = subprocess.Popen(["unshare", "-n", "sleep", "600"], stdout=subprocess.DEVNULL)
            self._sleepers[name] = sleeper
            own = os.readlink("/proc/self/ns/net")
            while os.readlink(f"/proc/{sleeper.pid}/ns/net") == own:
                time.sleep(0.01)
            self.do(name, "ip link set lo up")
            if number == 0:
                self.do(name, "echo 1 > /proc/sys/net/ipv4/ip_forward")
                continue
            address, link = f"10.77.0.{number + 1}", f"to{number}"
            self.do(names[0], f"ip link add {link} type veth peer name eth0 netns {sleeper.pid}")
            self.do(names[0], f"ip addr add {TRAINER}/32 dev {link}; ip link set {link} up")
            self.do(names[0], f"ip route add {address} dev {link}; echo 1 > /proc/sys/net/ipv4/conf/{link}/proxy_arp")
            self.do(name, f"ip addr add {address}/32 dev eth0; ip link set eth0 up; ip route add default dev eth0")

    def inside(self, name):
        return ("nsenter", "-t", str(self._sleepers[name].pid), "-n")

    def do(self, name, command):
        subprocess.run([*self.inside(name), "sh", "-e", "-c", command], check=True)

    def listening(self, name):
        """Return (port, address) of every listening TCP socket."""
        text = subprocess.run([*self.inside(name), "ss", "-Hltn"], check=True, capture_output=True, text=True).stdout
        return {tuple(reversed(line.split()[3].rsplit(":", 1))) for line in text.splitlines()}

    def close(self):
        for sleeper in self._sleepers.values():
            sleeper.kill()
            sleeper.wait()


@pytest.fixture
def hosts():
    made = Hosts(["trainer", "spot-0", "spot-1"])
    yield made
    made.close()


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_run_across_hosts_survives_the_loss_of_a_host(hosts, tmp_path, monkeypatch, runtime):
    monkeypatch.setenv("SPOTRL_SHUTDOWN", "true")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")  # no metadata service either
    budget = CandidateBudget(candidates=32, patience_seconds=60)
    exploration = CONFIG.exploration.model_copy(update={"budget": budget, "wait": "all"})
    runtime_config = CONFIG.runtime.model_copy(update={"name": runtime, "step_seconds": 0.05})
    engine: EngineConfig = CONFIG.model_copy(
        update={"iterations": ITERATIONS, "runtime": runtime_config, "exploration": exploration}
    )
    instances = {}
    try:
        for name in ("trainer", "spot-0", "spot-1"):
            trains = name == "trainer"
            instances[name] = Instance(
                tmp_path / name,
                program=[*hosts.inside(name), sys.executable],
                node=name,
                role="trainer" if trains else "rollout",
                market=Market.ON_DEMAND if trains else Market.SPOT,
                store=f"file://{tmp_path}/store",
                coordinator_host=TRAINER,
                coordinator_port=PORT,
                engine=engine,
            )
        trainer, lost = instances["trainer"], instances["spot-1"]
        for instance in instances.values():
            instance.wait_for(lambda instance=instance: instance.read("ready.json"), seconds=240)
        assert {address for port, address in hosts.listening("trainer") if port == str(PORT)} == {TRAINER}
        trainer.wait_for(lambda: "iteration_done" in kinds(trainer))
        shipped = trainer.folder / "shipped/spot-1/worker-0.log"
        trainer.wait_for(lambda: shipped.exists() and shipped.stat().st_size > 0, seconds=120)
        hosts.do("trainer", "ip link set to2 down")
        for process in lost.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGSTOP)
        vanished = time.monotonic()
        done = kinds(trainer).count("iteration_done")
        trainer.wait_for(lambda: kinds(trainer).count("iteration_done") > done)
        print(f"{runtime}: an iteration was done {time.monotonic() - vanished:.1f} s after a host vanished")
        trainer.wait_for(lambda: "engine_finished" in kinds(trainer), seconds=300)
        assert kinds(trainer).count("iteration_done") == ITERATIONS
        assert trainer.agent.wait(120) == 0
        assert instances["spot-0"].agent.wait(120) == 0
        assert "worker-0 of spot-0" in (trainer.folder / "shipped/spot-0/worker-0.log").read_text()
        for log in ("spot-0/worker-0.log", "spot-1/worker-0.log", "trainer/trainer.jsonl", "trainer/trainer.log"):
            assert (tmp_path / "store/logs" / log).stat().st_size > 0
    finally:
        for instance in instances.values():
            instance.end()


def test_a_trainer_of_two_hosts_survives_the_loss_of_a_host(hosts, tmp_path, monkeypatch):
    """Two ranks on two hosts without any spot node train what two ranks of one host train with spot nodes."""
    monkeypatch.setenv("SPOTRL_SHUTDOWN", "true")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    calm = trained_by(tmp_path / "calm", [])
    instances = {}

    def start(node, host, **more):
        role = more.get("role", "trainer")
        instances[node] = Instance(
            tmp_path / node,
            program=[*hosts.inside(host), sys.executable],
            run="fleet",
            node=node,
            market=Market.ON_DEMAND,
            store=f"file://{tmp_path}/store",
            coordinator_host=TRAINER,
            coordinator_port=PORT,
            engine=RANKS,
            trainer_nodes=2,
            token=TOKEN if role == "trainer" else role_token(TOKEN, role),
            **{"role": role, **more},
        )
        return instances[node]

    try:
        trainer = start("trainer", "trainer")
        lost = start("trainer-1-g0", "spot-0", role="ranks", trainer_node=1)
        trainer.wait_for(lambda: kinds(trainer).count("iteration_done") > 1, seconds=240)
        meeting = trainer.read(MEETING_FILE)
        assert (str(meeting["port"]), TRAINER) in hosts.listening("trainer")
        hosts.do("trainer", "ip link set to1 down")
        for process in lost.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGSTOP)
        trainer.wait_for(lambda: "nodes [1] are silent" in trainer.log("trainer.log"), seconds=60)
        successor = start("trainer-1-g1", "spot-1", role="ranks", trainer_node=1, generation=1)
        trainer.wait_for(lambda: "engine_finished" in kinds(trainer), seconds=300)
        assert trainer.agent.wait(120) == successor.agent.wait(120) == 0
        done = [event for event in events(trainer) if isinstance(event, IterationDone)]
        saved = [event for event in events(trainer) if isinstance(event, CheckpointSaved)]
        assert ({event.iteration: event.manifest_digest for event in done}, saved[-1].digest) == calm
    finally:
        for instance in instances.values():
            instance.end()


def events(instance):
    path = instance.folder / "progress/trainer.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Progress.from_json(line).event for line in lines if line.endswith("}")]


def kinds(instance):
    return [event.KIND for event in events(instance)]
