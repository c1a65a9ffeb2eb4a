"""Events of nodes: the difference between the cloud's state now and the ledger's records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.decide.facts import INSTANCE_ENDED, NodeRecord
from launcher.decide.node_facts import NodeFact, NodeStatus

UNKNOWN_MS = 600_000
"""Time after which a requested node counts as gone if the provisioner does not know the node (10 minutes)."""

HARDWARE_CHARACTERS = 300
"""Most characters of a node's hardware that are kept. The text comes from a node."""


FINAL = frozenset({NodeStatus.GONE, NodeStatus.DENIED, NodeStatus.NO_CAPACITY})


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """An event of a node, to be recorded in the ledger. `fact` is set if the event is the node's end."""

    node: str
    kind: str
    at_ms: int
    evidence: str = ""
    fact: NodeFact | None = None


def news(nodes: Sequence[NodeRecord], cloud: Mapping[str, NodeFact], now_ms: int) -> list[Note]:
    """Return the events of nodes that the ledger does not have yet, in the order of `nodes`.

    A requested node without a fact counts as gone after `UNKNOWN_MS`. An ended node has an event only if its VM lives.
    """
    return [
        note
        for node in nodes
        for note in (_news_of if node.is_live else _news_of_ended)(node, cloud.get(node.name), now_ms)
    ]


def _news_of_ended(node: NodeRecord, fact: NodeFact | None, now_ms: int) -> Iterator[Note]:
    """Return the events of a node whose VM was found alive after the node's end: billing goes on, and the node leaves.

    Billing goes on one millisecond after the end, because the bill up to the end is written.
    """
    if fact is None or not fact.lives_on or fact.started_ms is None or node.ended_ms is None:
        return
    up_ms = max(node.ended_ms + 1, _plausible_ms(node, fact.started_ms, now_ms))
    yield Note(node=node.name, kind="up", at_ms=up_ms, evidence="its VM lives on after its end")
    if "releasing" not in node.happened:
        yield Note(node=node.name, kind="releasing", at_ms=max(up_ms, now_ms))


def _news_of(node: NodeRecord, fact: NodeFact | None, now_ms: int) -> Iterator[Note]:
    if fact is None:
        if "requested" in node.happened and now_ms - node.requested_ms > UNKNOWN_MS:
            yield Note(node=node.name, kind="gone", at_ms=now_ms, evidence="the provisioner does not know it")
        return
    if fact.started_ms is not None and "up" not in node.happened:
        yield Note(node=node.name, kind="up", at_ms=_plausible_ms(node, fact.started_ms, now_ms))
    if fact.ready_ms is not None and "ready" not in node.happened:
        ready_ms = _plausible_ms(node, fact.ready_ms, now_ms)
        yield Note(node=node.name, kind="ready", at_ms=ready_ms, evidence=fact.hardware[:HARDWARE_CHARACTERS])
    if fact.notice_deadline_ms is not None and "notice" not in node.happened:
        seconds = max(0, fact.notice_deadline_ms - now_ms) // 1000
        yield Note(node=node.name, kind="notice", at_ms=now_ms, evidence=f"preempted in {seconds} s (run's clock)")
    is_up = "up" in node.happened or fact.started_ms is not None
    if is_up and fact.ended_ms is not None and fact.status not in FINAL and INSTANCE_ENDED not in node.happened:
        ended_ms = _plausible_ms(node, fact.ended_ms, now_ms)
        yield Note(node=node.name, kind=INSTANCE_ENDED, at_ms=ended_ms, evidence="a disk of it cannot be removed yet")
    end = {NodeStatus.GONE: "gone", NodeStatus.DENIED: "denied", NodeStatus.NO_CAPACITY: "no_capacity"}.get(fact.status)
    if end is not None:
        kind = "released" if end == "gone" and "releasing" in node.happened and not fact.reclaimed else end
        ended_ms = now_ms if fact.ended_ms is None else _plausible_ms(node, fact.ended_ms, now_ms)
        yield Note(node=node.name, kind=kind, at_ms=ended_ms, evidence=fact.evidence, fact=fact)


def _plausible_ms(node: NodeRecord, reported_ms: int, now_ms: int) -> int:
    """Limit a reported time to the interval between the node's request and now.

    The reporter's clock may be wrong.
    A time in the far future would be charged at once, would use up the budget and end the run.
    """
    return min(max(reported_ms, node.requested_ms), now_ms)
