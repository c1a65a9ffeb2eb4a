"""The controller's interface to a source of nodes. `LocalProvisioner` forks, `SkyProvisioner` calls SkyPilot.

A provisioner makes no decisions. The idempotency token is the node's name, `<run>-<node>-g<generation>`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.config import NodeSpec
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
"""Error codes of AWS and Google Cloud for a quota without room for a further node."""

QUOTA_OF_ZERO = re.compile(r"limit(?: of|:) 0(?:\.0*)?(?![.\d])", re.IGNORECASE)


def is_quota_used_up(evidence: str) -> bool:
    """Return whether a cloud's error says that a quota is used up.

    A quota of 0 does not count: no ending node frees a part.
    """
    return any(word in evidence for word in QUOTA_WORDS) and QUOTA_OF_ZERO.search(evidence) is None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFact:
    """The observed state of a node. `evidence` is the cloud's own text about the end.

    `ready_ms`: time at which the node's workers had called in (run's clock).
    `notice_deadline_ms`: announced time of the preemption (run's clock).
    `started_ms`, `ended_ms`: the billed interval, if known (run's clock).
    `signal`, `with_notice`: manner of a preemption, if known ("SIGKILL", "SIGSTOP" on the local infra).
    `zone`, `instance_type`: the real purchase as the cloud reports, not the request.
    `tried`: zones that refused the node, `cloud/region/zone`.
    """

    name: str
    status: NodeStatus
    evidence: str = ""
    started_ms: int | None = None
    ended_ms: int | None = None
    notice_deadline_ms: int | None = None
    signal: str | None = None
    with_notice: bool | None = None
    reclaimed: bool = False
    ready_ms: int | None = None
    zone: str | None = None
    instance_type: str | None = None
    tried: tuple[str, ...] = ()


class Provisioner(Protocol):
    """Starts and stops nodes, without waiting."""

    def request(self, want: Placement, spec: NodeSpec) -> None:
        """Request a node called `spec.node` and return at once. A repeated name requests no second node."""

    def observe(self) -> Sequence[NodeFact]:
        """Return the cloud's current state of every node of this run, also of nodes without a known request."""

    def release(self, names: Sequence[str]) -> None:
        """Terminate the nodes. Idempotent: a node already gone counts as released."""

    def rearm(self, name: str, money_deadline_ms: int) -> None:
        """Send a node a later or earlier spend deadline than its NodeSpec had. A lost node is not an error."""

    def door(self, name: str, port: int) -> tuple[str, int] | None:
        """Return the host and port at which this process reaches `port` of the node.

        None: not reachable now. Never waits.
        """

    def tidy(self) -> bool:
        """Remove the resources made for the nodes (groups, keys, roles) after every node has ended.

        True: nothing is left.
        Returns at once. The controller calls again until the answer is True.
        """

    def close(self) -> None:
        """Drop all work that has not begun. Another controller manages the nodes from now on."""
