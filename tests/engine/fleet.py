"""A fleet of real nodes for tests: agents as process sessions, without the launcher.

It takes the launcher's part: it starts nodes, ends them and sends capacity snapshots.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from engine.config import EngineConfig
from engine.coordinator.rights import ROUTES
from engine.events import Capacity, Market, NodeCapacity, NodeState, Progress
from engine.node_spec import ClockConfig, NodeSpec, role_token

TOKEN = "test-token"
"""The run's token. Nodes and callers use tokens derived from it for their roles."""
ALLOWED = {role: {"Authorization": f"Bearer {role_token(TOKEN, role)}"} for role in ROUTES}
"""Headers of each role's calls."""


class Fleet:
    """Nodes of one run under a folder; `close` leaves no process behind."""

    def __init__(
        self,
        folder: Path,
        engine: EngineConfig,
        *,
        run: str = "fleet",
        workdir: Path | None = None,
        trainer_nodes: int = 1,
        ranks_have_room: bool = True,
    ) -> None:
        self.folder, self.engine, self.run, self.workdir = folder, engine, run, workdir
        self.trainer_nodes, self.ranks_have_room = trainer_nodes, ranks_have_room
        self.clock = ClockConfig(origin_ms=time.time_ns() // 1_000_000)
        self.port = free_port()
        self.agents: dict[str, Any] = {}
        self._generation = 0

    def start(
        self, node: str, *, workers: int = 1, module: str = "engine.node.agent", cores: Sequence[int] | None = None
    ) -> None:
        """Start a node: `trainer...` the trainer's first node, `ranks-N...` its node N, any other name a spot node.

        `module`: the program of the node. `cores`: the CPU cores that the node may use.
        """
        folder = self.folder / "nodes" / node
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        role: Literal["trainer", "ranks", "rollout"]
        role = "trainer" if node.startswith("trainer") else "ranks" if node.startswith("ranks") else "rollout"
        spec = NodeSpec(
            run=self.run,
            node=node,
            role=role,
            trainer_nodes=1 if role == "rollout" else self.trainer_nodes,
            trainer_node=int(node.split("-")[1]) if role == "ranks" else 0,
            ranks_have_room=self.ranks_have_room,
            generation=int(node.partition("-g")[2] or 0),
            market=Market.SPOT if role == "rollout" else Market.ON_DEMAND,
            workers=workers,
            folder=str(folder),
            store=f"file://{self.folder}/store",
            coordinator_port=self.port,
            token=TOKEN if role == "trainer" else role_token(TOKEN, role),
            clock=self.clock,
            engine=self.engine,
            workdir=None if self.workdir is None else str(self.workdir),
        )
        (folder / "node.json").write_text(spec.model_dump_json())
        everyone = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or everyone)  # processes inherit the cores from their start
        try:
            self.agents[node] = self._spawn(module, folder / "node.json")
        finally:
            os.sched_setaffinity(0, everyone)

    def _spawn(self, module: str, node_file: Path) -> Any:
        with (node_file.parent / "logs" / "agent.log").open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", module, str(node_file)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def promote(self, node: str, *, port: int | None = None) -> None:
        """Give the role of the trainer to a spot node: end its processes, and start its agent with another spec.

        `port`: of its coordinator, while the one before still listens. The other nodes are told with `redirect`.
        """
        self.port = port or self.port
        self._restart(node, {"role": "trainer", "token": TOKEN})

    def redirect(self, node: str) -> None:
        """Tell a spot node the port of the trainer's node now."""
        self._restart(node, {})

    def _restart(self, node: str, changes: dict[str, Any]) -> None:
        self.end(node)
        file = self.folder / "nodes" / node / "node.json"
        spec = NodeSpec.model_validate_json(file.read_text())
        for stale in ("agent.json", "ready.json", "exit.json", "notice.json"):
            (file.parent / stale).unlink(missing_ok=True)
        file.write_text(spec.model_copy(update={"coordinator_port": self.port, **changes}).model_dump_json())
        self.agents[node] = self._spawn("engine.node.agent", file)

    def pids(self, node: str) -> list[int]:
        """Return every process of the node's session."""
        session = self.agents[node].pid
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == session:
                    found.append(process.pid)
            except ProcessLookupError:
                continue
        return found

    def pid_of(self, node: str, name: str) -> int:
        """Return the pid of the newest process of this name (coordinator, trainer, worker-0), from its log."""
        return newest_pid(self.folder / "nodes" / node / "logs" / f"{name}.log")

    def signal_node(self, node: str, number: signal.Signals) -> None:
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def notice(self, node: str, *, seconds: float) -> None:
        deadline_ms = self.clock.clock().now_ms() + round(seconds * 1000)
        (self.folder / "nodes" / node / "notice.json").write_text(json.dumps({"deadline_ms": deadline_ms}))

    def report_lost(self, node: str) -> None:
        """Report these nodes as lost, like a controller."""
        self._generation += 1
        lost = NodeCapacity(node=node, market=Market.SPOT, state=NodeState.LOST, workers=1)
        self.post("/capacity", Capacity(generation=self._generation, nodes=(lost,)).to_json())

    def post(self, path: str, content: str) -> httpx.Response:
        """Send a request to the coordinator with the launcher's token."""
        return httpx.post(self._url(path), content=content, headers=ALLOWED["controller"], trust_env=False)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self._url(path), headers=ALLOWED["controller"], trust_env=False)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def progress(self, source: str = "trainer") -> list[Progress]:
        """Return the events of every trainer node in written order, each number once."""
        seen: dict[tuple[int, int], Progress] = {}
        for path in sorted(self.folder.glob(f"nodes/*/progress/{source}.jsonl"), key=lambda p: p.stat().st_ctime):
            for line in path.read_text().splitlines():
                try:
                    event = Progress.from_json(line)
                except ValueError:
                    continue
                seen.setdefault((event.lineage, event.seq), event)
        return list(seen.values())

    def events(self, kind: str, source: str = "trainer") -> list[Any]:
        return [progress.event for progress in self.progress(source) if kind == progress.event.KIND]

    def wait_for(self, what: Callable[[], bool], *, seconds: float = 240.0, every: float = 0.02) -> None:
        """Poll until the condition holds. `every`: seconds between two polls; a benchmark polls rarely."""
        until = time.monotonic() + seconds
        while not what():
            if time.monotonic() > until:
                raise TimeoutError(f"waited {seconds} s in vain; logs:\n{self.logs()}")
            time.sleep(every)

    def wait_for_iteration(self, iteration: int) -> None:
        self.wait_for(lambda: any(e.iteration >= iteration for e in self.events("iteration_done")))

    def wait_until_finished(self, *, seconds: float = 180.0, every: float = 0.02) -> Any:
        self.wait_for(lambda: bool(self.events("engine_finished")), seconds=seconds, every=every)
        return self.events("engine_finished")[-1]

    def manifests(self) -> dict[int, str]:
        """Return the manifest of each trained batch; the newest lineage counts."""
        rows = sorted(self.progress(), key=lambda p: (p.lineage, p.seq))
        return {p.event.iteration: p.event.manifest_digest for p in rows if p.event.KIND == "iteration_done"}

    def logs(self) -> str:
        texts = [f"{path}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("nodes/*/logs/*.log"))]
        return "\n".join(texts)

    def end(self, node: str) -> None:
        """Kill every process of this node, even if the node is frozen."""
        self.signal_node(node, signal.SIGKILL)
        self.agents[node].wait()

    def close(self) -> None:
        for node in self.agents:
            self.end(node)


def newest_pid(log: Path) -> int:
    """Return the pid of the process that last opened this log."""
    begun = [line for line in log.read_text().splitlines() if line.startswith("---")]
    return int(begun[-1].rsplit(" ", 1)[1])


def free_port() -> int:
    """Return a free port for a server that starts later.

    The port lies below those of outgoing connections, one of which could take it before the server does, and workers of
    pytest-xdist choose from different ranges.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 20_000 + 3_000 * (worker % 4)
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", secrets.choice(range(first, first + 3_000))))
            return int(probe.getsockname()[1])
