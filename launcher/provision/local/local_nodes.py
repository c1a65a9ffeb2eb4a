"""Nodes of the local infra, listed like a cloud's for `spotrl reap` and `spotrl panic`, without the ledger.

Nodes with running processes are listed (running_nodes.py); a folder without processes is not a node any more.
"""

import getpass
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from engine.events import Market
from launcher.clouds.base import CallerIdentity, CloudRefused, Finding, Instance, InstanceState, RegionSetup, Resource
from launcher.job.company import NOTHING_NAMED, Named
from launcher.ledger.models import LOCAL
from launcher.provision.local.processes import kill_all, processes_of
from launcher.provision.local.running_nodes import agent_of, read_json, running_nodes

HERE = "this machine"
"""The only region."""


class LocalNodes:
    """The running nodes below the folder `runs` (RUN/nodes/NODE), with the interface of a CloudApi."""

    cloud, home = LOCAL, HERE

    def __init__(self, runs: Path) -> None:
        self._runs = runs

    def caller(self) -> CallerIdentity:
        user = _user()
        return CallerIdentity(account=socket.gethostname(), identity=user, owner=user)

    def regions(self) -> Sequence[str]:
        return [HERE]

    def instances(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Instance]:
        instances = [self._instance(folder) for folder in running_nodes(self._runs)]
        return [instance for instance in instances if run in (None, instance.run)]

    def end_of(self, instance: Instance) -> Instance:
        return replace(instance, state=InstanceState.GONE)

    def resources(self, region: str, *, owner: str | None = None, run: str | None = None) -> Sequence[Resource]:
        return []

    def end(self, instances: Sequence[Instance]) -> None:
        """SIGKILL every process of the nodes. A process in the middle of a disk write may need a second call."""
        for instance in instances:
            folder = self._runs / instance.run / "nodes" / instance.name
            kill_all(folder, agent_of(folder))

    def remove(self, resources: Sequence[Resource]) -> Sequence[Resource]:
        return resources

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
    ) -> RegionSetup:
        raise CloudRefused("nodes on this machine need no place to be made for them")

    def check_launches(self) -> None:
        """Check nothing: no cloud takes part."""

    def check_identity(self, named: Named) -> Sequence[Finding]:
        return []

    def check_network(self, region: str, named: Named, ssh_from: str) -> Sequence[Finding]:
        return []

    def open_rules(self, setup: RegionSetup) -> Sequence[str]:
        return []

    def _instance(self, folder: Path) -> Instance:
        return Instance(
            cloud=self.cloud,
            region=HERE,
            zone=HERE,
            id=folder.name,
            name=folder.name,
            run=folder.parent.parent.name,
            owner=self.caller().owner,
            state=InstanceState.RUNNING,
            market=Market((read_json(folder / "node.json") or {}).get("market", Market.ON_DEMAND)),
            instance_type="processes",
            launched_ms=_started_ms(processes_of(folder, agent_of(folder))),
        )


def _user() -> str:
    """Return the name of the user, or the number: in a container a user may have no name, and cleanup needs none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def recorded_clouds(runs: Path) -> set[str]:
    """Return the clouds that runs were launched on, by the records in the runs' folders below `runs`."""
    clouds: set[str] = set()
    for file in runs.glob("*/common.json"):
        clouds |= set((read_json(file) or {}).get("owners", {}))
    for pattern in ("*/nodes/*/want.json", "*/nodes/*/machine.json"):
        clouds |= {str(record["cloud"]) for file in runs.glob(pattern) if "cloud" in (record := read_json(file) or {})}
    return clouds


def _started_ms(pids: Sequence[int]) -> int:
    """Return the start of the oldest process (UTC milliseconds), or the current time if no process is left."""
    starts = []
    for pid in pids:
        try:
            starts.append(psutil.Process(pid).create_time())
        except psutil.Error:
            continue
    return round(min(starts, default=time.time()) * 1000)
