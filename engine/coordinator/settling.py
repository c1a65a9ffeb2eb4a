"""Settling of a torn SP group: the peers without a call since the tear.

The promise: no new group forms on a node until each settling peer of the node has called in, died or is overdue.
"""

from engine.parallel.worker_group import node_of

SETTLING_SECONDS = 0.3
"""Wall time in seconds. Peers of a dead process notice the death within 30 to 120 ms (measured: gloo on a CPU). A
group formed without one of the peers must regroup again when the missing peer calls in."""


class SettlingPeers:
    """The peers that are waited for, with the end of the wait for each, in ms."""

    def __init__(self, *, settling_ms: int) -> None:
        self._settling_ms = settling_ms
        self._until_ms: dict[str, int] = {}

    def wait_for(self, worker: str, now_ms: int) -> None:
        """Wait for a worker's next call."""
        self._until_ms[worker] = now_ms + self._settling_ms

    def called(self, worker: str) -> None:
        """Stop waiting for a worker, because the worker has called in or is known to be dead."""
        self._until_ms.pop(worker, None)

    def drop_overdue(self, now_ms: int) -> bool:
        """Stop waiting for overdue peers. Return True if there was one."""
        overdue = [worker for worker, until_ms in self._until_ms.items() if until_ms <= now_ms]
        for worker in overdue:
            del self._until_ms[worker]
        return bool(overdue)

    def nodes(self) -> set[str]:
        """Return the nodes with a settling peer."""
        return {node_of(worker) for worker in self._until_ms}
