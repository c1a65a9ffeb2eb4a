"""The state of a node for the controller, from the node's files and the last answers."""

from dataclasses import dataclass

from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.provision.sky.chores import Chores
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
    chores: Chores
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
        machine = node.files.machine
        is_up = node.is_ready and not node.files.is_begun("ending")
        status, evidence = NodeStatus.UP if is_up else NodeStatus.PENDING, ""
        if not node.agent.is_answering:
            observed = self.inventory.last_in(node.region)
            unknown = (observed.trouble if observed is not None else "") or self.chores.troubles.get(node.name, "")
            if unknown:
                status, evidence = NodeStatus.UNKNOWN, unknown
        if not evidence and not node.is_ready and (place := node.region) is not None:
            evidence = self.regions.missing_rules.get(place, "")
        ending = node.files.read(EndingRecord)
        return NodeFact(
            name=node.name,
            status=status,
            evidence=(ending.evidence if ending is not None else "") or evidence,
            started_ms=machine.launched_ms if machine is not None else None,
            ready_ms=node.ready_ms if node.is_ready else None,
            notice_deadline_ms=node.notice_ms,
            zone=machine.zone if machine is not None else None,
            instance_type=machine.instance_type if machine is not None else None,
        )
