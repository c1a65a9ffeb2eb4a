"""Decide whether a slot's node needs a successor, and when."""

from collections.abc import Sequence

from engine.events import Market
from launcher.decide.facts import INCOMPLETE, PROMOTED, Facts, NodeRecord
from launcher.decide.failover import GIVE_BACK_GAP_MS
from launcher.decide.launch_history import Attempt, Outcome, jitter
from launcher.decide.node_facts import is_quota_used_up
from launcher.decide.stopping import was_denied
from launcher.market.refusals import holds_in_its_zone_alone
from launcher.placement.plan import Slot
from launcher.placement.value import DEAR

FIRST_WAIT_MS = 10_000
LONGEST_WAIT_MS = 600_000
"""The wait of a slot whose nodes keep dying young: 10 s, 20 s, 40 s, ... 10 minutes (ms on the run's clock)."""


def needs_successor(slot: Slot, latest: NodeRecord, held: Sequence[NodeRecord], facts: Facts) -> bool:
    """Return whether a used slot needs a new node: the slot is empty, soon empty, or held by a stand-in."""
    if slot.role != "rollout" and any(node.is_live for node in held):
        return False  # two trainers would both write the run's checkpoints, so the old trainer must be gone
    if any(stays(node) for node in held) and not _may_go_back(slot, held, facts):
        return False
    if latest.ended_ms is None:
        return True
    if not facts.sites and was_denied(latest, facts):
        return False
    gap_ms = wait_ms(held, facts.planned_ms)
    if latest.wanted is not None:
        gap_ms += round(gap_ms * jitter(latest.name) / 2)
    return facts.now_ms >= latest.ended_ms + gap_ms


def stays(node: NodeRecord) -> bool:
    """Return True if the node is running or starting, and is meant to stay."""
    return node.is_live and not node.is_leaving


def is_stand_in(node: NodeRecord, slot: Slot, facts: Facts) -> bool:
    """Return True if the node replaces missing spot: on demand, or on dear spot, in a slot with a spot plan.

    Dear is spot above `DEAR` times both the plan's price and the lowest price of the node's region.
    """
    if slot.placement.market is not Market.SPOT:
        return False
    return node.market is Market.ON_DEMAND or _is_dear(node, slot, facts)


def _is_dear(node: NodeRecord, slot: Slot, facts: Facts) -> bool:
    if facts.work is None or node.micro_usd_per_hour <= DEAR * slot.placement.micro_usd_per_hour:
        return False
    here = next((site for site in facts.sites if site.place == node.site), None)
    spot = [o.placement for o in here.rollout if o.placement.market is Market.SPOT] if here is not None else []
    return node.micro_usd_per_hour > DEAR * min((place.micro_usd_per_hour for place in spot), default=0) > 0


def _may_go_back(slot: Slot, held: Sequence[NodeRecord], facts: Facts) -> bool:
    """Return whether a slot holds only a stand-in, and had no give-back for `GIVE_BACK_GAP_MS`."""
    stand_ins = [node for node in held if is_stand_in(node, slot, facts)]
    if any(stays(node) and node not in stand_ins for node in held):
        return False
    released_ms = [node.happened["releasing"] for node in stand_ins if "releasing" in node.happened]
    return not released_ms or facts.now_ms >= max(released_ms) + GIVE_BACK_GAP_MS


def wait_ms(held: Sequence[NodeRecord], planned_ms: int) -> int:
    """Return the wait in ms of a slot whose last nodes died young.

    Nodes that the cloud refused do not count: a refused zone cools down by itself (failover.py).
    """
    streak = 0
    for node in sorted(held, key=lambda node: node.generation, reverse=True):
        if node.was_refused:
            continue
        if not node.died_young or node.requested_ms < planned_ms:
            break
        streak += 1
    return min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** (streak - 1)) if streak else 0


def attempt_of(node: NodeRecord) -> Attempt:
    """Return a node as an attempt. A node of a trainer that never was whole counts as refused once it has ended."""
    assert node.wanted is not None, f"{node.name} was bought without a place"
    is_refused = node.was_refused or (not node.is_live and INCOMPLETE in node.happened)
    if is_refused:
        outcome = Outcome.DENIED if "denied" in node.happened else Outcome.REFUSED
    else:
        outcome = Outcome.RECLAIMED if node.reclaimed else Outcome.ENDED
    return Attempt(
        name=node.name,
        role=node.role,
        option=node.wanted,
        requested_ms=node.requested_ms,
        outcome=Outcome.LIVE if node.is_live else outcome,
        ended_ms=node.ended_ms,
        up_ms=None if is_refused else node.happened.get("up"),
        promoted_ms=node.happened.get(PROMOTED),
        evidence=node.evidence,
        is_quota_used_up=is_quota_used_up(node.evidence),
        holds_in_its_zone_alone=holds_in_its_zone_alone(node.evidence),
    )
