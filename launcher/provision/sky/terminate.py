"""Terminate a node's VM, remove its disks, and clear SkyPilot's records of the node.

release or ending -> VM ended -> disks removed -> ended -> SkyPilot has forgotten the name -> cleared

The order to terminate is repeated until the cloud shows the VM ended. The bill ends with the VM (instance_end.py).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.clouds.base import Instance, InstanceState
from launcher.decide.node_facts import NodeStatus
from launcher.exit_codes import Failure
from launcher.provision.sky.background_tasks import NotYet
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.instance_end import InstanceEnds, is_billed
from launcher.provision.sky.inventory import CloudInventory, newest_of
from launcher.provision.sky.launches import Launches
from launcher.provision.sky.records import ClearedRecord, EndedRecord, EndingRecord
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.surroundings import Surroundings

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Terminator:
    """The last steps of a node. `end` and `clear` block, run in the pool, and are repeated until they succeed."""

    around: Surroundings
    inventory: CloudInventory
    regions: Regions
    launches: Launches
    ends: InstanceEnds

    def end(self, node: CloudNode) -> None:
        """Terminate the VM and remove its disks through the cloud's own API, whatever SkyPilot's records say."""
        self.around.check_lease()
        ending = node.files.read(EndingRecord) or EndingRecord(status=NodeStatus.GONE, evidence=self._end_text(node))
        if not node.files.has("ending"):
            node.files.write(ending)
        try:
            self.launches.cancel(node)
        except Failure as failure:  # the VM is terminated anyway, and `clear` cancels again
            log.warning("%s: its launch could not be cancelled: %s", node.name, failure)
        region = node.region or self.inventory.search(node)
        if region is None:
            self._ended(node, ending)
            return
        api = self.around.clouds[region[0]]
        looked_ms = self.around.clock.now_ms()
        listed = [instance for instance in self.inventory.instances_in(*region) if instance.name == node.name]
        alive = [instance for instance in listed if instance.state is not InstanceState.GONE]
        if not alive and ending.disks_ms is None:
            ending, alive = self._with_end(node, ending, listed)
        if alive:
            node.files.write(self._with_last_facts(node, ending, alive, looked_ms))
            api.end(alive)
            raise NotYet(f"{', '.join(instance.id for instance in alive)} is told to end and has not ended yet")
        disks = [
            disk for disk in self.inventory.resources_in(*region) if disk.kind == "disk" and disk.node == node.name
        ]
        if disks:
            ending = ending.model_copy(update={"disks_ms": self.around.clock.now_ms()})
            node.files.write(ending)
        remaining = api.remove(disks) if disks else []
        if remaining:
            raise NotYet(f"disk {', '.join(disk.id for disk in remaining)} cannot go yet")
        self._ended(node, ending)

    def _with_end(
        self, node: CloudNode, ending: EndingRecord, listed: Sequence[Instance]
    ) -> tuple[EndingRecord, list[Instance]]:
        """Return the record with the end of the VM from the cloud, or with the VM if the cloud finds the VM alive.

        The remains of a launch that the cloud refused are no VM of the node.
        """
        instance = newest_of(listed, node.name) if ending.status is NodeStatus.GONE else None
        instance = instance or node.files.instance
        if instance is None:
            return ending, []
        if not node.files.has("machine"):
            node.files.write_instance(instance)
        end = self.ends.end_of(node, instance)
        if end.state is not InstanceState.GONE:
            return ending, [end]
        # A VM that had stopped before the order cost nothing from then on.
        known_ms = [at_ms for at_ms in (ending.vm_ended_ms, end.ended_ms) if at_ms is not None]
        words: dict[str, object] = {"vm_ended_ms": min(known_ms, default=None)}
        if end.reclaimed and not ending.reclaimed:
            had_notice = node.notice_ms is not None and node.files.has("notice")
            evidence = "; ".join(filter(None, [end.reason, ending.evidence]))
            words |= {"reclaimed": True, "with_notice": had_notice, "evidence": evidence}
        ending = ending.model_copy(update=words)
        node.files.write(ending)
        return ending, []

    def _with_last_facts(
        self, node: CloudNode, ending: EndingRecord, alive: Sequence[Instance], looked_ms: int
    ) -> EndingRecord:
        """Return the record with the facts that are known only before the VM is terminated.

        The facts are a sign of life or the time at which the VM stopped, and a missing firewall rule if the node was
        not reachable.
        """
        words: dict[str, object] = {}
        recorded, newest = node.files.instance, newest_of(alive, node.name)
        assert newest is not None
        if recorded is None or recorded.id != newest.id:
            node.files.write_instance(newest)
        if any(is_billed(instance) for instance in alive):
            self.ends.saw_alive(node, looked_ms)
            words["vm_ended_ms"] = None
        elif ending.vm_ended_ms is None:
            words["vm_ended_ms"] = max(instance.ended_ms or 0 for instance in alive)
        if ending.ask_rules:
            self.regions.look_up_rules(newest.cloud, newest.region)
            missing = self.regions.missing_rules.get((newest.cloud, newest.region))
            words |= {"ask_rules": False, "evidence": "; ".join(filter(None, [ending.evidence, missing]))}
        return ending.model_copy(update=words)

    def _ended(self, node: CloudNode, ending: EndingRecord) -> None:
        instance, ended_ms = node.files.instance, ending.vm_ended_ms
        node.files.write(
            EndedRecord(
                status=ending.status,
                evidence=ending.evidence,
                started_ms=instance.launched_ms if instance is not None else None,
                ended_ms=self.ends.without_instance_ms(node) if ended_ms is None else ended_ms,
                disks_ms=ending.disks_ms,
                ready_ms=node.ready_ms,
                notice_deadline_ms=node.notice_ms,
                reclaimed=ending.reclaimed,
                with_notice=ending.with_notice,
                zone=instance.zone if instance is not None else None,
                instance_type=instance.instance_type if instance is not None else None,
                tried=ending.tried,
            )
        )

    def _end_text(self, node: CloudNode) -> str:
        if node.files.is_begun("ended") or node.files.is_begun("ending"):
            return "it was ended; the file that says why cannot be read any more"
        was_started = node.may_be_launched or node.files.has("machine")
        return "released" if was_started else "released before it was started"

    def clear(self, node: CloudNode) -> None:
        """Remove the node from SkyPilot's records."""
        if node.may_be_launched:
            self.launches.cancel(node)
            self.around.sky.down(node.name)
        node.files.write(ClearedRecord(at_ms=self.around.clock.now_ms()))
