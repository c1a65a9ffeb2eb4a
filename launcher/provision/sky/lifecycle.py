"""The next step of a node, by its phase (phase.py)."""

import logging
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from launcher.clouds.base import Instance
from launcher.decide.node_facts import NodeStatus
from launcher.provision.sky.background_tasks import BackgroundTasks
from launcher.provision.sky.bring_up import BringUp
from launcher.provision.sky.cloud_node import CloudNode
from launcher.provision.sky.cloud_reports import CloudReports
from launcher.provision.sky.launches import Launches
from launcher.provision.sky.phase import Phase, phase_of
from launcher.provision.sky.records import EndingRecord
from launcher.provision.sky.terminate import Terminator
from launcher.provision.sky.watch import AgentWatch, Pass

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Lifecycle:
    """Advances nodes. Never waits: blocking calls run in the pool, one at a time for each node."""

    tasks: BackgroundTasks
    launches: Launches
    bring_up: BringUp
    reports: CloudReports
    watch: AgentWatch
    terminator: Terminator

    def advance(self, node: CloudNode, this_pass: Pass) -> None:
        """Advance the node by one step, unless a task of the node is running."""
        if self.tasks.is_busy(node.name):
            return  # a pool task is writing the node's files
        match phase_of(node):
            case Phase.UNFINISHED | Phase.CLEARED:
                return
            case Phase.REQUESTED | Phase.LAUNCHED | Phase.SET_UP:
                instance = self.reports.evaluate(node)
                if not node.is_ending and not self.tasks.is_busy(node.name):
                    self._mend(node)
                    self._go_on(node, instance, this_pass)
            case Phase.ENDING:
                node.agent.close()
                self.tasks.do(node.name, partial(self.terminator.end, node))
            case Phase.ENDED:
                node.agent.close()
                self.tasks.do(node.name, partial(self.terminator.clear, node))
            case unknown:
                assert_never(unknown)

    def _go_on(self, node: CloudNode, instance: Instance | None, this_pass: Pass) -> None:
        """Do the work of the phase, which the repair of a file may have changed."""
        match phase_of(node):
            case Phase.REQUESTED:
                self.tasks.do(node.name, partial(self.launches.launch, node))
            case Phase.LAUNCHED:
                self.bring_up.wait(node)
            case Phase.SET_UP:
                self.watch.keep(node, instance, this_pass)
            case Phase.UNFINISHED | Phase.ENDING | Phase.ENDED | Phase.CLEARED:
                return
            case unknown:
                assert_never(unknown)

    def _mend(self, node: CloudNode) -> None:
        """Recover the content of a damaged file, or end the node if no other source knows the content."""
        if node.is_damaged:
            evidence = "its spec.json cannot be read: a power cut of the launcher's machine?"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))
        elif not node.files.has("want") and not node.files.has("launch"):
            evidence = "its want.json cannot be read: a power cut of the launcher's machine?"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))
        elif node.files.is_begun("login") and not node.can_log_in:
            log.warning("%s: its login cannot be read any more; SkyPilot is asked again", node.name)
            node.agent.close()
            node.setting_up.login = None
            node.files.forget("login")
            node.files.forget("launch")  # an old launch would count as late; its cluster is adopted instead
