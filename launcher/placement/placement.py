"""A placement: what we decided to buy. Placement decides, the cluster room carries it out."""

from dataclasses import dataclass

from engine.events import Market


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What we decided to buy: one node, from one offer, at a price with a source and a time."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    gpus: int
    accelerator: str
    market: Market
    micro_usd_per_hour: int
    price_source: str
    price_observed_at: str
