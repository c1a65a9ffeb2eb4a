"""Usage of the nodes: the time of their workers by phase, summed between two events for the launcher.

The promise: each reported millisecond is in exactly one `NodeUsage` event. Fractions wait for the next event.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from engine.clock import Clock
from engine.events import NodeUsage, WorkerSpan
from engine.protocol.messages import Span

EVERY_WALL_SECONDS = 1.0

POINTS = 8192
"""Kept points of the two clocks. Spans reach back to a worker's last call."""

APART_MS = 20
"""Shortest time between two points, on the engine's clock."""


class RunTimes:
    """Translates times of the engine's clock to the run's clock, for spans of workers.

    On the local infra the run's clock moves with the work, and unevenly by the wall. Between two noted points, both
    clocks are taken to run evenly.
    """

    def __init__(self, clock: Clock, run_clock: Clock) -> None:
        self._clock, self._run_clock = clock, run_clock
        self._points: deque[tuple[int, int]] = deque(maxlen=POINTS)

    def note(self) -> int:
        """Note where the clocks are. Return the run's time."""
        at_ms, run_ms = self._clock.now_ms(), self._run_clock.now_ms()
        if not self._points or at_ms - self._points[-1][0] >= APART_MS:
            self._points.append((at_ms, run_ms))
        return run_ms

    def spans(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans on the run's clock. Times outside of the noted points are cut off."""
        if self._clock is self._run_clock:
            return list(spans)
        self._points.append((self._clock.now_ms(), self._run_clock.now_ms()))
        return [(phase, self._at(begun), self._at(ended)) for phase, begun, ended in spans]

    def _at(self, at_ms: float) -> float:
        place = bisect_left(self._points, at_ms, key=itemgetter(0))
        if place == len(self._points):
            return self._points[-1][1]
        (end, run_end), (begin, run_begin) = self._points[place], self._points[max(0, place - 1)]
        if place == 0 or end == begin:
            return run_end
        return run_begin + (run_end - run_begin) * (at_ms - begin) / (end - begin)


class UsageBook:
    """Usage by node since the node's last event."""

    def __init__(self, now_ms: int) -> None:
        self.nodes: dict[str, NodeSpans] = defaultdict(NodeSpans)
        self.reported_ms = now_ms
        """The time of the last events, on the engine's clock."""

    def add(self, node: str, worker: str, spans: Sequence[Span], workers_of_node: int) -> None:
        """Add the spans of a worker, on the run's clock. Each worker counts for its share of the node."""
        self.nodes[node].add(worker, spans, workers_of_node)

    def events(self, now_ms: int) -> Iterator[NodeUsage]:
        """Yield the events of all nodes with usage since the last events. `now_ms`: on the run's clock."""
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
