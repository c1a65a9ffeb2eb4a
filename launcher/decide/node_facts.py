"""The observed state of nodes, as a provisioner reports it."""

import re
from dataclasses import dataclass
from enum import StrEnum

from engine.events import Market
from launcher.placement.placement import Placement


class NodeStatus(StrEnum):
    """The cloud's status of a node now. An API that does not answer gives UNKNOWN, never GONE."""

    PENDING = "pending"
    UP = "up"
    GONE = "gone"
    DENIED = "denied"
    NO_CAPACITY = "no_capacity"
    UNKNOWN = "unknown"


QUOTA_WORDS = (
    "MaxSpotInstanceCountExceeded",
    "VcpuLimitExceeded",
    "InstanceLimitExceeded",
    "QUOTA_EXCEEDED",
    "quotaExceeded",
)
"""Error codes of AWS and Google Cloud for a quota that is too small for another node."""

QUOTA_OF_ZERO = re.compile(r"limit(?: of|:) 0(?:\.0*)?(?![.\d])", re.IGNORECASE)


def is_quota_used_up(evidence: str) -> bool:
    """Return whether a cloud's error says that a quota is used up.

    A quota of 0 does not count, because the end of a node cannot free a part of a quota of 0.
    """
    return any(word in evidence for word in QUOTA_WORDS) and QUOTA_OF_ZERO.search(evidence) is None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFact:
    """The observed state of a node. `evidence` is the cloud's own text about the end.

    `ready_ms`: time at which the node's workers had called in (run's clock). `role`: the role of these workers, which a
    promotion changes; empty if the node's agent has not told it. `hardware`: GPUs, CPU and memory as the node's agent
    sees them, in words.
    `lives_on`: the VM was found alive after an end was reported, and costs money again.
    `notice_deadline_ms`: announced time of the preemption (run's clock).
    `started_ms`, `ended_ms`: the billed interval of the VM, if known (run's clock). A VM may have ended while the node
    is still PENDING, because a disk of the node cannot be removed yet.
    `disks_ms`: time at which a disk of the node was last found after the end of the VM (run's clock).
    `signal`, `with_notice`: manner of a preemption, if known ("SIGKILL", "SIGSTOP" on the local infra).
    `zone`, `instance_type`: the real purchase as the cloud reports, not the request.
    `tried`: zones that refused the node, `cloud/region/zone`.
    `want`: the order behind the node, from the run's folder. `market`: the capacity type, as the cloud reports.
    `fault`: error of spotrl's own while it looked at the node, so the state is not known.
    `kept_until_ms`: the node has failed, and its VM is kept until then (run's clock). `evidence` is the failure.
    `login`: the user's login at the cloud has expired, in words with the command; set only if the node needs it now.
    """

    name: str
    status: NodeStatus
    evidence: str = ""
    started_ms: int | None = None
    ended_ms: int | None = None
    disks_ms: int | None = None
    lives_on: bool = False
    notice_deadline_ms: int | None = None
    signal: str | None = None
    with_notice: bool | None = None
    reclaimed: bool = False
    ready_ms: int | None = None
    role: str = ""
    hardware: str = ""
    zone: str | None = None
    instance_type: str | None = None
    tried: tuple[str, ...] = ()
    want: Placement | None = None
    market: Market | None = None
    kept_until_ms: int | None = None
    fault: str = ""
    login: str = ""
