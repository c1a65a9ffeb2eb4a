"""Nodes that the cloud or the run's folder knows and the ledger does not: the ledger was restored from a backup.

A controller writes a node into the ledger before it asks for the node. So a node of the run's plan that the ledger does
not know was bought after the ledger was copied. Its money is spent, so the node is written into the ledger again. Pure.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.placement.options import Option, SiteOptions
from launcher.placement.plan import Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundNode:
    """A node to be written into the ledger again. `option`: its offer, or the nearest offer that is known.

    `is_ordered`: the run's folder has the order, so the node can go on. Without the order it is released.
    """

    name: str
    slot: Slot
    generation: int
    option: Option
    requested_ms: int
    is_ordered: bool
    evidence: str


def found_nodes(
    names: Collection[str],
    cloud: Mapping[str, NodeFact],
    run: str,
    slots: Sequence[Slot],
    sites: Sequence[SiteOptions],
    since_ms: int,
    now_ms: int,
) -> list[FoundNode]:
    """Return the nodes of `cloud` that are not among `names`, the nodes of the ledger.

    A node of no slot of the plan is left out. `since_ms`: the start of the run.
    """
    found = []
    by_name = {slot.name: slot for slot in slots}
    for name, fact in cloud.items():
        parts = re.fullmatch(rf"{re.escape(run)}-(.+)-g(\d+)", name)
        slot = by_name.get(parts[1]) if parts is not None else None
        if parts is None or slot is None or name in names or fact.status is NodeStatus.UNKNOWN:
            continue
        times = [at_ms for at_ms in (fact.started_ms, fact.ready_ms, fact.ended_ms) if at_ms is not None]
        found.append(
            FoundNode(
                name=name,
                slot=slot,
                generation=int(parts[2]),
                option=_option_of(fact, slot, sites),
                requested_ms=min(max(since_ms, min(times, default=now_ms)), now_ms),
                is_ordered=fact.want is not None,
                evidence="this ledger is older than the node: it was restored from a backup, and is repaired",
            )
        )
    return found


def _option_of(fact: NodeFact, slot: Slot, sites: Sequence[SiteOptions]) -> Option:
    """Return the offer behind the node: its order, else an offer like it, else the offer of its slot in the plan."""
    if fact.want is not None:
        on_demand = max(slot.on_demand_micro_usd_per_hour, fact.want.micro_usd_per_hour)
        return Option(placement=fact.want, on_demand_micro_usd_per_hour=on_demand)
    alike = [
        option
        for site in sites
        for option in (site.trainer if slot.role != "rollout" else site.rollout)
        if option.placement.instance_type == fact.instance_type
        and option.placement.market is (fact.market or slot.placement.market)
        and (fact.zone or "").startswith(option.placement.zone_name or option.placement.region)
    ]
    return max(alike, key=lambda option: option.placement.micro_usd_per_hour, default=slot.option)
