"""The cloud's reports about a node's VM: running, stopping, gone, doubled, or under a foreign identity."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from launcher.clouds.base import Machine, MachineState
from launcher.decide.node_facts import NodeStatus
from launcher.provision.sky.chores import Chores
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.inventory import LOOK_SECONDS, CloudInventory, newest_of
from launcher.provision.sky.records import EndingRecord, LoginRecord, StoppingRecord
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.surroundings import Surroundings

log = logging.getLogger(__name__)

STOPPED_SECONDS = 120.0
"""Time after which a stopping VM counts as stopped for good. The disk of a stopped VM is billed."""

GONE_LOOKS = 2
"""Inventory reads in a row that must miss a VM before the VM counts as gone. New VMs may be missing for a moment."""

NEVER_SEEN_LOOKS = 15
"""Inventory reads after which a VM that SkyPilot logged in to, and no read found, counts as gone."""

STOPPING_NOTICE_MS = 30_000
"""Assumed time left if a stopping VM is the first sign of a preemption (Google Cloud's notice)."""


@dataclass(slots=True)
class CloudReports:
    """Compares each new inventory with the node's files, and begins the node's end if the cloud reports an end."""

    around: Surroundings
    chores: Chores
    inventory: CloudInventory
    regions: Regions

    def evaluate(self, node: CloudNode) -> Machine | None:
        """Return the node's VM from the inventory. Begin the node's end if the cloud reports an end."""
        self.inventory.find_machine(node)
        place = node.region
        observed = self.inventory.last_in(place)
        if observed is None or observed.at is None or node.sightings.look == observed.looks:
            return None if observed is None else newest_of(observed.machines, node.name)
        node.sightings.look = observed.looks
        machine, known = newest_of(observed.machines, node.name), node.files.machine
        if machine is not None and machine.state in (MachineState.PENDING, MachineState.RUNNING):
            node.sightings.missing, node.sightings.stopping_since = 0, None
            if machine != known:
                node.files.write_machine(machine)
            self._end_doubles(node, observed.machines)
            self._refuse_foreign_identity(node, machine)
            return machine
        if known is None and not node.files.has("login"):
            return machine  # no VM existed yet, or only remains of a SkyPilot attempt
        if machine is not None and machine.state is MachineState.STOPPING:
            self._is_stopping(node, machine)
            return machine
        node.sightings.missing += 1
        if machine is not None or node.sightings.missing >= GONE_LOOKS or node.files.has("stopping"):
            last = machine or known
            if last is not None:
                patient = node.sightings.missing * LOOK_SECONDS < STOPPED_SECONDS
                self.chores.do(node.name, partial(self._learn_end, node, last, patient))
            elif node.sightings.missing > NEVER_SEEN_LOOKS:
                evidence = "SkyPilot says that it is up, and its cloud lists no machine of it"
                node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))
        return machine

    def _refuse_foreign_identity(self, node: CloudNode, machine: Machine) -> None:
        """Deny a node that runs under a foreign identity.

        Without our plugin, SkyPilot's API server attaches an identity of its own with all permissions.
        """
        place = self.regions.prepared.get((machine.cloud, machine.region))
        if place is not None and machine.identity and machine.identity != place.identity:
            evidence = (
                f"it runs as {machine.identity} and not as {place.identity}: SkyPilot's API server was not started by "
                "spotrl and does not have its plugin (launcher/provision/sky/sky_plugins.yaml); name that file there "
                "in SKYPILOT_SERVER_PLUGINS_CONFIG, or end the server (`sky api stop`) and have spotrl start one"
            )
            node.begin_end(EndingRecord(status=NodeStatus.DENIED, evidence=evidence))

    def _is_stopping(self, node: CloudNode, machine: Machine) -> None:
        """Record a notice if none came, and end the node if the VM keeps stopping."""
        now = self.around.monotonic()
        if node.sightings.stopping_since is None:
            node.sightings.stopping_since = now
        # before the login, SkyPilot itself stops VMs of a failed launch
        if not node.files.has("stopping") and node.files.has("login"):
            deadline_ms = self.around.clock.now_ms() + STOPPING_NOTICE_MS
            node.files.write(StoppingRecord(deadline_ms=deadline_ms, reason=machine.reason))
            if node.agent.link is not None:
                node.agent.link.notice(deadline_ms)
        if now - node.sightings.stopping_since > STOPPED_SECONDS:
            self.chores.do(node.name, partial(self._learn_end, node, machine, False))

    def _end_doubles(self, node: CloudNode, machines: Sequence[Machine]) -> None:
        """Terminate second VMs of the same name, left by SkyPilot's retries. The VM of SkyPilot's login stays."""
        alive = [one for one in machines if one.name == node.name and one.state is MachineState.RUNNING]
        login = node.files.read(LoginRecord)
        if len(alive) > 1 and login is not None:
            extra = [one for one in alive if login.host not in (one.public_address, one.address)]
            if 0 < len(extra) < len(alive):
                log.warning("%s has %s machines: the extra ones are ended", node.name, len(alive))
                self.chores.do(f"double {node.name}", partial(self.around.clouds[extra[0].cloud].end, extra))

    def _learn_end(self, node: CloudNode, machine: Machine, patient: bool) -> None:
        """Record the VM's end as the cloud reports. `patient`: SkyPilot may still report a better reason."""
        end = self.around.clouds[machine.cloud].end_of(machine)
        if patient and not end.reclaimed and not node.files.has("login"):
            return  # SkyPilot terminates a VM after a failed set-up
        notice_ms, now_ms = node.notice_ms, self.around.clock.now_ms()
        # A stopping VM without another notice is a notice that came too late to act.
        had_notice = notice_ms is not None and node.files.has("notice")
        node.begin_end(
            EndingRecord(
                status=NodeStatus.GONE,
                evidence=end.reason or f"{machine.cloud} does not list it any more",
                ended_ms=min(end.ended_ms or now_ms, now_ms),
                reclaimed=end.reclaimed,
                with_notice=had_notice if end.reclaimed else None,
            )
        )
