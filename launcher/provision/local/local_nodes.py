"""Nodes of the local infra, listed like a cloud's for `spotrl reap` and `spotrl panic`, without the ledger.

A node is found by the mark of its processes (processes.py) and by the record of its agent in its folder. Nodes with
running processes are listed; a folder without processes is not a node any more.
"""

import getpass
import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from engine.events import Market
from engine.mark import marked
from launcher.clouds.base import Caller, CloudRefused, Finding, Machine, MachineState, Place, Thing
from launcher.job.company import NOTHING_NAMED, Named
from launcher.ledger.billing import LOCAL
from launcher.provision.local.processes import is_recorded_alive, kill_all, processes_of

HERE = "this machine"
"""The only region."""


class LocalNodes:
    """The running nodes below the folder `runs` (RUN/nodes/NODE), with the interface of a CloudApi."""

    cloud, home = LOCAL, HERE

    def __init__(self, runs: Path) -> None:
        self._runs = runs

    def caller(self) -> Caller:
        return Caller(account=socket.gethostname(), identity=getpass.getuser(), owner=getpass.getuser())

    def regions(self) -> Sequence[str]:
        return [HERE]

    def machines(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Machine]:
        found = [self._machine(folder) for folder in sorted({*self._marked(), *self._recorded()})]
        return [one for one in found if run in (None, one.run)]

    def end_of(self, machine: Machine) -> Machine:
        return replace(machine, state=MachineState.GONE)

    def things(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Thing]:
        return []

    def end(self, machines: Sequence[Machine]) -> None:
        """SIGKILL every process of the nodes. A process in the middle of a disk write may need a second call."""
        for one in machines:
            folder = self._runs / one.run / "nodes" / one.name
            kill_all(folder, _agent_of(folder))

    def remove(self, things: Sequence[Thing]) -> Sequence[Thing]:
        return things

    def prepare(
        self,
        region: str,
        *,
        run: str,
        owner: str,
        ssh_from: str,
        buckets: Sequence[str],
        models: Sequence[str] = (),
        named: Named = NOTHING_NAMED,
    ) -> Place:
        raise CloudRefused("nodes on this machine need no place to be made for them")

    def check_identity(self, named: Named) -> Sequence[Finding]:
        return []

    def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
        return []

    def open_rules(self, place: Place) -> Sequence[str]:
        return []

    def _marked(self) -> Iterator[Path]:
        """Yield the node folders named in the marks of live processes."""
        for pid in psutil.pids():
            try:
                process = psutil.Process(pid)
                folder = Path(marked(process) or "/")
                if self._is_node(folder) and process.status() != psutil.STATUS_ZOMBIE:
                    yield folder
            except (psutil.Error, OSError):
                continue  # gone meanwhile, or another user's

    def _recorded(self) -> Iterator[Path]:
        """Yield the folders of nodes with a live agent by the agent's own record."""
        for file in self._runs.glob("*/nodes/*/agent.json"):
            agent = _agent_of(file.parent)
            if agent is not None and is_recorded_alive(agent):
                yield file.parent

    def _is_node(self, folder: Path) -> bool:
        return folder.parent.name == "nodes" and folder.parents[2:3] == (self._runs,)

    def _machine(self, folder: Path) -> Machine:
        return Machine(
            cloud=self.cloud,
            region=HERE,
            zone=HERE,
            id=folder.name,
            name=folder.name,
            run=folder.parent.parent.name,
            owner=self.caller().owner,
            state=MachineState.RUNNING,
            market=Market((_read(folder / "node.json") or {}).get("market", Market.ON_DEMAND)),
            instance_type="processes",
            launched_ms=_started_ms(processes_of(folder, _agent_of(folder))),
        )


def recorded_clouds(runs: Path) -> set[str]:
    """Return the clouds that runs were launched on, by the records in the runs' folders below `runs`."""
    clouds: set[str] = set()
    for file in runs.glob("*/common.json"):
        clouds |= set((_read(file) or {}).get("owners", {}))
    for pattern in ("*/nodes/*/want.json", "*/nodes/*/machine.json"):
        clouds |= {str(record["cloud"]) for file in runs.glob(pattern) if "cloud" in (record := _read(file) or {})}
    return clouds


def _agent_of(folder: Path) -> dict[str, Any] | None:
    agent = _read(folder / "agent.json")
    # The record of an agent on a cloud is a copy: its pid belongs to another machine, and the record has no start time.
    return agent if agent is not None and agent.get("create_time") and not (folder / "want.json").exists() else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _started_ms(pids: Sequence[int]) -> int:
    """Return the start of the oldest process (UTC milliseconds)."""
    starts = []
    for pid in pids:
        try:
            starts.append(psutil.Process(pid).create_time())
        except psutil.Error:
            continue
    return round(min(starts, default=time.time()) * 1000)
