"""The controller's interface to a source of nodes. `LocalProvisioner` forks, `SkyProvisioner` calls SkyPilot.

A provisioner makes no decisions. The idempotency token is the node's name, `<run>-<node>-g<generation>`.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.node_spec import NodeSpec
from launcher.decide.node_facts import NodeFact
from launcher.placement.placement import Placement


class Provisioner(Protocol):
    """Starts and stops nodes, without waiting."""

    def request(self, want: Placement, spec: NodeSpec) -> None:
        """Request a node called `spec.node` and return at once. A repeated name requests no second node."""

    def assign(self, spec: NodeSpec) -> None:
        """Have a node that runs start again with another spec, which gives it another role. Returns at once.

        A repeated order changes nothing. A node that has ended, or is ending, stays as it is.
        """

    def observe(self) -> Sequence[NodeFact]:
        """Return the cloud's current state of every node of this run, also of nodes without a known request."""

    def release(self, names: Sequence[str]) -> None:
        """Terminate the nodes. Idempotent: a node already gone counts as released."""

    def rearm(self, name: str, money_deadline_ms: int) -> None:
        """Send a node a later or earlier spend deadline than its NodeSpec had. A lost node is not an error."""

    def tunnel(self, name: str, port: int) -> tuple[str, int] | None:
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
