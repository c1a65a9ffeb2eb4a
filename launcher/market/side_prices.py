"""Prices beside a node's own: disks, addresses, and the shortest billed time."""

from dataclasses import dataclass
from functools import cache

from engine.events import Market

MINIMUM_BILLED_MS = 60_000
"""Minimum bill of an instance that came up, in milliseconds: a minute on both clouds, as they publish."""


MONTH_HOURS = 730

DISK_GIB = 100
"""Least size of a node's boot disk in GiB, unless the job names a size (launcher/placement/disk.py)."""

DISK_MICRO_USD_PER_GIB_MONTH = {"aws": 80_000, "gcp": 100_000}
ADDRESS_MICRO_USD_PER_HOUR = {
    ("aws", Market.SPOT): 5_000,
    ("aws", Market.ON_DEMAND): 5_000,
    ("gcp", Market.SPOT): 2_500,
    ("gcp", Market.ON_DEMAND): 5_000,
}
LISTED = "assumed: list price of 2025 in US regions (gp3, pd-balanced; public IPv4 in use), not re-read"


DISK, ADDRESS = "disk", "address"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRate:
    """A cost beside a node's instance, per hour of the node's life."""

    kind: str
    """`DISK` or `ADDRESS`."""
    amount: str
    micro_usd_per_hour: int
    source: str


def disk_micro_usd_per_hour(cloud: str, disk_gib: int) -> int:
    return -(-disk_gib * DISK_MICRO_USD_PER_GIB_MONTH[cloud] // MONTH_HOURS)


@cache
def side_rates(cloud: str, market: Market, disk_gib: int = DISK_GIB) -> tuple[SideRate, ...]:
    return (
        SideRate(
            kind=DISK,
            amount=f"{disk_gib} GiB",
            micro_usd_per_hour=disk_micro_usd_per_hour(cloud, disk_gib),
            source=LISTED,
        ),
        SideRate(
            kind=ADDRESS,
            amount="1 public IPv4",
            micro_usd_per_hour=ADDRESS_MICRO_USD_PER_HOUR[cloud, market],
            source=LISTED,
        ),
    )


@cache
def side_micro_usd_per_hour(cloud: str, market: Market, disk_gib: int = DISK_GIB) -> int:
    """Return the sum of all side rates. The budget guard adds the sum to the price of every node on a real cloud."""
    return sum(rate.micro_usd_per_hour for rate in side_rates(cloud, market, disk_gib))
