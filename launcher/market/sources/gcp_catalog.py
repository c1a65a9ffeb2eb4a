"""Assemble Google Cloud's list prices: a machine's price is the sum of its parts' SKUs."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from engine.events import Market
from launcher.market.instance_types import InstanceType
from launcher.market.prices import Fetched, RawPrice

CATALOG = "gcp billing skus"

HOURS_IN_MONTH = 730
"""Hours by which Google divides a month's price (Google's pages on disk prices)."""

NEEDS = "prices need the Cloud Billing API enabled and the role Compute Viewer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sku:
    """A line of the billing catalog, as text. `price` is for one `unit`, after any free usage."""

    sku_id: str
    description: str
    usage_type: str
    regions: tuple[str, ...]
    unit: str
    price: str
    currency: str
    effective: str


HOSTS = {
    "n1": "N1 Predefined Instance",
    "g2": "G2 Instance",
    "g4": "G4 Instance",
    "a2": "A2 Instance",
    "a3-highgpu": "A3 Instance",
    "a3-ultragpu": "A3Ultra Instance",
}
"""Names of a series' cores and memory in the catalog."""

GPUS = {
    "V100": "Nvidia Tesla V100 GPU",
    "T4": "Nvidia Tesla T4 GPU",
    "L4": "Nvidia L4 GPU",
    "A100": "Nvidia Tesla A100 GPU",
    "A100-80GB": "Nvidia Tesla A100 80GB GPU",
    "H100": "Nvidia H100 80GB GPU",
    "H200": "H200 141GB GPU",
    "RTXPRO6000": "RTX 6000 96GB",
}

WHOLE = {"B200": "A4 Nvidia B200 (1 gpu slice)"}
"""GPUs priced with their share of the host: cores, memory and disks have no price of their own."""

LOCAL_SSD = "SSD backed Local Storage"

CORE_HOUR, GIB_HOUR, GIB_MONTH = "h", "GiBy.h", "GiBy.mo"

ANOTHER_PRODUCT = re.compile(
    r"\b(Calendar Mode|DWS|Commitment|Reserved|Sole Tenancy|Custom|Premium|suspended|vGPU)\b", re.IGNORECASE
)
"""Rates that need more than just starting an instance."""

