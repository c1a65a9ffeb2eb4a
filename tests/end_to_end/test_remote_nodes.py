"""Nodes as on a cloud's machines: reached over SSH, started by their windows, trained together, read from mirrors.

Two addresses of the loopback stand for two machines; everything from ssh to the engine's agents is real.
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
from launcher.controller.progress import ProgressFiles
from launcher.provision.sky.node_link import NodeLink
from tests.end_to_end.test_survival import CANDIDATES, CONFIG
from tests.engine.fleet import ALLOWED, TOKEN, free_port
from tests.launcher.cluster.sshd import Sshd, why_no_sshd

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_no_sshd() is not None, reason=str(why_no_sshd()))]

TRAINER, SPOT = "127.0.0.1", "127.0.0.2"


class Machines:
    """One machine per node, and what the launcher keeps of them."""

    def __init__(self, folder: Path, runtime: str) -> None:
        self.folder, self.port = folder, free_port()
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        # No metadata service answers, and no cloud is asked; SPOTRL_SHUTDOWN is set by Sshd.
        away = {"SPOTRL_IMDS_URL": nobody, "AWS_ENDPOINT_URL": nobody}
        self.sshds = {
            "trainer": Sshd(folder / "trainer", address=TRAINER, environment=away),
            "spot": Sshd(folder / "spot", address=SPOT, environment=away),
        }
        settings = CONFIG.runtime.model_dump() | {"name": runtime}
        # Without its spot node the run waits, however busy this machine is.
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

    def said(self, name: str, file: str) -> Any:
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
        """What runs for the nodes, their guards among it."""
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
def machines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path, request.param)
    yield made
    made.close()


def is_healthy(machines) -> bool:
    """Ask the coordinator through the trainer's line: what it forwards is refused until the line is mended."""
    tunnel = machines.links["trainer"].tunnel(machines.port)
    if tunnel is None:
        return False
    host, port = tunnel
    try:
        answer = httpx.get(f"http://{host}:{port}/health", headers=ALLOWED["controller"], trust_env=False, timeout=10)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


@pytest.mark.timeout(400)
def test_two_machines_train_together_while_their_lines_break(machines):
    machines.start("trainer")
    machines.start("spot")
    for name in ("trainer", "spot"):
        machines.wait_for(lambda name=name: machines.said(name, "ready.json"))
        # The line of each breaks once, and nobody notices.
        machines.sshds[name].cut(signal.SIGKILL)
    machines.wait_for(lambda: is_healthy(machines))
    machines.wait_for(lambda: all(machines.said(name, "exit.json") for name in ("trainer", "spot")))
    assert [machines.said(name, "exit.json")["code"] for name in ("trainer", "spot")] == [0, 0], machines.logs()
    events = machines.events()
    assert [event.iteration for event in events if isinstance(event, IterationDone)] == [0, 1]
    assert "spot" in {event.node for event in events if isinstance(event, NodeUsage)}
    for name in ("trainer", "spot"):
        for file in sorted(machines.remote(name).glob("logs/*.log")) + sorted(machines.remote(name).glob("progress/*")):
            copy = machines.mirror(name) / file.relative_to(machines.remote(name))
            machines.wait_for(lambda copy=copy, file=file: copy.exists() and copy.read_bytes() == file.read_bytes(), 10)
