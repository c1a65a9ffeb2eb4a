"""Decide on a trainer of several nodes on clouds: all of its nodes are in one zone, and it is whole or given back.

first node, anywhere in the region -> its real zone -> the further nodes, in that zone -> rollout nodes

A trainer with a missing node trains nothing, but costs money. If its zone lacks a node for `LACKING_MS`, all of its
nodes are given back. If the trainer never was whole, that counts as a refusal, and the rules for a refused trainer
choose the next place (failover.py). If it was whole, the search starts anew in its region.

A trainer that may lack a node (`Wanted.trainer_may_lack`) and once was whole trains on with the nodes that are there:
as long as its first node is, the missing node is only asked for again.

Pure: no clock, no I/O.
"""

from collections.abc import Sequence
from dataclasses import replace

from launcher.decide.actions import Release
from launcher.decide.facts import Facts, NodeRecord, Wanted
from launcher.decide.failover import Wait
from launcher.decide.launch_history import AGAIN_MS, Attempt, MoveRules, Tried, cooled_until_ms, end_text
from launcher.placement.options import Option

LACKING_MS = 120_000
"""Time for which a zone may refuse a missing node of the trainer, in milliseconds. Zones often have capacity again
within seconds. The nodes that are there wait meanwhile, and are paid. Assumed."""


def number_of_trainer_nodes(wanted: Wanted) -> int:
    """Return the number of nodes of the trainer."""
    return sum(slot.role != "rollout" for slot in wanted.slots)


def missing_trainer_slots(wanted: Wanted, nodes: Sequence[NodeRecord]) -> list[str]:
    """Return the trainer's slots that have neither a running nor a requested node. A leaving node does not count."""
    held = {node.slot for node in _trainer_nodes(nodes)}
    return [slot.name for slot in wanted.slots if slot.role != "rollout" and slot.name not in held]


def trains_without(
    missing: Sequence[str], live: Sequence[NodeRecord], nodes: Sequence[NodeRecord], wanted: Wanted
) -> bool:
    """Return whether a trainer trains on without the nodes of these slots: its first node is there, and it was whole.

    `live`: the live nodes. `nodes`: all that the run had.
    """
    if not wanted.trainer_may_lack or "trainer" in missing:
        return False
    return all(_was_beside(slot, live, nodes) for slot in missing)


def offer_beside(nodes: Sequence[NodeRecord]) -> Option | None:
    """Return the offer for another node of the trainer: the instance type and zone of the first node.

    If the first node is lost, the zone of the others counts. None: no zone is known yet.
    """
    known = [node for node in _trainer_nodes(nodes) if node.role == "ranks" or "up" in node.happened]
    near = min(known, key=lambda node: (node.role == "ranks", node.requested_ms, node.name), default=None)
    if near is None or near.wanted is None:
        return None
    placement = replace(
        near.wanted.placement,
        zone=near.zone,
        instance_type=near.instance_type,
        micro_usd_per_hour=near.micro_usd_per_hour,
    )
    return replace(near.wanted, placement=placement) if placement.zone_name else None


def next_trainer_node(
    slot: str, nodes: Sequence[NodeRecord], tried: Tried, rules: MoveRules, now_ms: int
) -> Option | Wait | None:
    """Return the offer of a missing node of the trainer, a wait, or None if the node may be in any zone.

    `nodes`: the live nodes. While a node of the trainer is leaving, none is bought: the cloud may still count the
    leaving node against a quota, and both would write the same checkpoints.
    """
    if any(node.role != "rollout" and node.is_leaving for node in nodes):
        return Wait(until_ms=None, why="earlier nodes of the trainer are ending")
    option = offer_beside(nodes)
    if option is None:
        if slot == "trainer":
            return None
        return Wait(until_ms=None, why="the zone of the trainer's first node is not known yet")
    if tried.is_denied(option):
        return Wait(until_ms=None, why=tried.denials("ranks"))
    until_ms = cooled_until_ms(_refusals(option, nodes, tried), AGAIN_MS, rules.cool_down_ms)
    if until_ms > now_ms:
        return Wait(until_ms=until_ms, why=f"no capacity in {option.placement.zone}, where the trainer's nodes are")
    return option


def given_back_trainer(facts: Facts, wanted: Wanted, live: Sequence[NodeRecord], tried: Tried) -> Release | None:
    """Return the release of all nodes of a trainer whose missing node cannot be bought, or None."""
    if not facts.sites:
        return None
    trainer, missing, option = _trainer_nodes(live), missing_trainer_slots(wanted, live), offer_beside(live)
    if option is None or not missing or trains_without(missing, trainer, facts.nodes, wanted):
        return None
    if tried.is_denied(option):
        why = tried.denials("ranks")
    else:
        refusals = _refusals(option, trainer, tried)
        if not refusals or facts.now_ms < min(one.requested_ms for one in refusals) + LACKING_MS:
            return None
        why = f"{option.placement.zone} refused it: {refusals[-1].evidence}"
    return Release(
        nodes=tuple(node.name for node in trainer),
        why=f"the trainer lacks {', '.join(missing)}: {why}",
        never_whole=not all(_was_beside(slot, trainer, facts.nodes) for slot in missing),
    )


def _refusals(option: Option, nodes: Sequence[NodeRecord], tried: Tried) -> list[Attempt]:
    """Return the refusals of further nodes since the trainer's oldest node came up, by their end."""
    since_ms = _since_ms(nodes)
    refused = [one for one in tried.refused(option) if one.role != "rollout" and one.requested_ms >= since_ms]
    return sorted(refused, key=end_text)


def _was_beside(slot: str, trainer: Sequence[NodeRecord], nodes: Sequence[NodeRecord]) -> bool:
    """Return whether a node of the slot was up beside these nodes of the trainer."""
    since_ms = _since_ms(trainer)
    up = [node for node in nodes if node.slot == slot and "up" in node.happened]
    return any(node.ended_ms is None or node.ended_ms > since_ms for node in up)


def _since_ms(nodes: Sequence[NodeRecord]) -> int:
    return min(node.happened.get("up", node.requested_ms) for node in _trainer_nodes(nodes))


def nodes_in_other_zones(nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Return the further nodes of the trainer that are not in the zone of its first node."""
    further = [node for node in _trainer_nodes(nodes) if node.role == "ranks"]
    option = offer_beside(nodes) if further else None
    return [] if option is None else [node for node in further if node.zone != option.placement.zone]


def _trainer_nodes(nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Return the running and requested nodes of the trainer, without those that are leaving."""
    return [node for node in nodes if node.role != "rollout" and node.is_live and not node.is_leaving]
