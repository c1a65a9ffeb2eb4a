"""A node that is set up: keep its connection and its agent, and end the node after an exit or a long silence.

A failed node may be kept for a while (`recovery.keep_failed`): its VM and connection stay, and its agent is not started
again.

A node is lost when the node stops answering although a fresh API call shows the VM running. An API that does not answer
proves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.node_spec import EXIT_FINISHED, EXIT_MONEY, EXIT_UNFIT
from launcher.clouds.base import Instance
from launcher.decide.node_facts import NodeStatus
from launcher.provision.sky.background_tasks import BackgroundTasks
from launcher.provision.sky.cloud_node import CloudNode, Link
from launcher.provision.sky.instance_end import SEEN_MS, InstanceEnds
from launcher.provision.sky.inventory import CloudInventory
from launcher.provision.sky.launches import autostop_minutes
from launcher.provision.sky.node_book import NodeBook
from launcher.provision.sky.node_link import Login
from launcher.provision.sky.records import EndingRecord, ExitRecord, KeptRecord, LoginRecord, StoppingRecord
from launcher.provision.sky.regions import Regions
from launcher.provision.sky.surroundings import Surroundings

LOST_SECONDS = 90.0
"""Silence after which a node is terminated even though the cloud calls the VM running: the node costs money without
work."""

ALL_SILENT = 4
"""Factor on the patience while no node at all answers: the controller's own network may be down."""

FIRST_WORD_SECONDS = 300.0
"""Patience with a VM that is set up and has never answered."""

READY_SECONDS = 900.0
"""Longest time until an agent's workers call in. Loading a large model takes minutes."""

RULES_SECONDS = 60.0
"""Time after which missing firewall rules are looked up for an agent that is not ready. The lookup repeats at the
same gap."""

EXIT_SECONDS = 3.0
"""Time for which an agent's exit must last. A shorter exit is a restart."""

AFTER_NOTICE_MS = 600_000
"""Time after an announced preemption for which the VM is left to the cloud."""

