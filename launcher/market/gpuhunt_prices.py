"""Prices published by dstack's library gpuhunt, limited to the prices that gpuhunt assembles correctly.

For users without a cloud account. Taken: AWS on demand, and GCP on demand and spot (gpuhunt adds up host, GPUs and
local SSD, and marks calendar-mode rates). Not taken: AWS spot, because gpuhunt keeps only the cheapest zone of a region
and drops the zone's name. catalogs/README.md lists the remaining gaps of gpuhunt.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

from engine.events import Market
from engine.installation import install_command
from launcher.exit_codes import Failure
from launcher.market.instance_types import instance_type_of
from launcher.market.prices import PricePoint
from launcher.money import MICRO

WANTED = ("aws", "gcp")


def fetch_gpuhunt(now_ms: int) -> list[PricePoint]:
    """Download the published catalogs. Raises Failure if gpuhunt is not installed or a catalog is not available."""
    try:
        import gpuhunt  # an extra; most users refresh from the clouds
    except ImportError:
        raise Failure(f"gpuhunt is not installed; `{install_command('prices')}`, or refresh from the clouds") from None
    catalog = gpuhunt.Catalog(auto_reload=False)
    try:
        catalog.load()
    except (gpuhunt.GPUHuntError, OSError) as error:
        raise Failure(f"gpuhunt cannot load its catalog ({error}); try again later, or ask the clouds") from None
    if missing := [cloud for cloud in WANTED if cloud not in catalog.catalog]:
        raise Failure(f"gpuhunt has no catalog of {' and '.join(missing)} today; the tables are as they were")
    # Allow no flags: flags mark calendar-mode rates, and instances sold by reservation only.
    rows = catalog.query(provider=list(WANTED), min_gpu_count=1, allowed_flags=())
    versions = {cloud: catalog.catalog[cloud].version for cloud in WANTED}
    return points_of(rows, versions, now_ms)


def points_of(rows: Iterable[Any], versions: dict[str, str], now_ms: int) -> list[PricePoint]:
    """Convert `rows`, gpuhunt's CatalogItem values, to prices. Unknown instance types are left out."""
    points = []
    for row in rows:
        name = row.instance_name
        if name.startswith("n1-"):
            name = f"{name}+{row.gpu_name}:{row.gpu_count}"
        machine = instance_type_of(row.provider, name)
        market = Market.SPOT if row.spot else Market.ON_DEMAND
        if machine is None or market not in machine.markets or (row.provider, market) == ("aws", Market.SPOT):
            continue
        is_gcp = row.provider == "gcp"
        version = versions[row.provider]
        seen_ms = version_ms(version)
        points.append(
            PricePoint(
                cloud=row.provider,
                region=row.location.rpartition("-")[0] if is_gcp else row.location,
                # GCP's on-demand prices belong to the region; gpuhunt repeats the prices for each zone.
                zone=row.location if is_gcp and market is Market.SPOT else "",
                zone_id="",
                instance_type=name,
                market=market,
                micro_usd_per_hour=micro_usd(row.price),
                source=f"gpuhunt catalog {version}",
                source_id="",
                effective_ms=seen_ms,
                observed_ms=min(seen_ms, now_ms),
            )
        )
    return points


def micro_usd(usd: float) -> int:
    """Convert a price to whole micro-dollars. gpuhunt's prices are floats rounded to six decimals."""
    return int((Decimal(str(usd)) * MICRO).to_integral_value(ROUND_HALF_EVEN))


def version_ms(version: str) -> int:
    """Convert `20261120-1234` to the first moment of the day, in milliseconds UTC.

    Raises Failure for a version without a date.
    """
    try:
        day = datetime.strptime(version[:8], "%Y%m%d").replace(tzinfo=UTC)
    except ValueError:
        raise Failure(
            f"gpuhunt's catalog is called {version!r}, which has no date; a price without one is not taken"
        ) from None
    return round(day.timestamp() * 1000)
