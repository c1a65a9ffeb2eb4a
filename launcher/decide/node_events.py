"""Events of nodes: the difference between the cloud's state now and the ledger's records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.decide.facts import FOUND, INSTANCE_ENDED, KEPT, PROMOTED, NodeRecord
from launcher.decide.node_facts import NodeFact, NodeStatus

UNKNOWN_MS = 600_000
"""Time after which a requested node counts as gone if the provisioner does not know the node (10 minutes)."""

ENDS_OF = {NodeStatus.GONE: "gone", NodeStatus.DENIED: "denied", NodeStatus.NO_CAPACITY: "no_capacity"}

HARDWARE_CHARACTERS = 300
"""Most characters of a node's hardware that are kept. The text comes from a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """An event of a node, to be recorded in the ledger. `fact` is set if the event is the node's end."""

    node: str
    kind: str
    at_ms: int
    evidence: str = ""
    fact: NodeFact | None = None


def news(
    nodes: Sequence[NodeRecord],
    cloud: Mapping[str, NodeFact],
    now_ms: int,
    since_ms: int | None = None,
    watched_ms: int = 0,
) -> list[Note]:
    """Return the events of nodes that the ledger does not have yet, in the order of `nodes`.

    A requested node without a fact counts as gone after `UNKNOWN_MS`, of which this controller must have watched all:
    it may not have listed every region yet. `watched_ms`: the time at which it began. `since_ms`: the start of the run;
    a cloud reports no earlier time. None: the request of each node. An ended node has an event only if its VM lives.
    """
    return [
        note
        for node in nodes
        for note in (
            _news_of(
                node, cloud.get(node.name), now_ms, node.requested_ms if since_ms is None else since_ms, watched_ms
            )
            if node.is_live
            else _news_of_ended(node, cloud.get(node.name), now_ms)
        )
    ]


def _news_of_ended(node: NodeRecord, fact: NodeFact | None, now_ms: int) -> Iterator[Note]:
    """Return the events of a node whose VM was found alive after the node's end: billing goes on, and the node leaves.

    Billing goes on one millisecond after the end, because the bill up to the end is written.
    """
    if fact is None or not fact.lives_on or fact.started_ms is None or node.ended_ms is None:
        return
    up_ms = _plausible_ms(node.ended_ms + 1, fact.started_ms, now_ms)
    yield Note(node=node.name, kind="up", at_ms=up_ms, evidence="its VM lives on after its end")
    if "releasing" not in node.happened:
        yield Note(node=node.name, kind="releasing", at_ms=max(up_ms, now_ms))


def _news_of(node: NodeRecord, fact: NodeFact | None, now_ms: int, since_ms: int, watched_ms: int) -> Iterator[Note]:
    if fact is None:
        is_known = "requested" in node.happened or FOUND in node.happened
        if is_known and now_ms - max(node.requested_ms, watched_ms) > UNKNOWN_MS:
            yield Note(node=node.name, kind="gone", at_ms=now_ms, evidence="the provisioner does not know it")
        return
    end = ENDS_OF.get(fact.status)
    up_ms = node.happened.get("up")
    if up_ms is None and fact.started_ms is not None:
        # Not from the request on: a restored ledger may have asked again for a node that already ran.
        up_ms = _plausible_ms(since_ms, fact.started_ms, now_ms)
        yield Note(node=node.name, kind="up", at_ms=up_ms)
    has_called_in = fact.ready_ms is not None or "ready" in node.happened
    if up_ms is None and has_called_in and end is not None:
        # The node ended before an inventory listed it. Its workers called in, so it was billed.
        up_ms = min(node.requested_ms, now_ms)
        yield Note(node=node.name, kind="up", at_ms=up_ms, evidence="no inventory listed it: billed from its request")
    # `ready` waits for `up`: an inventory may list an instance minutes after its workers have called in.
    # A promoted node is ready once its new processes have called in. Its clock may differ, so their role tells them.
    promoted_ms = node.happened.get(PROMOTED)
    is_new = promoted_ms is None or fact.role == node.role
    if up_ms is not None and fact.ready_ms is not None and is_new and "ready" not in node.happened:
        ready_ms = _plausible_ms(up_ms if promoted_ms is None else promoted_ms, fact.ready_ms, now_ms)
        yield Note(node=node.name, kind="ready", at_ms=ready_ms, evidence=fact.hardware[:HARDWARE_CHARACTERS])
    if fact.notice_deadline_ms is not None and "notice" not in node.happened:
        seconds = max(0, fact.notice_deadline_ms - now_ms) // 1000
        yield Note(node=node.name, kind="notice", at_ms=now_ms, evidence=f"preempted in {seconds} s (run's clock)")
    if up_ms is not None and fact.kept_until_ms is not None and KEPT not in node.happened:
        yield Note(node=node.name, kind=KEPT, at_ms=max(up_ms, now_ms), evidence=fact.evidence)
    if up_ms is not None and fact.ended_ms is not None and end is None and INSTANCE_ENDED not in node.happened:
        ended_ms = _plausible_ms(up_ms, fact.ended_ms, now_ms)
        yield Note(node=node.name, kind=INSTANCE_ENDED, at_ms=ended_ms, evidence="a disk of it cannot be removed yet")
    if end is not None:
        kind = "released" if end == "gone" and "releasing" in node.happened and not fact.reclaimed else end
        begun_ms = since_ms if up_ms is None else up_ms
        ended_ms = now_ms if fact.ended_ms is None else _plausible_ms(begun_ms, fact.ended_ms, now_ms)
        yield Note(node=node.name, kind=kind, at_ms=ended_ms, evidence=fact.evidence, fact=fact)


def _plausible_ms(earliest_ms: int, reported_ms: int, now_ms: int) -> int:
    """Limit a reported time to the interval from `earliest_ms` to now.

    The reporter's clock may be wrong.
    A time in the far future would be charged at once, would use up the budget and end the run.
    """
    return min(max(reported_ms, earliest_ms), max(earliest_ms, now_ms))
