"""The JSON files of a cloud node, as typed records. `spec.json` is a NodeSpec, `want.json` a Placement.

Names and keys stay: an upgraded controller goes on with nodes that are running. A key that was not given is not
written, and an unknown key is ignored. Optional keys have defaults, because some steps do not give them.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from launcher.decide.node_facts import NodeFact, NodeStatus

FileName = Literal[
    "want",
    "spec",
    "launch",
    "machine",
    "seen",
    "login",
    "stopping",
    "kept",
    "release",
    "ending",
    "ended",
    "cleared",
    "agent",
    "ready",
    "notice",
    "exit",
]
"""Names without `.json`. The last four are the agent's files in the mirror."""


class NodeView(BaseModel):
    """A part of the content of a file. Immutable, and never written."""

    model_config = ConfigDict(frozen=True)


class NodeRecord(NodeView):
    """The content of one file."""

    FILE: ClassVar[FileName]


class LaunchRecord(NodeRecord):
    """A launch sent to SkyPilot. `adopted`: the cluster was found after a crash, and its request is not known.

    `unsent`: the error with which SkyPilot's client refused to send the launch; empty if it was sent.
    `login`: the launch before failed because the user's login had expired, in words.
    """

    FILE = "launch"

    request_id: str
    at_ms: int
    tries: int = 1
    adopted: bool = False
    unsent: str = ""
    login: str = ""


class LoginRecord(NodeRecord):
    """The SSH login of a VM that is set up. `address`: private. `home`: the login user's folder on the VM."""

    FILE = "login"

    host: str
    user: str
    port: int
    key: str
    proxy: str = ""
    address: str
    home: str


class StoppingRecord(NodeRecord):
    """The cloud stops the VM. `deadline_ms` is assumed. `reason` is the cloud's own text."""

    FILE = "stopping"

    deadline_ms: int
    reason: str = ""


class SeenRecord(NodeRecord):
    """The last sign of life of the VM, written once a minute at most (instance_end.py)."""

    FILE = "seen"

    at_ms: int


class KeptRecord(NodeRecord):
    """The node has failed, and its VM is kept for a look. `until_ms`: its end at the latest, on the run's clock."""

    FILE = "kept"

    until_ms: int
    evidence: str


class ReleaseRecord(NodeRecord):
    """The controller has released the node."""

    FILE = "release"

    at_ms: int


class EndingRecord(NodeRecord):
    """The reason for the node's end, written before the VM is terminated.

    `vm_ended_ms`: the end of the VM (instance_end.py); None while the VM may be billed.
    `disks_ms`: time at which a disk of the node was last found after the end of the VM.
    `ask_rules`: look up missing firewall rules first, because the node was not reachable.
    `lives_on`: the VM was found alive after `ended.json` was written, so the file was taken back.
    """

    FILE = "ending"

    status: NodeStatus
    evidence: str
    vm_ended_ms: int | None = None
    disks_ms: int | None = None
    reclaimed: bool = False
    with_notice: bool | None = None
    tried: tuple[str, ...] = ()
    ask_rules: bool = False
    lives_on: bool = False


class EndedRecord(NodeRecord):
    """The node has ended: no VM and no disk of its name is left."""

    FILE = "ended"

    status: NodeStatus
    evidence: str
    started_ms: int | None = None
    ended_ms: int | None = None
    disks_ms: int | None = None
    ready_ms: int | None = None
    notice_deadline_ms: int | None = None
    reclaimed: bool = False
    with_notice: bool | None = None
    zone: str | None = None
    instance_type: str | None = None
    tried: tuple[str, ...]

    def fact(self, name: str) -> NodeFact:
        return NodeFact(name=name, **dict(self))


class ClearedRecord(NodeRecord):
    """SkyPilot has forgotten the node."""

    FILE = "cleared"

    at_ms: int


class RoleView(NodeView):
    """The role in `spec.json`, and the number of the node among those that had it."""

    role: str
    generation: int = 0


class RegionView(NodeView):
    """The cloud and region of a node, from `want.json` or `machine.json`.

    Only these two keys are read. A file of an older version is therefore readable, and its node can be terminated.
    """

    cloud: str
    region: str


# --- the agent's files ----------------------------------------------------------------------------

Milliseconds = Annotated[int, BeforeValidator(int)]
"""Integer milliseconds. A number with a fraction, or a text of digits, is converted."""


class AgentFile(NodeRecord):
    """A file that the node wrote. Content of another form counts as no file, so that no node hinders its own end."""


class AgentRecord(AgentFile):
    """The agent that runs on the node."""

    FILE = "agent"

    pid: object = None


class ReadyRecord(AgentFile):
    """The agent's workers have called in. Older agents give no `pid`, no `role` and no `hardware`."""

    FILE = "ready"

    at_ms: Milliseconds | None = None
    pid: object = None
    role: str = ""
    hardware: str = ""


class NoticeRecord(AgentFile):
    """The announced time of the preemption."""

    FILE = "notice"

    deadline_ms: Milliseconds | None = None


class ExitRecord(AgentFile):
    """The agent has exited. `at_ms`: by the node's own clock."""

    FILE = "exit"

    code: object = None
    text: object = None
    at_ms: Milliseconds | None = None
