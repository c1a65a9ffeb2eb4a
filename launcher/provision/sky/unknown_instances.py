"""VMs with the run's label that no node accounts for: without a request, or alive after their end."""

import logging
from dataclasses import dataclass

from launcher.clouds.base import Instance, InstanceState
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.provision.sky.background_tasks import BackgroundTasks
from launcher.provision.sky.inventory import CloudInventory, newest_of
from launcher.provision.sky.node_book import NodeBook

log = logging.getLogger(__name__)


@dataclass(slots=True)
class UnknownInstances:
    """Reports VMs without a request, and takes back the end of a node whose VM still runs."""

    tasks: BackgroundTasks
    nodes: NodeBook
    inventory: CloudInventory

    def report(self) -> list[NodeFact]:
        """Return VMs with the run's label and without a request, and those that ended, as long as the cloud lists them.

        A VM that lives on after the recorded end of its node costs money, so the end is taken back.
        """
        facts = []
        for observed in self.inventory.all_known():
            for instance in observed.instances:
                node = self.nodes.get(instance.name)
                # A name may have ended instances, of launches that SkyPilot repeated, beside the one that counts.
                is_newest = instance == newest_of(observed.instances, instance.name)
                if node is None and is_newest and (fact := _fact_of(instance)) is not None:
                    facts.append(fact)
                if node is None or instance.state not in (InstanceState.PENDING, InstanceState.RUNNING):
                    continue
                if (
                    node.over is not None
                    and observed.at is not None
                    and observed.at > node.over_since
                    and not self.tasks.is_busy(node.name)
                ):
                    log.warning("%s lives on after its end (%s): ended again", instance.name, instance.id)
                    node.take_back_end(instance)
        return facts


def _fact_of(instance: Instance) -> NodeFact | None:
    """Return the fact of a VM without a request: its time is billed. None while it stops."""
    if instance.state is InstanceState.STOPPING:
        return None
    is_gone = instance.state is InstanceState.GONE
    label = f"{instance.cloud} {instance.id} in {instance.zone} bears the run's label"
    return NodeFact(
        name=instance.name,
        status=NodeStatus.GONE if is_gone else NodeStatus.PENDING,
        evidence=(instance.reason or label) if is_gone else label,
        started_ms=instance.launched_ms,
        ended_ms=instance.ended_ms if is_gone else None,
        reclaimed=instance.reclaimed and is_gone,
        zone=instance.zone,
        instance_type=instance.instance_type,
        market=instance.market,
        lives_on=not is_gone,
    )
