"""Instance types and their prices: one table for SkyPilot's catalog files and the fake market's answers.

The types that the launcher knows, with the prices of the shipped catalogs/ if listed there, and a few without a GPU.
Google's prices are sums of parts, as in its billing catalog. Other prices are assumed, close to those of 2025.
"""

import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from launcher.market.instance_types import INSTANCE_TYPES as SOLD
from launcher.market.instance_types import InstanceType
from launcher.market.sources.gcp_catalog import GPUS, WHOLE, Part, parts_of
from tests.fakes.clouds import addresses
from tests.fakes.clouds.image import CHECKOUT
from tests.fakes.market import FakeMarket, Product, Tick, sku


def _plain(cloud: str, name: str, cpus: int, memory_gib: int) -> InstanceType:
    return InstanceType(
        cloud=cloud,
        instance_type=name,
        accelerator="",
        gpus=0,
        vcpus=cpus,
        mem_gib=memory_gib,
        gpu_mem_gib=0,
        local_ssd_gib=0,
    )


PLAIN = (
    _plain("aws", "m6i.large", 2, 8),
    _plain("aws", "m6i.2xlarge", 8, 32),
    _plain("gcp", "n2-standard-2", 2, 8),
    _plain("gcp", "n2-standard-8", 8, 32),
)
INSTANCE_TYPES = (*PLAIN, *SOLD)

AWS_USD = {"": 0.048, "V100": 3.06, "T4": 0.526, "L4": 0.8048, "A10G": 1.006, "L40S": 1.861}
AWS_USD |= {"A100": 2.74, "A100-80GB": 3.42, "H100": 6.88, "H200": 7.91, "B200": 14.24, "RTXPRO6000": 3.36}
"""On-demand dollars an hour of a GPU with its share of the instance, or of a vCPU if there is no GPU."""
AWS_SPOT = Decimal("0.4")
"""Spot price relative to the on-demand price."""

PARTS = {
    "N2 Instance Core": ("0.031611", "0.00765"),
    "N2 Instance Ram": ("0.004237", "0.001025"),
    "N1 Predefined Instance Core": ("0.031611", "0.006655"),
    "N1 Predefined Instance Ram": ("0.004237", "0.000892"),
    "G2 Instance Core": ("0.024988", "0.009995"),
    "G2 Instance Ram": ("0.002927", "0.001171"),
    "G4 Instance Core": ("0.0275", "0.011"),
    "G4 Instance Ram": ("0.0031", "0.00124"),
    "A2 Instance Core": ("0.031611", "0.012644"),
    "A2 Instance Ram": ("0.004237", "0.001695"),
    "A3 Instance Core": ("0.03", "0.0075"),
    "A3 Instance Ram": ("0.0017", "0.000425"),
    "A3Ultra Instance Core": ("0.0344", "0.0137"),
    "A3Ultra Instance Ram": ("0.002", "0.0008"),
    "Nvidia Tesla V100 GPU": ("2.48", "0.74"),
    "Nvidia Tesla T4 GPU": ("0.35", "0.14"),
    "Nvidia L4 GPU": ("0.56004", "0.22402"),
    "Nvidia Tesla A100 GPU": ("2.933908", "1.173563"),
    "Nvidia Tesla A100 80GB GPU": ("3.9289", "1.57156"),
    "Nvidia H100 80GB GPU": ("9.79655", "2.4491375"),
    "H200 141GB GPU": ("9.6", "3.84"),
    "RTX 6000 96GB": ("2.62", "1.048"),
    "A4 Nvidia B200 (1 gpu slice)": ("14.5", "5.8"),
    "SSD backed Local Storage": ("0.08", "0.02"),
}
"""Google's prices in dollars, on demand and spot, an hour or a GiB-hour or a GiB-month."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An instance type in a zone."""

    kind: InstanceType
    region: str
    zone: str
    on_demand: str
    spot: str


def rows() -> list[Row]:
    shipped = _shipped()
    found = []
    for kind in INSTANCE_TYPES:
        assumed = _aws_usd(kind) if kind.cloud == "aws" else tuple(_sum(kind, market) for market in (0, 1))
        for region in addresses.regions_of(kind.cloud):
            for number, zone in enumerate(region.zones):
                name = kind.instance_type
                on_demand = shipped.get((region.name, "", name, "on_demand")) if kind.cloud == "aws" else None
                # Prices rise a little from zone to zone, so that one is the cheapest.
                own = f"{assumed[1] * (100 + 5 * number) / 100:.4f}"
                spot = shipped.get((region.name, zone, name, "spot"), own) if kind.cloud == "aws" else own
                found.append(
                    Row(
                        kind=kind,
                        region=region.name,
                        zone=zone,
                        on_demand=on_demand or f"{assumed[0]:.4f}",
                        spot=spot,
                    )
                )
    return found


