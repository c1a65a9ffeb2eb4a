"""One node on a real cloud: its files, which are the truth, and the process's memory beside the files.

The memory holds only facts that the files also hold, or that may be forgotten.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from engine.node_spec import NodeSpec
from launcher.clouds.base import Instance
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.provision.sky.node_files import NodeFiles
from launcher.provision.sky.node_link import Login
from launcher.provision.sky.records import (
    AgentRecord,
    EndingRecord,
    LoginRecord,
    NoticeRecord,
    ReadyRecord,
    StoppingRecord,
)

log = logging.getLogger(__name__)

SILENT_SECONDS = 20.0
"""Silence of a connection after which the node is in doubt."""


class Link(Protocol):
    """The parts of NodeLink used here."""

    trouble: str
    messages: int

    @property
    def seconds_since_message(self) -> float | None: ...
    def run(self, spec: NodeSpec) -> None: ...
    def rearm(self, left_ms: int) -> None: ...
    def notice(self, deadline_ms: int) -> None: ...
    def tunnel(self, port: int) -> tuple[str, int] | None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class SettingUp:
    """The state of a VM's set-up, between its launch and `login.json`."""

    login: Login | None = None
    private_address: str = ""
    begun: bool = False
    """True if this process has started the set-up."""
    trouble: str = ""
    """The reason for a failed login."""
    failure: str = ""
    """The reason why the set-up is no use, with the end of its log."""


@dataclass(slots=True)
class Sightings:
    """Signs of a node's end in the last inventories."""

    missing: int = 0
    """Inventory reads in a row that did not find the VM."""
    look: int = 0
    """Number of the last inventory read that was evaluated."""
    stopping_since: float | None = None
    running_again: int = 0
    """Inventory reads in a row that found the VM running after it had stopped."""
    alive_ms: int | None = None
    """The last sign of life, known to this process."""
    written_ms: int = 0
    """The content of `seen.json` as this process wrote it."""


@dataclass(slots=True)
class AgentContact:
    """The connection to a node's agent, the orders last sent to the agent, and the length of the agent's silence."""

    link: Link | None = None
    last_sent: NodeSpec | None = None
    sent_at: float = 0.0
    deadline_ms: int | None = None
    """The newest spend deadline; None: the deadline in the start instructions holds."""
    messages: int = 0
    """Number of messages on the connection up to the last pass."""
    silent: float = 0.0
    let_in_at: float | None = None
    """Monotonic time at which this machine's address first changed during the present silence."""
    exit_since: float | None = None

    @property
    def is_answering(self) -> bool:
        """Return whether the node has answered lately."""
        return (
            self.link is not None
            and self.link.seconds_since_message is not None
            and self.link.seconds_since_message <= SILENT_SECONDS
        )

    def close(self) -> None:
        """End the connection. The agent continues."""
        if self.link is not None:
            self.link.close()
            self.link, self.messages = None, 0


@dataclass(slots=True)
class CloudNode:
    """A node's files and a process's memory of the node."""

    files: NodeFiles
    fresh: bool = False
    """True if requested in this process and not yet sent to SkyPilot: no launch can exist."""
    setting_up: SettingUp = field(default_factory=SettingUp)
    sightings: Sightings = field(default_factory=Sightings)
    agent: AgentContact = field(default_factory=AgentContact)
    unsettled_since: float | None = None
    """Time since which the region's setup is not known everywhere in the cloud (monotonic seconds)."""
    over: NodeFact | None = None
    """The content of `ended.json`."""
    over_since: float = 0.0
    cleared: bool = False

    @property
    def name(self) -> str:
        return self.files.folder.name

    @property
    def region(self) -> tuple[str, str] | None:
        """Return the cloud and region of the request or of the found VM."""
        return self.files.region

    def is_cleared(self) -> bool:
        """Return whether no work is left for this node. A node with an unreadable end is ended again."""
        self.cleared = self.cleared or (self.files.has("cleared") and self.files.has("ended"))
        return self.cleared

    @property
    def is_ending(self) -> bool:
        """Return True once the node's end was requested or has begun, even with unreadable files."""
        return self.files.is_begun("release") or self.files.is_begun("ending") or self.files.is_begun("ended")

    @property
    def may_be_launched(self) -> bool:
        """Return whether SkyPilot may have a launch of this node.

        A process may have died after it sent the launch and before it wrote that down.
        """
        return self.files.is_begun("launch") or (self.files.is_begun("want") and not self.fresh)

    @property
    def should_answer(self) -> bool:
        """Return True while the node has a VM that is not to end."""
        return self.files.has("machine") and not self.is_ending

    @property
    def is_damaged(self) -> bool:
        """Return whether the node's spec was written and cannot be read any more."""
        return not self.files.has("spec") and (self.files.is_begun("spec") or self.files.is_begun("launch"))

    def begin_end(self, end: EndingRecord) -> None:
        """Write the reason for the end, unless a reason is known. The node is terminated from the next pass on."""
        log.info("%s: %s: %s", self.name, end.status, end.evidence)
        if not self.files.has("ending"):
            self.files.write(end)

    def take_back_end(self, instance: Instance) -> None:
        """Remove the record of the end, because this VM lives on. The node is terminated from the next pass on.

        The VM is recorded too: a node that was released before its launch knows no region to end it in.
        """
        self.files.write_instance(instance)
        ending = self.files.read(EndingRecord) or EndingRecord(status=NodeStatus.GONE, evidence="it lived on")
        self.files.write(ending.model_copy(update={"vm_ended_ms": None, "disks_ms": None, "lives_on": True}))
        self.files.forget("ended")
        self.files.forget("cleared")
        self.over, self.cleared = None, False

    @property
    def can_log_in(self) -> bool:
        """Return True if the login and its key can be read."""
        login = self.files.read(LoginRecord)
        try:
            return login is not None and Path(login.key).stat().st_size > 0
        except OSError:
            return False

    @property
    def notice_ms(self) -> int | None:
        """Return the earliest announced time of the node's preemption; None without a notice."""
        notice, stopping = self.files.read(NoticeRecord), self.files.read(StoppingRecord)
        deadlines_ms = [record.deadline_ms for record in (notice, stopping) if record is not None]
        return min((deadline_ms for deadline_ms in deadlines_ms if deadline_ms is not None), default=None)

    @property
    def ready_ms(self) -> int | None:
        """Return the time at which the node's workers first called in, also for an earlier agent."""
        ready = self.files.read(ReadyRecord)
        return ready.at_ms if ready is not None else None

    @property
    def hardware(self) -> str:
        """Return the node's hardware in the agent's words; empty if the agent has not told it."""
        ready = self.files.read(ReadyRecord)
        return ready.hardware if ready is not None else ""

    @property
    def ready_role(self) -> str:
        """Return the role of the workers that called in; empty if the agent has not told it."""
        ready = self.files.read(ReadyRecord)
        return ready.role if ready is not None else ""

    @property
    def is_ready(self) -> bool:
        """Return whether the workers of the current agent have called in, with the role that the node has now."""
        agent, ready, now = self.files.read(AgentRecord), self.files.read(ReadyRecord), self.files.role
        if agent is None or ready is None or now is None or ready.role not in ("", now.role):
            return False
        return "pid" not in ready.model_fields_set or ready.pid == agent.pid
