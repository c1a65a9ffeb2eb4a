"""The trainer is a role that a node has for a time. When a spot trainer is lost, a node that is up takes its role.

The node's agent starts again as coordinator and trainer, from the newest checkpoint. That takes seconds, where a new
node takes minutes. The slot that the node leaves is filled again.
"""

from collections.abc import Sequence

from engine.events import Market
from launcher.decide.facts import PROMOTED, Facts, NodeRecord, Wanted
from launcher.placement.plan import Slot


def successor_among(slot: Slot, held: Sequence[NodeRecord], facts: Facts, wanted: Wanted) -> NodeRecord | None:
    """Return the node that takes the role of the lost trainer; None if a node has to be bought.

    `slot`: the trainer's, empty now. `held`: all nodes that ever had it. None of them may still run: its end is on
    record, so at most one node trains. The oldest node that is ready and alike is taken, because spot nodes that have
    lived longer are lost less often.
    """
    if slot.role != "trainer" or slot.placement.market is not Market.SPOT or facts.sites or not held:
        return None
    if any(node.is_live for node in held):
        return None
    alike = {
        one.name
        for one in wanted.slots
        if (one.placement.accelerator, one.placement.gpus) == (slot.placement.accelerator, slot.placement.gpus)
    }
    ready = [node for node in facts.nodes if node.role == "rollout" and node.slot in alike and can_take_over(node)]
    return min(ready, key=lambda node: (node.happened["up"], node.name), default=None)


def can_take_over(node: NodeRecord) -> bool:
    return node.is_live and node.is_ready and not node.is_leaving


def is_taking_over(node: NodeRecord) -> bool:
    """Return whether a node has been promoted, and its workers have not called in since."""
    return node.is_live and PROMOTED in node.happened and "ready" not in node.happened