DESCRIPTION = re.compile(
    r"(?P<spot>Spot Preemptible )?(?P<part>.+?)(?P<attached> attached to (?:Spot )?Preemptible VMs)?"
    r"(?: running)?(?: in .+)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of an instance type: a number of units of one SKU."""

    name: str
    unit: str
    count: Decimal


def parts_of(machine: InstanceType) -> tuple[Part, ...]:
    """Return the parts of an instance type, the GPU first.

    Disks are priced by the month: 375 GiB for an hour is 375/730.
    """
    if machine.accelerator in WHOLE:
        return (Part(name=WHOLE[machine.accelerator], unit=CORE_HOUR, count=Decimal(machine.gpus)),)
    series = machine.instance_type.split("-")[0]
    host = HOSTS.get(series) or HOSTS["-".join(machine.instance_type.split("-")[:2])]
    parts = [
        Part(name=GPUS[machine.accelerator], unit=CORE_HOUR, count=Decimal(machine.gpus)),
        Part(name=f"{host} Core", unit=CORE_HOUR, count=Decimal(machine.vcpus)),
        Part(name=f"{host} Ram", unit=GIB_HOUR, count=Decimal(machine.mem_gib)),
    ]
    if machine.local_ssd_gib:
        hours = Decimal(machine.local_ssd_gib) / HOURS_IN_MONTH
        parts.append(Part(name=LOCAL_SSD, unit=GIB_MONTH, count=hours))
    return tuple(parts)


def market_of(sku: Sku) -> tuple[str, Market] | None:
    """Return the part and the market priced by a SKU; None for another product.

    If the description says Spot and the usage type says OnDemand, the description is right: spot B200 is filed this
    way.
    """
    match = DESCRIPTION.fullmatch(sku.description)
    if match is None or ANOTHER_PRODUCT.search(sku.description) or sku.usage_type not in ("OnDemand", "Preemptible"):
        return None
    is_spot = sku.usage_type == "Preemptible" or bool(match["spot"] or match["attached"])
    return match["part"], Market.SPOT if is_spot else Market.ON_DEMAND


def assemble(skus: Iterable[Sku], instance_types: Sequence[InstanceType], regions: Sequence[str] = ()) -> Fetched:
    """Compute the price of each instance type in each region with its GPU, as rows for `believe`. Pure.

    If a part has no SKU, an unreadable SKU, or several SKUs at different prices, the price of the row is a text with
    the reason, and `believe` refuses the row. Example: 8 GPUs at $9.79655, 208 cores at $0.03, 1,872 GiB at $0.0017 and
    6,000 GiB of SSD at $0.08 a month are 78.3724 + 6.24 + 3.1824 + 0.657534 = $88.452334.
    """
    part_names = {part.name for machine in instance_types for part in parts_of(machine)}
    offered: defaultdict[tuple[str, str, Market], list[Sku]] = defaultdict(list)
    left_out = []
    for sku in skus:
        named = market_of(sku)
        if named is None:
            left_out += [sku] if any(name in sku.description for name in part_names) else []
        elif named[0] in part_names:
            for region in sku.regions:
                offered[named[0], region, named[1]].append(sku)
    everywhere = sorted({region for _, region, _ in offered})
    rows = (
        _assembled(machine, region, market, offered)
        for machine in instance_types
        for region in everywhere
        if not regions or region in regions
        for market in machine.markets
        if (parts_of(machine)[0].name, region, market) in offered
    )
    return Fetched(prices=tuple(rows), notes=_left_out(left_out))


def _left_out(skus: Sequence[Sku]) -> tuple[str, ...]:
    if not skus:
        return ()
    rates = "rates of calendar mode, DWS, commitments or reservations, or of no known kind"
    return (f"{CATALOG}: {len(skus)} SKUs were left out ({rates}), for one {skus[0].description!r}",)


def _assembled(
    machine: InstanceType, region: str, market: Market, offered: Mapping[tuple[str, str, Market], Sequence[Sku]]
) -> RawPrice:
    total, used, gap = Decimal(0), [], ""
    for part in parts_of(machine):
        skus = offered.get((part.name, region, market), ())
        if gap := _gap(part, skus):
            break
        total += part.count * Decimal(skus[0].price)
        used.append(skus[0])
    foreign = [sku.currency for sku in used if sku.currency != "USD"]
    return RawPrice(
        cloud="gcp",
        region=region,
        zone="",
        zone_id="",
        instance_type=machine.instance_type,
        market=market,
        price=gap or f"{total:f}",
        currency=foreign[0] if foreign else "USD",
        unit="hour",
        effective=max((sku.effective for sku in used), default=""),
        source=CATALOG,
        source_id="+".join(sku.sku_id for sku in used),
    )


def _gap(part: Part, skus: Sequence[Sku]) -> str:
    """Return the reason that this part has no price; empty if the part has a price."""
    if not skus:
        return f"incomplete: no SKU of {part.name}"
    if len({sku.price for sku in skus}) > 1:
        costs = " and ".join(f"{sku.price} ({sku.sku_id})" for sku in skus)
        return f"unclear: {part.name} costs {costs}"
    try:
        price = Decimal(skus[0].price)
    except ArithmeticError:
        return f"incomplete: SKU {skus[0].sku_id} of {part.name} has no price"
    if skus[0].unit != part.unit:
        return f"unclear: {part.name} is priced by {skus[0].unit or 'no unit'}, not by {part.unit}"
    # A part with a price of 0 would hide in the sum.
    return "" if price > 0 else f"unclear: {part.name} costs {skus[0].price} (SKU {skus[0].sku_id})"


def sku_of_message(sku: Any) -> Sku:
    """Convert a SKU of the API.

    Gaps become empty strings and raise no error; instance types with the SKU are refused later.
    """
    pricing = sku.pricing_info[-1] if sku.pricing_info else None
    tiers = pricing.pricing_expression.tiered_rates if pricing else ()
    price = tiers[-1].unit_price if tiers else None
    return Sku(
        sku_id=sku.sku_id,
        description=sku.description,
        usage_type=sku.category.usage_type,
        regions=tuple(sku.service_regions),
        unit=pricing.pricing_expression.usage_unit if pricing else "",
        price=price_text(price.units, price.nanos) if price else "",
        currency=price.currency_code if price else "",
        effective=pricing.effective_time.ToJsonString() if pricing else "",
    )


def price_text(units: int, nanos: int) -> str:
    return f"{Decimal(units) + Decimal(nanos).scaleb(-9):f}"


def region_of(zone: str) -> str:
    """Return the region of a zone: `us-central1` of `us-central1-a`."""
    return zone.rpartition("-")[0]