REARM_SECONDS = 300.0
"""Time between two calls that set SkyPilot's own timer on the VM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """The facts of one pass over all nodes.

    `seconds`: time since the pass before, at most 1 s. `gap_ms`: the same on the run's clock, which a suspended machine
    does not stop. `trainer`: private address of the newest trainer.
    """

    seconds: float
    gap_ms: int
    trainer: str | None


@dataclass(slots=True)
class AgentWatch:
    """Keeps the connections to nodes, and watches the agents behind them."""

    around: Surroundings
    tasks: BackgroundTasks
    nodes: NodeBook
    inventory: CloudInventory
    regions: Regions
    ends: InstanceEnds
    make_link: Callable[[Login, Path], Link]

    def trainer_address(self) -> str | None:
        """Return the private address of the newest trainer that has not ended.

        A node that was promoted later is newer, however old its VM is.
        """
        trainers = []
        for node in self.nodes.all():
            if node.is_ending or node.files.is_begun("kept"):
                continue
            now, login = node.files.role, node.files.read(LoginRecord)
            if now is not None and now.role == "trainer" and login is not None:
                trainers.append((now.generation, node.name, login.address))
        return max(trainers)[2] if trainers else None

    def keep(self, node: CloudNode, instance: Instance | None, this_pass: Pass) -> None:
        """Keep the connection and the agent of a set-up VM alive, and watch both."""
        login = node.files.read(LoginRecord)
        assert login is not None
        if node.agent.link is None:
            line = Login(host=login.host, user=login.user, key=Path(login.key), port=login.port, proxy=login.proxy)
            node.agent.link = self.make_link(line, node.files.folder)
            if (stopping := node.files.read(StoppingRecord)) is not None:
                node.agent.link.notice(stopping.deadline_ms)
        if node.files.is_begun("kept"):
            self._look_after_kept(node)
            return
        self._start_agent(node, login, this_pass.trainer)
        if self._has_exited(node) or self._is_late(node):
            return
        self._doubt(node, instance, this_pass)
        if node.agent.deadline_ms is not None and node.agent.is_answering:
            self.tasks.every(REARM_SECONDS, f"rearm {node.name}", partial(self._rearm_sky, node))

    def _start_agent(self, node: CloudNode, login: LoginRecord, trainer: str | None) -> None:
        """Start the node's agent with the trainer's address. A trainer node gets its own address.

        Does nothing if no address is known, or if the agent was last started with the same address and role.
        """
        spec, region = node.files.spec, node.region
        assert spec is not None
        host, sent = login.address if spec.role == "trainer" else trainer, node.agent.last_sent
        if (
            region is None
            or host is None
            or node.agent.link is None
            or (sent is not None and (sent.coordinator_host, sent.role) == (host, spec.role))
        ):
            return
        deadline_ms, instance = node.agent.deadline_ms or spec.money_deadline_ms, node.files.instance
        home = f"{login.home}/spotrl"
        node.agent.last_sent, node.agent.sent_at = (
            spec.model_copy(
                update={
                    "coordinator_host": host,
                    "cloud": region[0],
                    "folder": f"{home}/node",
                    "workdir": f"{home}/work" if spec.workdir else None,
                    "notice_ms": None if instance is None else instance.notice_ms,
                    "digest": self.around.purchases.bundle.digest,
                    "weights": self.around.purchases.weights.get(region[0], ""),
                    "lora": self.around.purchases.lora.get(region[0], ""),
                    "money_deadline_ms": None,
                    "money_left_ms": None if deadline_ms is None else max(0, deadline_ms - self.around.clock.now_ms()),
                }
            ),
            self.around.monotonic(),
        )
        node.agent.link.run(node.agent.last_sent)

    def _has_exited(self, node: CloudNode) -> bool:
        """Return whether the agent has exited for good, and end the node unless a preemption is near.

        A machine that cannot be a node counts as denied: another of its instance type would be the same.
        AWS does not bill a spot instance that AWS preempts within an hour, but does if we terminate the instance first.
        """
        exited = node.files.read(ExitRecord)
        if exited is None:
            node.agent.exit_since = None
            return False
        now = self.around.monotonic()
        node.agent.exit_since = now if node.agent.exit_since is None else node.agent.exit_since
        deadline_ms = node.notice_ms
        if deadline_ms is not None and self.around.clock.now_ms() < deadline_ms + AFTER_NOTICE_MS:
            return False
        if now - node.agent.exit_since < EXIT_SECONDS:
            return False
        if exited.code == EXIT_UNFIT:
            node.begin_end(EndingRecord(status=NodeStatus.DENIED, evidence=str(exited.text)))
            return True
        text = f": {exited.text}" if exited.text else ""
        evidence = f"its agent exited with code {exited.code}{text}"
        if exited.code in (EXIT_FINISHED, EXIT_MONEY) or not self._keep(node, evidence):
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))
        return True

    def _keep(self, node: CloudNode, evidence: str) -> bool:
        """Keep the VM of a failed node, if the job asks for it and no other node is kept. Return whether it is kept.

        The guard on the VM still ends it at its spend deadline, and ten minutes after the last call of a controller.
        """
        keep_ms = self.around.purchases.keep_failed_ms
        if not keep_ms or any(peer.files.is_begun("kept") and not peer.is_ending for peer in self.nodes.all()):
            return False
        node.files.write(KeptRecord(until_ms=self.around.clock.now_ms() + keep_ms, evidence=evidence))
        return True

    def _look_after_kept(self, node: CloudNode) -> None:
        """End a kept node when its time is over. Its agent is not started again."""
        kept = node.files.read(KeptRecord)
        if kept is None:
            evidence = "its kept.json cannot be read: a power cut of the launcher's machine?"
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence))
        elif self.around.clock.now_ms() >= kept.until_ms:
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=kept.evidence))

    def _is_late(self, node: CloudNode) -> bool:
        """End the node if its workers have not called in after `READY_SECONDS`. Return True if the node was ended.

        The usual reason is a missing firewall rule. After `RULES_SECONDS`, the region's rules are therefore looked up
        until the node is ready.
        """
        waited, site = self.around.monotonic() - node.agent.sent_at, node.region
        if node.agent.last_sent is None or site is None or node.is_ready or waited < RULES_SECONDS:
            return False
        cloud, region = site
        self.tasks.every(RULES_SECONDS, f"rules {cloud}/{region}", partial(self.regions.look_up_rules, cloud, region))
        if waited < READY_SECONDS:
            return False
        evidence = f"its workers did not call in within {READY_SECONDS:.0f} s"
        if not self._keep(node, evidence):
            node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))
        return True

    def _doubt(self, node: CloudNode, instance: Instance | None, this_pass: Pass) -> None:
        """End a node after long silence. Silence counts only if a fresh inventory shows the VM running.

        Before that this machine's own address is asked; if it changed, the node gets the whole time again, once.
        """
        agent, now = node.agent, self.around.monotonic()
        if agent.link is not None and agent.link.messages != agent.messages:
            agent.messages = agent.link.messages
            # After a pause of this process, the messages may be as old as the pause.
            if this_pass.gap_ms <= SEEN_MS:
                self.ends.saw_alive(node, self.around.clock.now_ms())
        if agent.is_answering:
            agent.silent, agent.let_in_at = 0.0, None
            return
        agent.silent += this_pass.seconds
        patience = (
            FIRST_WORD_SECONDS
            if node.agent.link is None or node.agent.link.seconds_since_message is None
            else LOST_SECONDS
        )
        if not any(peer.agent.is_answering for peer in self.nodes.all()):
            patience *= ALL_SILENT
        changed, asked = self.regions.address_changed_at, self.regions.address_asked_at
        if changed is not None and changed >= now - agent.silent:
            agent.let_in_at = agent.let_in_at or changed
        if agent.let_in_at is not None and now - agent.let_in_at < patience:
            return
        if agent.silent < patience or instance is None or not self.inventory.is_fresh(node.region):
            return
        if asked is None or asked < now - (agent.silent - patience):  # not since the patience ran out
            self.tasks.do("ssh from", self.regions.follow_address)
            return
        trouble = node.agent.link.trouble if node.agent.link is not None else ""
        evidence = (
            f"it stopped answering: nothing was heard for {node.agent.silent:.0f} s ({trouble}), though "
            f"{instance.cloud} calls it {instance.state}"
        )
        node.begin_end(EndingRecord(status=NodeStatus.GONE, evidence=evidence, ask_rules=True))

    def _rearm_sky(self, node: CloudNode) -> None:
        self.around.sky.rearm(node.name, autostop_minutes(node.agent.deadline_ms, self.around.clock.now_ms()))
