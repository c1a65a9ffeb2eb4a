"""The state of a node for the controller, from the node's files and the last answers."""

from dataclasses import dataclass

from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.provision.sky.background_tasks import BackgroundTasks
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.inventory import CloudInventory
from launcher.provision.sky.phase import Phase, phase_of
from launcher.provision.sky.records import EndedRecord, EndingRecord
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.surroundings import Surroundings


@dataclass(slots=True)
class FactReader:
    """Reports nodes to the controller. Makes no call and changes no file."""

    around: Surroundings
    tasks: BackgroundTasks
    inventory: CloudInventory
    regions: Regions

    def fact_of(self, node: CloudNode) -> NodeFact | None:
        """Return the state of the node; None while the request is incomplete."""
        if node.over is None and (ended := node.files.read(EndedRecord)) is not None:
            node.over, node.over_since = ended.fact(node.name), self.around.monotonic()
        if node.over is not None:
            return node.over
        if phase_of(node) is Phase.UNFINISHED:
            return None
        instance = node.files.instance
        is_up = node.is_ready and not node.files.is_begun("ending")
        status, evidence = NodeStatus.UP if is_up else NodeStatus.PENDING, ""
        if not node.agent.is_answering:
            observed = self.inventory.last_in(node.region)
            unknown = (observed.trouble if observed is not None else "") or self.tasks.troubles.get(node.name, "")
            if unknown:
                status, evidence = NodeStatus.UNKNOWN, unknown
        if not evidence and not node.is_ready and (region := node.region) is not None:
            evidence = self.regions.missing_rules.get(region, "")
        ending = node.files.read(EndingRecord)
        return NodeFact(
            name=node.name,
            status=status,
            evidence=(ending.evidence if ending is not None else "") or evidence,
            started_ms=instance.launched_ms if instance is not None else None,
            ended_ms=ending.vm_ended_ms if ending is not None else None,
            disks_ms=ending.disks_ms if ending is not None else None,
            lives_on=ending.lives_on if ending is not None else False,
            ready_ms=node.ready_ms if node.is_ready else None,
            hardware=node.hardware,
            notice_deadline_ms=node.notice_ms,
            zone=instance.zone if instance is not None else None,
            instance_type=instance.instance_type if instance is not None else None,
        )
