"""Remote nodes as on cloud instances: reached over SSH, started by remote consoles, and read from mirrors.

Two loopback addresses stand for two instances; everything from ssh to the engine's agents is real.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
import pytest

from engine.config import CandidateBudget, RuntimeConfig
from engine.events import IterationDone, Market, NodeUsage, ProgressEvent
from engine.node_spec import ClockConfig, NodeSpec, role_token
from launcher.provision.progress import ProgressFiles
from launcher.provision.sky.node_link import NodeLink
from tests.end_to_end.test_survival import CANDIDATES, CONFIG
from tests.engine.fleet import ALLOWED, TOKEN, free_port
from tests.launcher.cluster.sshd import Sshd, why_no_sshd

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_no_sshd() is not None, reason=str(why_no_sshd()))]

TRAINER, SPOT = "127.0.0.1", "127.0.0.2"


class Instances:
    """One instance per node, with the launcher's links and mirrors."""

    def __init__(self, folder: Path, runtime: str) -> None:
        self.folder, self.port = folder, free_port()
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            closed_url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        # No metadata service answers, and no cloud is called; Sshd sets SPOTRL_SHUTDOWN.
        away = {"SPOTRL_IMDS_URL": closed_url, "AWS_ENDPOINT_URL": closed_url}
        self.sshds = {
            "trainer": Sshd(folder / "trainer", address=TRAINER, environment=away),
            "spot": Sshd(folder / "spot", address=SPOT, environment=away),
        }
        settings = CONFIG.runtime.model_dump() | {"name": runtime}
        # Without its spot node the run waits, however busy this computer is.
        budget = CandidateBudget(candidates=CANDIDATES, patience_seconds=200)
        self.engine = CONFIG.model_copy(
            update={
                "iterations": 2,
                "runtime": RuntimeConfig.model_validate(settings),
                "exploration": CONFIG.exploration.model_copy(update={"budget": budget, "wait": "all"}),
            },
        )
        self.links = {name: self.link(name) for name in self.sshds}

    def link(self, name: str) -> NodeLink:
        return NodeLink(self.sshds[name].login, self.mirror(name), str(self.remote(name)), sys.executable)

    def remote(self, name: str) -> Path:
        return self.folder / name / "home/spotrl/node"

    def mirror(self, name: str) -> Path:
        return self.folder / "run/nodes" / name

    def start(self, name: Literal["trainer", "spot"]) -> None:
        trains = name == "trainer"
        self.links[name].run(
            NodeSpec(
                run="remote",
                node=name,
                role="trainer" if trains else "rollout",
                market=Market.ON_DEMAND if trains else Market.SPOT,
                folder=str(self.remote(name)),
                store=(self.folder / "store").as_uri(),
                coordinator_host=TRAINER,
                coordinator_port=self.port,
                token=TOKEN if trains else role_token(TOKEN, "rollout"),
                clock=ClockConfig(origin_ms=time.time_ns() // 1_000_000),
                engine=self.engine,
                cloud="aws",
                money_left_ms=600_000,
            )
        )

    def read_json(self, name: str, file: str) -> Any:
        path = self.mirror(name) / file
        return json.loads(path.read_text()) if path.exists() else None

    def events(self) -> list[ProgressEvent]:
        return [line.event for line in ProgressFiles().read(self.mirror("trainer"))]

    def wait_for(self, what: Callable[[], object], seconds: float = 120.0) -> None:
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        paths = sorted(self.folder.glob("*/home/spotrl/node/logs/*.log"))
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in paths)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the nodes, with their guards."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.folder) in process.environ().get("SPOTRL_NODE_FOLDER", " ".join(process.cmdline())):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        for sshd in self.sshds.values():
            sshd.stop()
        for _ in range(3):
            for process in self.processes():
                if process.pid != os.getpid():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            time.sleep(0.1)


@pytest.fixture(params=["local", "ray"])
def instances(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Instances]:
    made = Instances(tmp_path, request.param)
    yield made
    made.close()


def is_healthy(instances) -> bool:
    """Return whether the coordinator answers through the trainer's link. The tunnel refuses during a reconnect."""
    tunnel = instances.links["trainer"].tunnel(instances.port)
    if tunnel is None:
        return False
    host, port = tunnel
    try:
        answer = httpx.get(f"http://{host}:{port}/health", headers=ALLOWED["controller"], trust_env=False, timeout=10)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


@pytest.mark.timeout(400)
def test_two_remote_nodes_train_together_while_their_connections_break(instances):
    instances.start("trainer")
    instances.start("spot")
    for name in ("trainer", "spot"):
        instances.wait_for(lambda name=name: instances.read_json(name, "ready.json"))
        # The connection of each node breaks once, and the run does not notice.
        instances.sshds[name].cut(signal.SIGKILL)
    instances.wait_for(lambda: is_healthy(instances))
    instances.wait_for(lambda: all(instances.read_json(name, "exit.json") for name in ("trainer", "spot")))
    assert [instances.read_json(name, "exit.json")["code"] for name in ("trainer", "spot")] == [0, 0], instances.logs()
    events = instances.events()
    assert [event.iteration for event in events if isinstance(event, IterationDone)] == [0, 1]
    assert "spot" in {event.node for event in events if isinstance(event, NodeUsage)}
    for name in ("trainer", "spot"):
        for file in sorted(instances.remote(name).glob("logs/*.log")) + sorted(
            instances.remote(name).glob("progress/*")
        ):
            copy = instances.mirror(name) / file.relative_to(instances.remote(name))
            instances.wait_for(
                lambda copy=copy, file=file: copy.exists() and copy.read_bytes() == file.read_bytes(), 10
            )
