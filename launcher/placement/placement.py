"""A decision to buy one node. `launcher/placement` decides, and `launcher/provision` carries the decision out."""

import re
from dataclasses import dataclass

from engine.events import Market


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A decision to buy one node from one offer, at a price with a source and a time."""

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
        """Return the cloud's name of the zone; empty if any zone of the region will do.

        An AWS zone id (use1-az4) is no name, because names differ between accounts. The name in the user's account is
        not known yet.
        """
        is_region = self.zone == self.region or self.zone.startswith(f"{self.region}, ")
        return "" if is_region or re.fullmatch(r"[a-z]+\d+-az\d+", self.zone) else self.zone
