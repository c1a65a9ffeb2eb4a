"""The stages `local` and `ray`: real agents, processes and signals; a node is a session of processes."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from engine.config import EngineConfig
from engine.events import Capacity
from engine.node_spec import role_token
from engine.worker.transport import HttpTransport, Transport
from tests.conformance.cutting_proxy import CuttingProxy
from tests.conformance.full_disk import SmallDisk
from tests.conformance.on_demand import SeatLine
from tests.conformance.stage import WORKDIR, BadLine, Step
from tests.conformance.unreliable import Unreliable
from tests.engine.fleet import TOKEN
from tests.engine.nursery import NurseryFleet

ON_DEMAND = "trainer"


class ClusterStage:
    """See `Stage`."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self.config = config
        self.given_up_seconds = 4.0 if config.runtime.name == "ray" else 2 * config.runtime.lease_seconds
        self.fleet = NurseryFleet(folder, self.config, workdir=WORKDIR)
        self._disk = SmallDisk(self.journal(), lambda: self._pid("coordinator"))
        self._traces: dict[Path, int] = {}
        self._steps: list[Step] = []
        try:
            self.fleet.start(ON_DEMAND, module="tests.conformance.on_demand")
        except BaseException:
            self.close()
            raise

    def line(self) -> Transport:
        self.fleet.wait_for(lambda: self.is_ready(ON_DEMAND))
        return SeatLine(self._folder(ON_DEMAND))

    @contextlib.contextmanager
    def bad_line(self) -> Iterator[BadLine]:
        if self.config.runtime.name == "ray":  # Ray repairs its own connections
            line = Unreliable(self.line(), seed=0)
            yield BadLine(line, lambda: line.faults)
            return
        with CuttingProxy(self.fleet.port, seed=0) as proxy:
            transport = HttpTransport("127.0.0.1", proxy.port, role_token(TOKEN, "trainer"), patience_seconds=60.0)
            yield BadLine(Unreliable(transport, seed=0), lambda: proxy.cuts)

    # --- nodes --------------------------------------------------------------------------------------------

    def start(self, node: str) -> None:
        self.fleet.start(node)

    def is_ready(self, node: str) -> bool:
        return (self._folder(node) / "ready.json").exists()

    def has_ended(self, node: str) -> bool:
        return self.fleet.agents[node].poll() is not None

    def forget(self, node: str) -> None:
        self.fleet.end(node)

    def kill(self, victim: str) -> None:
        self._signal(victim, signal.SIGKILL)

    def freeze(self, victim: str) -> None:
        self._signal(victim, signal.SIGSTOP)

    def thaw(self, victim: str) -> None:
        self._signal(victim, signal.SIGCONT)

    def notice(self, node: str, seconds: float) -> None:
        self.fleet.notice(node, seconds=seconds)

    def send_capacity(self, snapshot: Capacity) -> None:
        self.fleet.post("/capacity", snapshot.to_json())

    # --- the disk -------------------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        self._disk.fill()

    def free_disk(self) -> None:
        self._disk.free()

    def trouble(self) -> str | None:
        return self.fleet.get("/health").json()["trouble"]

    # --- observing ------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        fresh: list[Step] = []
        for path in self.fleet.folder.glob("nodes/*/traces/*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._traces.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._traces[path] = self._traces.get(path, 0) + whole
            fresh += [_step(path.parts[-3], json.loads(line)) for line in data[:whole].splitlines()]
        self._steps = sorted(self._steps + fresh, key=lambda step: step.at_ns)
        return self._steps

    def journal(self) -> Path:
        return self._folder(ON_DEMAND) / "coordinator"

    def check(self) -> None:
        """Do nothing: the coordinator's memory is out of reach, and the drill checks the disk."""

    def close(self) -> None:
        try:
            self.fleet.close()
        finally:
            self._disk.close()

    # --- processes --------------------------------------------------------------------------------------------

    def _folder(self, node: str) -> Path:
        return self.fleet.folder / "nodes" / node

    def _pid(self, victim: str) -> int:
        if victim == "coordinator":
            return self.fleet.pid_of(ON_DEMAND, "coordinator")
        node, _, part = victim.partition("/")
        return self.fleet.agents[node].pid if part == "agent" else self.fleet.pid_of(node, part)

    def _signal(self, victim: str, number: signal.Signals) -> None:
        if victim in self.fleet.agents:
            self.fleet.signal_node(victim, number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid(victim), number)


def _step(node: str, raw: dict) -> Step:
    seeds = tuple(seed for _, _, seed, _ in raw["requests"])
    batch = raw["requests"][0][0]
    return Step(at_ns=raw["at_ns"], node=node, lease=raw["lease"], step=raw["step"], batch=batch, seeds=seeds)
