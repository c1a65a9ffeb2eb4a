"""Usage of the nodes: the time of their workers by phase, summed between two events for the launcher.

The promise: each reported millisecond is in exactly one `NodeUsage` event. Fractions wait for the next event.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.events import NodeUsage, WorkerSpan
from engine.protocol.messages import Span

EVERY_WALL_SECONDS = 1.0


class UsageBook:
    """Usage by node since the node's last event."""

    def __init__(self, now_ms: int) -> None:
        self.nodes: dict[str, NodeSpans] = defaultdict(NodeSpans)
        self.reported_ms = now_ms
        """The time of the last events."""

    def add(self, node: str, worker: str, spans: Sequence[Span], workers_of_node: int) -> None:
        """Add the spans of a worker. Each worker counts for its share of the node."""
        self.nodes[node].add(worker, spans, workers_of_node)

    def events(self, now_ms: int) -> Iterator[NodeUsage]:
        """Yield the events of all nodes with usage since the last events."""
        self.reported_ms = now_ms
        for node, spans in self.nodes.items():
            event = spans.event(node, now_ms)
            if event is not None:
                yield event


@dataclass
class NodeSpans:
    """Usage of one node's workers since the node's last event."""

    phase_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[WorkerSpan] = field(default_factory=list)
    from_ms: int | None = None

    def add(self, worker: str, spans: Sequence[Span], workers_of_node: int) -> None:
        """Add a worker's spans: (phase, begin, end), in milliseconds.

        Each span counts as its length divided by `workers_of_node`, so a node with all workers busy counts once.
        """
        for phase, begun, ended in spans:
            self.phase_ms[phase] += (ended - begun) / workers_of_node
            self.spans.append((worker, phase, round(begun), round(ended)))
            self.from_ms = round(begun) if self.from_ms is None else self.from_ms

    def event(self, node: str, now_ms: int) -> NodeUsage | None:
        """Return the usage event, or None if no phase has a whole millisecond. Fractions stay for the next event."""
        whole = {phase: int(spent) for phase, spent in self.phase_ms.items() if spent >= 1}
        if not whole or self.from_ms is None:
            return None
        event = NodeUsage(
            node=node, from_ms=self.from_ms, to_ms=now_ms, phase_ms=whole, spans=tuple(sorted(self.spans, key=_begin))
        )
        for phase, spent in whole.items():
            self.phase_ms[phase] -= spent
        self.spans, self.from_ms = [], now_ms
        return event


def _begin(span: WorkerSpan) -> int:
    return span[2]
