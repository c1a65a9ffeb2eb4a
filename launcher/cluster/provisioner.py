"""What the controller asks of a place where nodes can be had. `LocalProvisioner` forks, `SkyProvisioner` asks SkyPilot.

Decide apart from do: nothing here chooses. The idempotency token is the node's name, `<run>-<node>-g<generation>`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.config import NodeSpec
from launcher.placement.placement import Placement


class NodeStatus(StrEnum):
    """What the cloud says of a node now. An API that does not answer is UNKNOWN, never GONE."""

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
"""Codes of AWS and Google Cloud for a quota that does not bear one more node."""

QUOTA_OF_ZERO = re.compile(r"limit(?: of|:) 0(?:\.0*)?(?![.\d])", re.IGNORECASE)


def is_quota_used_up(evidence: str) -> bool:
    """Return whether a cloud's words say that a quota is used up. A quota of 0 is not: no node that ends frees it."""
    return any(word in evidence for word in QUOTA_WORDS) and QUOTA_OF_ZERO.search(evidence) is None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFact:
    """One node as observed. `evidence` is the cloud's own words for how it ended.

    `ready_ms`: when its workers had called in (run's clock).
    `notice_deadline_ms`: the cloud announced that it takes the node back then (run's clock).
    `started_ms`, `ended_ms`: what is billed, when known (run's clock).
    `signal`, `with_notice`: how a reclaim came about, when known ("SIGKILL", "SIGSTOP" on the local infra).
    `zone`, `instance_type`: what it really is, where the cloud says so: what was bought, not what was asked for.
    `tried`: zones that refused it, `cloud/region/zone`.
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
        """Ask for one node called `spec.node` and return at once; the same name twice asks for one node."""

    def observe(self) -> Sequence[NodeFact]:
        """What the cloud says now of every node of this run, also of those nobody remembers asking for."""

    def release(self, names: Sequence[str]) -> None:
        """Idempotent: a node that is already gone counts as released."""

    def rearm(self, name: str, money_deadline_ms: int) -> None:
        """Tell a node that its money lasts longer, or less long, than its NodeSpec said. A lost node is no error."""

    def door(self, name: str, port: int) -> tuple[str, int] | None:
        """Where this process reaches `port` of that node: host and port. None: not now. Never waits."""

    def tidy(self) -> bool:
        """Every node has ended: take away what was made for them (groups, keys, roles). True when nothing is left.

        Returns at once and is asked again until it is True.
        """

    def close(self) -> None:
        """Drop what was to be done and has not begun. Another controller looks after the nodes from now on."""
