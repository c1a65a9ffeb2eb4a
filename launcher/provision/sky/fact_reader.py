"""The state of a node for the controller, from the node's files and the last answers."""

from dataclasses import dataclass, replace

from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.provision.sky.background_tasks import BackgroundTasks
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.inventory import CloudInventory
from launcher.provision.sky.launches import Launches
from launcher.provision.sky.outcome import Failed
from launcher.provision.sky.phase import Phase, phase_of
from launcher.provision.sky.records import EndedRecord, EndingRecord, KeptRecord, LaunchRecord
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.surroundings import Surroundings


@dataclass(slots=True)
class FactReader:
    """Reports nodes to the controller. Makes no call and changes no file."""

    around: Surroundings
    tasks: BackgroundTasks
    inventory: CloudInventory
    regions: Regions
    launches: Launches

    def fact_of(self, node: CloudNode) -> NodeFact | None:
        """Return the state of the node; None while the request is incomplete."""
        if node.over is None and (ended := node.files.read(EndedRecord)) is not None:
            over = replace(ended.fact(node.name), want=node.files.want)
            node.over, node.over_since = over, self.around.monotonic()
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
        login = "" if node.agent.is_answering else self._login_needed(node)
        if login:
            status, evidence = NodeStatus.UNKNOWN, login
        if not evidence and not node.is_ready and (region := node.region) is not None:
            evidence = self.regions.missing_rules.get(region, "")
        ending, kept = node.files.read(EndingRecord), node.files.read(KeptRecord)
        return NodeFact(
            name=node.name,
            status=status,
            evidence=next((record.evidence for record in (ending, kept) if record is not None), "") or evidence,
            started_ms=instance.launched_ms if instance is not None else None,
            ended_ms=ending.vm_ended_ms if ending is not None else None,
            disks_ms=ending.disks_ms if ending is not None else None,
            lives_on=ending.lives_on if ending is not None else False,
            ready_ms=node.ready_ms if node.is_ready else None,
            role=node.ready_role,
            hardware=node.hardware,
            notice_deadline_ms=node.notice_ms,
            zone=instance.zone if instance is not None else None,
            instance_type=instance.instance_type if instance is not None else None,
            want=node.files.want,
            kept_until_ms=None if kept is None else kept.until_ms,
            login=login,
        )

    def _login_needed(self, node: CloudNode) -> str:
        """Return the words about an expired login that the node waits for; empty if it waits for none."""
        if node.is_ending:  # its end waits, and buying elsewhere need not
            return ""
        launch = node.files.read(LaunchRecord)
        if phase_of(node) is Phase.LAUNCHED and launch is not None:
            outcome = self.launches.outcome(launch)
            if outcome is None and launch.login and node.files.instance is None:
                return launch.login  # the launch that tries the login is on its way
            if outcome is not None and outcome.failed is Failed.LOGIN:
                return outcome.text
        look = "" if node.region is None else self.tasks.logins.get("look {}/{}".format(*node.region), "")
        return self.tasks.logins.get(node.name, "") or look
