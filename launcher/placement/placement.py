"""A placement: what we decided to buy. Placement decides, the cluster room carries it out."""

import re
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

    @property
    def zone_name(self) -> str:
        """The zone, as clouds name it; empty where any zone of the region will do.

        An AWS zone id (use1-az4) is no name: names differ between accounts, and nobody told us ours yet.
        """
        is_region = self.zone == self.region or self.zone.startswith(f"{self.region}, ")
        return "" if is_region or re.fullmatch(r"[a-z]+\d+-az\d+", self.zone) else self.zone
