"""A decision to buy one node. `launcher/placement` decides, and `launcher/provision` carries the decision out."""

import re
from dataclasses import dataclass

from engine.events import Market
from launcher.market.side_prices import DISK_GIB, side_micro_usd_per_hour


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
    disk_gib: int = DISK_GIB
    """Size of the boot disk on a real cloud. Placements stored by older versions had the default."""

    @property
    def side_micro_usd_per_hour(self) -> int:
        """Return the price of the disk and the address on a real cloud."""
        return side_micro_usd_per_hour(self.cloud, self.market, self.disk_gib)

    @property
    def zone_name(self) -> str:
        """Return the cloud's name of the zone; empty if any zone of the region will do.

        An AWS zone id (use1-az4) is no name, because names differ between accounts. The name in the user's account is
        not known yet.
        """
        is_region = self.zone == self.region or self.zone.startswith(f"{self.region}, ")
        return "" if is_region or re.fullmatch(r"[a-z]+\d+-az\d+", self.zone) else self.zone
