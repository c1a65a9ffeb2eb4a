"""The records of one local node: JSON objects in the files of the node's folder.

All state of the local infra is in these files, so any process may continue the work. A missing or damaged file reads as
None. A damaged request is rebuilt.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.clock import Clock, boot_ms
from engine.durable import write_durably
from launcher.decide.node_facts import NodeFact, NodeStatus


class NodeRecords:
    """The records of one node, and the facts that follow from the records alone."""

    def __init__(self, folder: Path, clock: Clock, boot: Callable[[], int] = boot_ms) -> None:
        """`clock`: the run's. `boot`: this machine's boot clock (ms), for timeouts of processes."""
        self.folder, self.clock, self.boot = folder, clock, boot

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in the file, or None when the file is missing or damaged."""
        try:
            value = json.loads((self.folder / name).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Replace the file durably, readable by its owner only: node.json holds the run's token."""
        write_durably(self.folder / name, json.dumps(value).encode())

    def seconds_since(self, record: dict[str, Any] | None) -> float:
        """Return the wall seconds since a record with `boot_ms` was written; 0 for a record without."""
        return max(0, self.boot() - int((record or {}).get("boot_ms", self.boot()))) / 1000

    def requested(self) -> dict[str, Any] | None:
        """Return the recorded request. A damaged record is rebuilt from the started process."""
        request, file = self.read("request.json"), self.folder / "request.json"
        if request is None and file.exists():
            spawned = self.read("spawned.json") or {"at_ms": self.clock.now_ms()}
            request = {"requested_ms": spawned["at_ms"], "zone": "", "ordinal": None}
            self.write("request.json", request)
        return request

    def is_being_preempted(self, request: dict[str, Any]) -> bool:
        """Return whether a preemption of the node has begun."""
        is_known = self.read("reclaim.json") is not None and self.read("ready.json") is not None
        return is_known and request.get("ordinal") is not None

    def fact_of_running(self, request: dict[str, Any]) -> NodeFact:
        """Return the fact of a node that has not ended. A node with an agent is billed from its request on."""
        agent, ready = self.read("agent.json"), self.read("ready.json")
        notice = self.read("notice.json")
        return NodeFact(
            name=self.folder.name,
            status=NodeStatus.UP if agent and ready else NodeStatus.PENDING,
            started_ms=int(request["requested_ms"]) if agent else None,
            ready_ms=int(ready["at_ms"]) if ready else None,
            role=str(ready.get("role", "")) if ready else "",
            hardware=str(ready.get("hardware", "")) if ready else "",
            notice_deadline_ms=int(notice["deadline_ms"]) if notice else None,
        )

    def fact_of_ended(self) -> NodeFact | None:
        """Return the fact of a node with a recorded end, else None."""
        record = self.read("ended.json")
        return None if record is None else NodeFact(name=self.folder.name, status=NodeStatus.GONE, **record)
