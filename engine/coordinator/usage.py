"""The usage of nodes: phases of their workers, reported to the launcher."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.events import NodeUsage, WorkerSpan


@dataclass
class NodeUsageBook:
    """Usage of one node's workers since the last `NodeUsage` event."""

    phase_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[WorkerSpan] = field(default_factory=list)
    from_ms: int | None = None

    def add(self, worker: str, spans: Sequence[Sequence[Any]], of: int) -> None:
        for phase, begun, ended in spans:
            self.phase_ms[phase] += (ended - begun) / of
            self.spans.append((worker, phase, round(begun), round(ended)))
            self.from_ms = round(begun) if self.from_ms is None else self.from_ms

    def tell(self, node: str, now_ms: int) -> NodeUsage | None:
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