def _aws_usd(kind: InstanceType) -> tuple[Decimal, Decimal]:
    usd = Decimal(str(AWS_USD[kind.accelerator])) * (kind.gpus or kind.vcpus)
    return usd, usd * AWS_SPOT


def _parts(kind: InstanceType) -> tuple[Part, ...]:
    if kind.gpus:
        return parts_of(kind)
    return (
        Part(name="N2 Instance Core", unit="h", count=Decimal(kind.vcpus)),
        Part(name="N2 Instance Ram", unit="GiBy.h", count=Decimal(kind.mem_gib)),
    )


def _sum(kind: InstanceType, market: int, gpu: bool | None = None) -> Decimal:
    """Return the sum of the parts; optionally only the GPUs, or only the other parts."""
    of_gpu = (*GPUS.values(), *WHOLE.values())
    parts = [part for part in _parts(kind) if gpu is None or gpu == (part.name in of_gpu)]
    return sum((part.count * Decimal(PARTS[part.name][market]) for part in parts), Decimal(0))


def _skus() -> Iterator[Mapping[str, Any]]:
    regions = [region.name for region in addresses.regions_of("gcp")]
    units = {part.name: part.unit for kind in INSTANCE_TYPES if kind.cloud == "gcp" for part in _parts(kind)}
    for name, unit in units.items():
        on_demand, spot = PARTS[name]
        is_host = name.endswith(("Core", "Ram"))
        taken = f"Spot Preemptible {name}" if is_host else f"{name} attached to Spot Preemptible VMs"
        yield sku(f"{name} running in Americas", on_demand, regions, unit=unit, sku_id=f"{name}/on-demand")
        yield sku(f"{taken} running in Americas", spot, regions, unit=unit, sku_id=f"{name}/spot", usage="Preemptible")


