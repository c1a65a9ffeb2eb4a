"""All nodes of a run, with the indexes that decisions need. An ended node is indexed once.

    nodes of a run = live nodes (looked at anew in each decision) + ended nodes (never change again)

A long run has thousands of ended nodes and few live ones. `update` takes new and changed nodes; the indexes then equal
those of a full rebuild (tests/launcher/cluster/test_known_nodes.py). A decision on a plain list builds them anew.
"""

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Self, overload

from engine.events import Market
from launcher.decide.facts import NodeRecord
from launcher.decide.launch_history import Attempt, EndedAttempts, Tried
from launcher.decide.replacing import attempt_of

LAST_OF_SLOT = 8
"""Ended nodes of a slot that a decision looks at. The wait after seven nodes that died young is the longest there is
(`replacing.wait_ms`), and a slot is given up after three (`stopping.is_given_up`)."""


class KnownNodes(Sequence[NodeRecord]):
    """The nodes of a run in the order in which they became known, as of the last `update`."""

    def __init__(self, nodes: Iterable[NodeRecord] = ()) -> None:
        self._records: dict[str, NodeRecord] = {}
        self._live: dict[str, NodeRecord] = {}
        self._attempts: dict[str, Attempt] = {}
        """Attempts of the live nodes."""
        self._number: dict[str, int] = {}
        self._clear()
        self.update(nodes)

    @classmethod
    def of(cls, nodes: Sequence[NodeRecord]) -> "KnownNodes":
        return nodes if isinstance(nodes, KnownNodes) else cls(nodes)

    def _clear(self) -> None:
        self._latest: dict[str, NodeRecord] = {}
        self._last: defaultdict[str, list[NodeRecord]] = defaultdict(list)
        self._given_back: dict[tuple[str, Market], NodeRecord] = {}
        self._lost_trainers: dict[str, NodeRecord] = {}
        self._ended = EndedAttempts()
        self._requested_ms: list[int] = []

    def update(self, nodes: Iterable[NodeRecord]) -> Self:
        """Take over new and changed nodes. Nodes that are not named stay as they are."""
        is_rewritten = False
        for node in nodes:
            before = self._records.get(node.name)
            if before is node or (before is not None and not before.is_live and before == node):
                continue
            self._records[node.name] = node
            if before is None:
                self._number[node.name] = len(self._number)
                insort(self._requested_ms, node.requested_ms)
            elif not before.is_live or before.requested_ms != node.requested_ms:
                is_rewritten = True
            if node.is_live:
                self._live[node.name] = node
                if node.wanted is not None:
                    self._attempts[node.name] = attempt_of(node)
            else:
                self._live.pop(node.name, None)
                self._attempts.pop(node.name, None)
                self._settle(node)
        if is_rewritten:  # the record of an ended node was corrected
            self._rebuild(self._ended.since_ms)
        return self

    def _rebuild(self, since_ms: int) -> None:
        self._clear()
        self._ended = EndedAttempts(since_ms)
        self._requested_ms = sorted(node.requested_ms for node in self._records.values())
        for node in self._records.values():
            if not node.is_live:
                self._settle(node)

    def _settle(self, node: NodeRecord) -> None:
        """Index an ended node."""
        slot = node.slot
        if slot not in self._latest or self._latest[slot].generation < node.generation:
            self._latest[slot] = node
        if not node.was_refused:
            insort(self._last[slot], node, key=lambda known: known.generation)
            del self._last[slot][:-LAST_OF_SLOT]
            if node.role != "rollout" and not node.reclaimed:
                self._lost_trainers[node.name] = node
        if "releasing" in node.happened:
            last = self._given_back.get((slot, node.market), node)
            self._given_back[slot, node.market] = max(last, node, key=lambda known: known.happened["releasing"])
        if node.wanted is not None:
            self._ended.add(attempt_of(node))

    @property
    def live(self) -> list[NodeRecord]:
        """Return the nodes without a recorded end."""
        return list(self._live.values())

    def tried(self, since_ms: int) -> Tried:
        """Return all attempts as evidence. Attempts that ended before `since_ms` do not count as failures."""
        if self._ended.since_ms != since_ms:
            self._rebuild(since_ms)
        return Tried.over(self._ended, self._attempts.values())

    def decisive(self) -> list[NodeRecord]:
        """Return the nodes that can still change a decision on a slot.

        These are the live nodes and, of each slot, the newest, the last `LAST_OF_SLOT` that were not refused, and the
        node of each market that was given back last; and every node of the trainer that was lost.
        """
        found = self._live | self._lost_trainers
        for nodes in (self._latest.values(), *self._last.values(), self._given_back.values()):
            found.update((node.name, node) for node in nodes)
        return sorted(found.values(), key=lambda node: self._number[node.name])

    def next_generation(self, run: str, slot: str, generation: int) -> int:
        """Return `generation`, or the next one whose name no node has: a promoted node keeps its name."""
        while f"{run}-{slot}-g{generation}" in self._records:
            generation += 1
        return generation

    def requested_after(self, after_ms: int) -> list[int]:
        """Return the times of the requests made after a time, oldest first."""
        return self._requested_ms[bisect_right(self._requested_ms, after_ms) :]

    def __iter__(self) -> Iterator[NodeRecord]:
        return iter(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> NodeRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NodeRecord]: ...
    def __getitem__(self, index: int | slice) -> NodeRecord | Sequence[NodeRecord]:
        return list(self._records.values())[index]
