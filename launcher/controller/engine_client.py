"""The controller's calls to the engine: capacity snapshots and the order to stop.

A call never waits for an engine that does not answer: a pass must go on.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from engine.clock import Clock
from engine.events import Capacity, NodeCapacity, NodeState
from engine.node_spec import role_token
from launcher.decide.facts import NodeRecord
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.ledger.models import Run
from launcher.placement.plan import Slot
from launcher.provision.provisioner import Provisioner

CAPACITY_SECONDS = 10.0
"""Longest time between two capacity snapshots for the engine (wall time). Every change is also sent at once."""


class EngineClient:
    """Calls to the coordinator of the newest live trainer."""

    def __init__(self, run: Run, slots: Mapping[str, Slot], provisioner: Provisioner, clock: Clock) -> None:
        self._run, self._slots, self._provisioner, self._clock = run, slots, provisioner, clock
        self._trainer: str | None = None
        self._last_sent: tuple[NodeCapacity, ...] | None = None
        self._last_sent_at = 0.0
        self.trouble: str | None = None
        """The engine's own report of trouble, such as a full disk. None: no trouble."""

    @property
    def trainer(self) -> str | None:
        """Name of the newest live trainer, whose coordinator receives the calls."""
        return self._trainer

    def find_trainer(self, nodes: Sequence[NodeRecord]) -> None:
        live = [node for node in nodes if node.role == "trainer" and node.is_live]
        self._trainer = max(live, key=lambda node: node.generation).name if live else None

    def stop(self, reason: str) -> None:
        """Order the engine to stop the run. If the engine does not answer, the order is lost.

        The controller repeats the order in every pass while it waits for the engine to stop.
        """
        self._post("stop", {"reason": reason})

    def send_capacity(self, nodes: Sequence[NodeRecord], cloud: Mapping[str, NodeFact]) -> None:
        """Send a capacity snapshot on every change and every 10 s: of all nodes, because the trainer's sample too.

        The run's clock numbers the snapshots, so numbers still grow after a restart.
        """
        capacities = (self._capacity_of(node, cloud.get(node.name)) for node in _newest(nodes))
        now = tuple(node for node in capacities if node is not None)
        due = time.monotonic() - self._last_sent_at >= CAPACITY_SECONDS
        if now and (due or now != self._last_sent):
            answer = self._post("capacity", Capacity(generation=self._clock.now_ms(), nodes=now).to_json())
            if answer is not None:
                self._last_sent, self._last_sent_at = now, time.monotonic()
                self.trouble = answer.get("trouble")

    def _capacity_of(self, node: NodeRecord, fact: NodeFact | None) -> NodeCapacity | None:
        if not node.is_live:
            state = NodeState.LOST
        elif node.is_leaving:
            state = NodeState.DRAINING
        elif fact is not None and fact.status is NodeStatus.UP:
            state = NodeState.READY
        else:
            return None
        return NodeCapacity(
            node=node.name,
            market=node.market,
            state=state,
            workers=max(1, (node.wanted or self._slots[node.slot].option).placement.gpus),
            deadline_ms=fact.notice_deadline_ms if fact is not None and state is NodeState.DRAINING else None,
        )

    def _post(self, path: str, body: str | dict[str, str]) -> dict[str, Any] | None:
        """Post a message to the coordinator and return the reply.

        None: the coordinator is not reachable. Passes do not wait.
        """
        address = (
            self._provisioner.tunnel(self._trainer, self._run.coordinator_port) if self._trainer is not None else None
        )
        if address is None:
            return None
        try:
            answer = httpx.post(
                f"http://{address[0]}:{address[1]}/{path}",
                headers={
                    "Authorization": f"Bearer {role_token(self._run.token, 'controller')}",
                    "Content-Type": "application/json",
                },
                content=body if isinstance(body, str) else None,
                json=body if not isinstance(body, str) else None,
                timeout=0.5,
                trust_env=False,
            )
            return dict(answer.json() if answer.content else {}) if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            return None


def _newest(nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Return live nodes and the last two generations of each slot.

    Older nodes are left out, to keep the snapshot small.
    """
    newest: defaultdict[str, int] = defaultdict(int)
    for node in nodes:
        newest[node.slot] = max(newest[node.slot], node.generation)
    return [node for node in nodes if node.is_live or node.generation >= newest[node.slot] - 1]