def _shipped() -> dict[tuple[str, str, str, str], str]:
    found = {}
    for table in ("aws_on_demand", "aws_spot", "gcp_on_demand", "gcp_spot"):
        with (CHECKOUT / "catalogs" / f"{table}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                zone = row["zone"] if row["market"] == "spot" else ""
                found[row["region"], zone, row["instance_type"], row["market"]] = row["usd_per_hour"]
    return found


def open_market() -> FakeMarket:
    """Start a market with these prices, from an hour ago on."""
    now_ms = int(time.time() * 1000)
    ticks = [
        Tick(
            at_ms=now_ms - 3_600_000,
            cloud=row.kind.cloud,
            region=row.region,
            zone=row.zone,
            instance_type=row.kind.instance_type,
            usd=row.spot,
        )
        for row in rows()
    ]
    products = {
        (row.region, row.kind.instance_type): Product(
            region=row.region, instance_type=row.kind.instance_type, usd=row.on_demand
        )
        for row in rows()
        if row.kind.cloud == "aws"
    }
    # Only DescribeAvailabilityZones returns zone ids, because those of moto and of the market differ.
    return FakeMarket(
        ticks=ticks, products=list(products.values()), skus=list(_skus()), now_ms=now_ms, with_zone_ids=False
    )


def micro_usd_per_hour(zone: str, instance_type: str, market: str) -> int:
    """Return the price of an instance, before any change. Google bills the parts, and does not round their sum."""
    (row,) = (one for one in rows() if (one.zone, one.kind.instance_type) == (zone, instance_type))
    on_demand = _sum(row.kind, 0) if row.kind.cloud == "gcp" else Decimal(row.on_demand)
    return round((Decimal(row.spot) if market == "spot" else on_demand) * 1_000_000)


def change(market: FakeMarket, where: str, factor: float) -> int:
    """Set spot prices under `where` (cloud/region/zone) to `factor` times their first value. Return the count."""
    now_ms = int(time.time() * 1000)
    cloud, region, zone = (*where.split("/"), "", "", "")[:3]
    fitting = [
        row for row in rows() if cloud in ("", row.kind.cloud) and region in ("", row.region) and zone in ("", row.zone)
    ]
    market.ticks = [
        *market.ticks,
        *(
            Tick(
                at_ms=now_ms,
                cloud=row.kind.cloud,
                region=row.region,
                zone=row.zone,
                instance_type=row.kind.instance_type,
                usd=f"{Decimal(row.spot) * Decimal(str(factor)):.4f}",
            )
            for row in fitting
        ),
    ]
    return len(fitting)


# --- SkyPilot's catalog files ------------------------------------------------------------------------

VMS = ["InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "GpuInfo", "Price", "SpotPrice"]
VMS += ["Region", "AvailabilityZone", "Arch"]
IMAGES = ["Tag", "Region", "OS", "OSVersion", "ImageId", "CreationDate", "BaseImageId"]


def write_catalog(home: Path, ami: str, zone_ids: Mapping[str, str]) -> None:
    """Write catalog files to SkyPilot's folder. SkyPilot never downloads files without a checksum beside them."""
    folder = home / ".sky" / "catalogs" / "v8"
    table = rows()
    aws = []
    for row in table:
        if (m := row.kind).cloud == "aws":
            size = [m.instance_type, m.accelerator, m.gpus or "", m.vcpus, m.mem_gib, _gpu_info(m)]
            aws.append([*size, row.on_demand, row.spot, row.region, zone_ids[row.zone], "x86_64"])
    _write(folder / "aws" / "vms.csv", VMS, aws)
    tags = [f"skypilot:custom-{kind}" for kind in ("cpu-ubuntu", "gpu-ubuntu-cuda13", "gpu-ubuntu", "cpu-ubuntu-2204")]
    tags += ["skypilot:custom-gpu-ubuntu-2204"]
    regions = [region.name for region in addresses.regions_of("aws")]
    images = [[tag, region, "ubuntu", "22.04", ami, "20261101", ami] for tag in tags for region in regions]
    _write(folder / "aws" / "images.csv", IMAGES, images)
    quotas = ["OnDemandInstanceCode", "SpotInstanceCode"]
    _write(folder / "aws" / "instance_quota_mapping.csv", ["InstanceType", *quotas], [])

    # On Google Cloud a host and its GPUs have rows of their own, and their prices are added.
    gcp: dict[tuple[str, str, int, str], Sequence[object]] = {}
    for row in table:
        if (m := row.kind).cloud == "gcp":
            dearer = Decimal(row.spot) / max(_sum(m, 1), Decimal("0.0001"))
            host = [f"{_sum(m, 0, gpu=False):.5f}", f"{_sum(m, 1, gpu=False) * dearer:.5f}"]
            place = [row.region, row.zone, ""]
            gcp[m.machine_type, "", 0, row.zone] = [m.machine_type, "", "", m.vcpus, m.mem_gib, "", *host, *place]
            if m.gpus:
                gpus = [f"{_sum(m, 0, gpu=True):.5f}", f"{_sum(m, 1, gpu=True) * dearer:.5f}"]
                size = ["", m.accelerator, m.gpus, "", "", _gpu_info(m)]
                gcp["", m.accelerator, m.gpus, row.zone] = [*size, *gpus, *place]
    _write(folder / "gcp" / "vms.csv", VMS, list(gcp.values()))
    tags = ["skypilot:cpu-debian-11", "skypilot:gpu-debian-11"]
    tags += [f"skypilot:custom-{kind}" for kind in ("cpu-ubuntu-2204", "gpu-ubuntu-2204", "gpu-ubuntu-2204-cuda13")]
    image = "projects/fake-images/global/images/fake-clouds"
    _write(folder / "gcp" / "images.csv", IMAGES[:-1], [[tag, "", "debian", "11", image, "20261101"] for tag in tags])
    _write(folder / "gcp" / "accelerator_quota_mapping.csv", ["Accelerator", *quotas], [])

    clouds: dict[str, set[str]] = {}
    for kind in SOLD:
        clouds.setdefault(kind.accelerator, set()).add(kind.cloud.upper())
    named = [[gpu, sorted(where)] for gpu, where in clouds.items()]
    _write(folder / "common" / "accelerators.csv", ["AcceleratorName", "Clouds"], named)
    memory = {m.accelerator: [m.accelerator, m.gpu_mem_gib, "NVIDIA"] for m in SOLD}
    _write(folder / "common" / "metadata.csv", ["GPU", "MemoryGB", "Manufacturer"], list(memory.values()))


def _gpu_info(kind: InstanceType) -> str:
    if not kind.gpus:
        return ""
    mib = kind.gpu_mem_gib * 1024
    gpu = {"Name": kind.accelerator, "Manufacturer": "NVIDIA", "Count": float(kind.gpus)}
    gpu |= {"MemoryInfo": {"SizeInMiB": mib}}
    return repr({"Gpus": [gpu], "TotalGpuMemoryInMiB": mib * kind.gpus})


def _write(path: Path, header: Sequence[str], table: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(table)
