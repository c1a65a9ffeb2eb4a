"""Members of the pull queue: the workers and nodes that have called in, or that the launcher has named.

    node:    known -> in use -> draining (notice or snapshot) -> lost
    worker:  process `boot` -> process `boot + 1`; pulls of a process are numbered by `seq`

The promises: a lost or draining node gets no work, and only the newest process of a worker is answered with work.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from engine.events import Market
from engine.protocol.request import RequestId, Work
from engine.queue.leases import Lease
from engine.trainer_ranks import is_rank


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """A worker by name. `boot` distinguishes the successive processes of the worker."""

    name: str
    node: str
    boot: int
    seq: int = -1
    work: Work | None = None
    """The answer to pull number `seq`, if the answer was work."""
    leases: set[int] = field(default_factory=set)
    suspects: list[tuple[RequestId, bool]] = field(default_factory=list)
    """The requests of the revoked leases, and whether each was alone in its lease. If the worker's process turns out
    to have died while the node lives, the crash is recorded for these requests."""
    missed: tuple[int, Lease] | None = None
    """The last lease revoked after missed heartbeats, with the lease number."""
    most_images: int | None = None
    """The `most_images` of the worker's last pull."""
    warned_images: int | None = None
    """The `most_images` of the worker's pull that was last reported to the launcher as too small."""

    def restart(self, boot: int) -> None:
        """Continue as the worker's next process, which has neither pulled nor got work."""
        self.boot, self.seq, self.work = boot, -1, None


@dataclass(slots=True, eq=False)
class NodeRecord:
    """A node by name."""

    first_ms: int
    last_call_ms: int
    market: Market | None = None
    notice_ms: int | None = None
    """The preemption deadline reported by the node's own agent."""
    drain_ms: int | None = None
    """The deadline in the launcher's newest capacity snapshot."""
    lost_ms: int | None = None
    called: bool = False
    served: bool = False

    @property
    def deadline_ms(self) -> int | None:
        return self.notice_ms if self.notice_ms is not None else self.drain_ms

    @property
    def takes_work(self) -> bool:
        """Return True if the node is neither lost nor draining."""
        return self.lost_ms is None and self.deadline_ms is None


class Members:
    """The known workers and nodes. The module docstring lists the promises."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self.losses = 0
        """Preempted spot nodes."""
        self.generation = -1
        """The generation of the last applied capacity snapshot."""

    def node(self, name: str, now_ms: int) -> NodeRecord:
        """Return the node. Begin a record if the node is new."""
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = NodeRecord(first_ms=now_ms, last_call_ms=now_ms)
        return node

    def call(self, name: str, now_ms: int) -> NodeRecord:
        """Record a call from the node."""
        node = self.node(name, now_ms)
        node.last_call_ms = now_ms
        return node

    def takes_work(self, name: str) -> bool:
        """Return True if the node's workers may get work. A node without a record may."""
        node = self.nodes.get(name)
        return node is None or node.takes_work

    def live_nodes(self, working: Collection[str], now_ms: int, within_ms: int) -> list[str]:
        """Return the nodes that work or have called recently. Draining and lost nodes are left out."""
        return [
            name
            for name, node in self.nodes.items()
            if node.called and node.takes_work and (name in working or now_ms - node.last_call_ms <= within_ms)
        ]

    def rollout_nodes(self, working: Collection[str], now_ms: int, within_ms: int) -> list[str]:
        """Return the live nodes with a worker that is no rank of the trainer."""
        rollout = {worker.node for worker in self.workers.values() if not is_rank(worker.name)}
        return [node for node in self.live_nodes(working, now_ms, within_ms) if node in rollout]

    def clear_suspects(self, node: str) -> None:
        """Suspect no request of the node's workers, because the node itself failed."""
        for worker in self.workers.values():
            if worker.node == node:
                worker.suspects = []

    def mean_life_ms(self, prior_ms: int, now_ms: int) -> float:
        """Return the mean time to preemption. The prior counts as one node's life beside the observed lives."""
        spot = [node for node in self.nodes.values() if node.market is Market.SPOT]
        lived = sum((now_ms if node.lost_ms is None else node.lost_ms) - node.first_ms for node in spot)
        return (prior_ms + lived) / (1 + self.losses)

    def check(self, leases: Collection[int]) -> None:
        """Raise AssertionError if the workers' leases are not exactly the open leases."""
        held = [number for worker in self.workers.values() for number in worker.leases]
        assert sorted(held) == sorted(leases), "workers and leases disagree"
        assert all(worker.node in self.nodes for worker in self.workers.values()), "a worker on an unknown node"
