"""VMs with the run's label that no node accounts for: without a request, or alive after their end."""

import logging
from dataclasses import dataclass

from launcher.clouds.base import InstanceState
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.provision.sky.background_tasks import BackgroundTasks
from launcher.provision.sky.inventory import CloudInventory
from launcher.provision.sky.node_book import NodeBook

log = logging.getLogger(__name__)


@dataclass(slots=True)
class UnknownInstances:
    """Reports VMs without a request, and takes back the end of a node whose VM still runs."""

    tasks: BackgroundTasks
    nodes: NodeBook
    inventory: CloudInventory

    def report(self) -> list[NodeFact]:
        """Return VMs with the run's label and without a request.

        A VM that lives on after the recorded end of its node costs money, so the end is taken back.
        """
        facts = []
        for observed in self.inventory.all_known():
            for instance in observed.instances:
                node = self.nodes.get(instance.name)
                if instance.state not in (InstanceState.PENDING, InstanceState.RUNNING):
                    continue
                if node is None:
                    evidence = f"{instance.cloud} {instance.id} in {instance.zone} bears the run's label"
                    facts.append(
                        NodeFact(
                            name=instance.name,
                            status=NodeStatus.PENDING,
                            evidence=evidence,
                            started_ms=instance.launched_ms,
                            lives_on=True,
                        )
                    )
                elif (
                    node.over is not None
                    and observed.at is not None
                    and observed.at > node.over_since
                    and not self.tasks.is_busy(node.name)
                ):
                    log.warning("%s lives on after its end (%s): ended again", instance.name, instance.id)
                    node.take_back_end()
        return facts
