"""Prices beside a node's own: disks, addresses, storage in buckets, and the shortest billed time."""

from collections.abc import Mapping
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


GIB = 1 << 30
"""Bytes that both clouds bill as a GB of storage."""


def _by_region(prices: Mapping[int, str]) -> dict[str, int]:
    return {region: micro_usd for micro_usd, regions in prices.items() for region in regions.split()}


STORAGE_MICRO_USD_PER_GIB_MONTH: Mapping[str, Mapping[str, int]] = {
    "aws": _by_region(
        {
            23_000: "us-east-1 us-east-2 us-west-2 eu-west-1 eu-north-1",
            24_000: "eu-west-2 eu-west-3",
            24_500: "eu-central-1",
            25_000: "ca-central-1 me-south-1 ap-south-1 ap-southeast-1 ap-southeast-2 ap-southeast-3 ap-northeast-1 "
            "ap-northeast-2",
            26_000: "us-west-1",
            27_400: "af-south-1",
            40_500: "sa-east-1",
        }
    ),
    "gcp": _by_region(
        {
            20_000: "us-central1 us-east1 us-east5 us-south1 us-west1 europe-north1 europe-west1 europe-west4 "
            "asia-east1",
            23_000: "us-east4 us-west2 us-west3 us-west4 northamerica-northeast1 northamerica-northeast2 "
            "europe-central2 europe-north2 europe-west2 europe-west3 europe-west9",
            26_000: "us eu asia northamerica-south1",
        }
    ),
}
"""Price of standard storage in S3 (the first 50 TB) and Google Cloud Storage, before requests and traffic."""

STORAGE_SOURCES = {
    "aws": "list price of S3 Standard, from the AWS price list as published by others on 2026-07-01, not re-read",
    "gcp": "list price of Standard storage, as published by others in 2025; us-central1 on 2026-09-20; us, eu and asia "
    "assumed; not re-read",
}

US_REGION = {"aws": "us-east-1", "gcp": "us-central1"}
"""Region whose price stands in for that of an unknown region."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageRate:
    """The price of standard storage in a bucket's region. `is_us_price`: the region, or its price, is unknown."""

    micro_usd_per_gib_month: int
    is_us_price: bool
    source: str

    def micro_usd_per_month(self, count: int) -> int:
        """Return the price of `count` bytes a month, rounded up."""
        return -(-count * self.micro_usd_per_gib_month // GIB)


@cache
def storage_rate(cloud: str, region: str) -> StorageRate:
    """Return the price of storage in a region, or in the US if the region's price is unknown."""
    prices = STORAGE_MICRO_USD_PER_GIB_MONTH[cloud]
    return StorageRate(
        micro_usd_per_gib_month=prices.get(region, prices[US_REGION[cloud]]),
        is_us_price=region not in prices,
        source=STORAGE_SOURCES[cloud],
    )
