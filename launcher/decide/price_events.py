"""Price events: the difference between real purchases, current prices and the ledger's records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.events import Market
from launcher.decide.current_prices import Price, PriceNow
from launcher.decide.facts import NodeRecord
from launcher.decide.node_facts import NodeFact
from launcher.placement.options import Option

PRICE_MOVED = 0.01
"""Smallest relative change of a spot price that is recorded (1 %). Without a threshold the ledger would gain a row a
minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paid:
    """The known zone, type and price of a node from `at_ms` on."""

    node: str
    at_ms: int
    zone: str
    instance_type: str
    price: Price


def paid(nodes: Sequence[NodeRecord], cloud: Mapping[str, NodeFact], prices: PriceNow, now_ms: int) -> list[Paid]:
    """Return price events: purchases that differ from the request, and changed spot prices.

    An unknown price counts as the on-demand price.
    """
    notes = []
    for node in nodes:
        fact = cloud.get(node.name)
        if fact is None or node.wanted is None or not node.has_instance or "up" not in node.happened:
            continue
        zone, instance_type = fact.zone or node.zone, fact.instance_type or node.instance_type
        is_as_known = (zone, instance_type) == (node.zone, node.instance_type)
        reported = _newer_price(node.wanted, zone, instance_type, prices)
        if is_as_known and (reported is None or not has_moved(node, reported)):
            continue  # without newer information, the last known price continues
        price = reported or _offered(node.wanted, zone, instance_type)
        worst = Price(
            micro_usd_per_hour=node.wanted.on_demand_micro_usd_per_hour,
            source=f"unknown for {instance_type} in {zone}, so counted as on demand",
            observed_at=node.wanted.placement.price_observed_at,
        )
        at_ms = now_ms if is_as_known else node.happened["up"]
        notes.append(Paid(node=node.name, at_ms=at_ms, zone=zone, instance_type=instance_type, price=price or worst))
    return notes


def _newer_price(wanted: Option, zone: str, instance_type: str, prices: PriceNow) -> Price | None:
    """Return the clouds' current price if newer than the offer behind the purchase, else None."""
    placement = wanted.placement
    now = prices.of((placement.cloud, placement.region, zone, instance_type, placement.market))
    return now if now is not None and now.is_newer_than(placement.price_observed_at) else None


def _offered(wanted: Option, zone: str, instance_type: str) -> Price | None:
    """Return the offer's price if the zone and instance type match the offer, else None."""
    placement = wanted.placement
    if instance_type != placement.instance_type or placement.zone_name not in ("", zone):
        return None
    return Price(
        micro_usd_per_hour=placement.micro_usd_per_hour,
        source=placement.price_source,
        observed_at=placement.price_observed_at,
    )


def has_moved(node: NodeRecord, price: Price) -> bool:
    if node.market is not Market.SPOT:
        return False
    return abs(price.micro_usd_per_hour - node.micro_usd_per_hour) > PRICE_MOVED * node.micro_usd_per_hour
