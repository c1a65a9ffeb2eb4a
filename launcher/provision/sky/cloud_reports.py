"""The cloud's reports about a node's VM: running, stopping, gone, doubled, or under a foreign identity."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from launcher.clouds.base import Instance, InstanceState
from launcher.decide.node_facts import NodeStatus
from launcher.market.refusals import advice_on
from launcher.provision.sky.background_tasks import BackgroundTasks
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.instance_end import InstanceEnds, is_billed
from launcher.provision.sky.inventory import LOOK_SECONDS, CloudInventory, newest_of
from launcher.provision.sky.records import EndingRecord, LoginRecord, StoppingRecord
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.surroundings import Surroundings

log = logging.getLogger(__name__)

STOPPED_SECONDS = 120.0
"""Time after which a stopping VM counts as stopped for good. The disk of a stopped VM is billed."""

GONE_LOOKS = 2
"""Inventory reads in a row that must miss a VM before the VM counts as gone. New VMs may be missing for a moment."""

NEVER_FOUND_LOOKS = 15
"""Inventory reads after which a VM that SkyPilot logged in to, and no read found, counts as gone."""

STOPPING_NOTICE_MS = 30_000
"""Assumed time left if a stopping VM is the first sign of a preemption (Google Cloud's usual notice)."""


@dataclass(slots=True)
class CloudReports:
    """Compares each new inventory with the node's files, and begins the node's end if the cloud reports an end."""

    around: Surroundings
    tasks: BackgroundTasks
    inventory: CloudInventory
    regions: Regions
    ends: InstanceEnds

    def evaluate(self, node: CloudNode) -> Instance | None:
        """Return the node's VM from the inventory. Begin the node's end if the cloud reports an end."""
        self.inventory.find_instance(node)
        observed = self.inventory.last_in(node.region)
        if observed is None or observed.at is None or node.sightings.look == observed.looks:
            return None if observed is None else newest_of(observed.instances, node.name)
        node.sightings.look = observed.looks
        instance, recorded = newest_of(observed.instances, node.name), node.files.instance
        if instance is not None and instance.state in (InstanceState.PENDING, InstanceState.RUNNING):
            node.sightings.missing, node.sightings.stopping_since = 0, None
            self.ends.saw_alive(node, observed.at_ms)
            if instance != recorded:
                node.files.write_instance(instance)
            self._end_if_restarted(node, instance)
            self._end_doubles(node, observed.instances)
            self._refuse_foreign_identity(node, instance)
            return instance
        if recorded is None and not node.files.has("login"):
            return instance  # no VM existed yet, or only remains of a SkyPilot attempt
        if instance is not None and instance.state is InstanceState.STOPPING:
            if is_billed(instance):
                self.ends.saw_alive(node, observed.at_ms)
            self._record_stopping(node, instance)
            return instance
        node.sightings.missing += 1
        if instance is not None or node.sightings.missing >= GONE_LOOKS or node.files.has("stopping"):
            last = instance or recorded
            if last is not None:
                patient = node.sightings.missing * LOOK_SECONDS < STOPPED_SECONDS
                self.tasks.do(node.name, partial(self._learn_end, node, last, patient))
            elif node.sightings.missing > NEVER_FOUND_LOOKS:
                evidence = "SkyPilot says that it is up, and its cloud lists no machine of it"
                node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))
        return instance

    def _end_if_restarted(self, node: CloudNode, instance: Instance) -> None:
        """End a node whose VM stopped and runs again: Google starts VMs again after maintenance, without their agent.

        The notice of its stop would stay for ever, and the new agent would drain for a preemption that is over.
        """
        again = instance.state is InstanceState.RUNNING and node.files.has("stopping")
        node.sightings.running_again = node.sightings.running_again + 1 if again else 0
        if node.sightings.running_again >= GONE_LOOKS:
            evidence = f"{instance.cloud} stopped its machine and started it again; its processes are lost"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))

    def _refuse_foreign_identity(self, node: CloudNode, instance: Instance) -> None:
        """Deny a node that runs under a foreign identity.

        Without our plugin, SkyPilot's API server attaches an identity of its own with all permissions.
        """
        setup = self.regions.prepared.get((instance.cloud, instance.region))
        if setup is not None and instance.identity and instance.identity != setup.identity:
            evidence = (
                f"it runs as {instance.identity} and not as {setup.identity}: SkyPilot's API server was not started by "
                "spotrl and does not have its plugin (launcher/provision/sky/sky_plugins.yaml); name that file there "
                "in SKYPILOT_SERVER_PLUGINS_CONFIG, or end the server (`sky api stop`) and have spotrl start one"
            )
            node.begin_end(EndingRecord(status=NodeStatus.DENIED, evidence=evidence))

    def _record_stopping(self, node: CloudNode, instance: Instance) -> None:
        """Record a notice if none came, and end the node if the VM keeps stopping."""
        now = self.around.monotonic()
        node.sightings.running_again = 0
        if node.sightings.stopping_since is None:
            node.sightings.stopping_since = now
        # Before the login, SkyPilot itself stops VMs of a failed launch.
        if not node.files.has("stopping") and node.files.has("login"):
            deadline_ms = self.around.clock.now_ms() + (instance.notice_ms or STOPPING_NOTICE_MS)
            node.files.write(StoppingRecord(deadline_ms=deadline_ms, reason=instance.reason))
            if node.agent.link is not None:
                node.agent.link.notice(deadline_ms)
        if now - node.sightings.stopping_since > STOPPED_SECONDS + (instance.notice_ms or 0) / 1000:
            self.tasks.do(node.name, partial(self._learn_end, node, instance, False))

    def _end_doubles(self, node: CloudNode, instances: Sequence[Instance]) -> None:
        """Terminate second VMs of the same name, left by SkyPilot's retries. The VM of SkyPilot's login stays."""
        alive = [
            instance for instance in instances if instance.name == node.name and instance.state is InstanceState.RUNNING
        ]
        login = node.files.read(LoginRecord)
        if len(alive) > 1 and login is not None:
            extra = [instance for instance in alive if login.host not in (instance.public_address, instance.address)]
            if 0 < len(extra) < len(alive):
                log.warning("%s has %s machines: the extra ones are ended", node.name, len(alive))
                self.tasks.do(f"double {node.name}", partial(self._end_extra, extra))

    def _end_extra(self, extra: Sequence[Instance]) -> None:
        self.around.check_lease()
        self.around.clouds[extra[0].cloud].end(extra)

    def _learn_end(self, node: CloudNode, instance: Instance, patient: bool) -> None:
        """Record the VM's end as the cloud reports. `patient`: SkyPilot may still report a better reason."""
        end = self.ends.end_of(node, instance)
        if patient and not end.reclaimed and not node.files.has("login"):
            return  # SkyPilot terminates a VM after a failed set-up
        notice_ms = node.notice_ms
        # If the first sign of a preemption was a stopping VM, the node had no time to act, so it had no notice.
        reason = end.reason or f"{instance.cloud} does not list it any more"
        had_notice = notice_ms is not None and node.files.has("notice")
        node.begin_end(
            EndingRecord(
                status=NodeStatus.GONE,
                evidence="\n".join(filter(None, [reason, advice_on(reason)])),
                vm_ended_ms=None if is_billed(end) else end.ended_ms,
                reclaimed=end.reclaimed,
                with_notice=had_notice if end.reclaimed else None,
            )
        )
