"""FOCUS charge rows of runs (FinOps Open Cost and Usage Specification 1.2), for the tools that read a company's bill.

charges, disks, addresses and judges of a run -> one row for each node, kind and hour (UTC) -> CSV

`BilledCost` is what the ledger knows: metered, or assumed on this machine (`x_CostBasis`); it is no invoice. The rows
of a run add up to its cost to the micro-dollar. A node's hour is cut where its price or its role changes. Costs without
a known price have no row.
"""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.events import Judged, Market
from launcher.ledger.accounting import Charge, NodeCost, run_costs, side_costs_of_run
from launcher.ledger.billing import interval_micro_usd
from launcher.ledger.models import LOCAL, Node, ProgressRow, Run, SideCost
from launcher.market.side_prices import ADDRESS, DISK
from launcher.money import HOUR_MS, MICRO
from launcher.report.run_files import accounts_of, instance_id
from launcher.whole_file import whole_file

_TEXT = """
AvailabilityZone BilledCost BillingAccountId BillingAccountName BillingCurrency BillingPeriodEnd BillingPeriodStart
ChargeCategory ChargeClass ChargeDescription ChargeFrequency ChargePeriodEnd ChargePeriodStart
CommitmentDiscountCategory CommitmentDiscountId CommitmentDiscountName CommitmentDiscountStatus CommitmentDiscountType
ConsumedQuantity ConsumedUnit ContractedCost ContractedUnitPrice EffectiveCost InvoiceId InvoiceIssuerName ListCost
ListUnitPrice PricingCategory PricingQuantity PricingUnit ProviderName PublisherName RegionId RegionName ResourceId
ResourceName ResourceType ServiceCategory ServiceName ServiceSubcategory SkuId SkuPriceId SubAccountId SubAccountName
Tags x_CostBasis x_Market x_PriceSource x_Role x_Run
"""
COLUMNS = tuple(_TEXT.split())
"""The columns of a file, in FOCUS's spelling. Those that begin with `x_` are ours, as FOCUS asks of other columns."""

LEFT_OUT = (
    "BillingAccountType, CapacityReservationId, CapacityReservationStatus, CommitmentDiscountQuantity, "
    "CommitmentDiscountUnit, SkuMeter, SkuPriceDetails, SubAccountType, and the columns of another currency "
    "(PricingCurrency...)"
)
"""Columns of FOCUS 1.2 that spotrl knows nothing of."""

UNKNOWN = "unknown"
"""`BillingAccountId` of a cloud's rows: a run knows its account or project (`SubAccountId`), not who pays for that."""

PROVIDERS = {"aws": "AWS", "gcp": "Google Cloud", LOCAL: "This machine"}
MACHINE = "machine"
SERVICES = {
    ("aws", MACHINE): "Amazon Elastic Compute Cloud",
    ("aws", DISK): "Amazon Elastic Block Store",
    ("aws", ADDRESS): "Amazon Virtual Private Cloud",
    ("gcp", MACHINE): "Compute Engine",
    ("gcp", DISK): "Persistent Disk",
    ("gcp", ADDRESS): "Cloud External IP Addresses",
    (LOCAL, MACHINE): "spotrl on this machine",
}
"""A service has one category: FOCUS's rule."""
CATEGORIES = {
    DISK: ("Storage", "Block Storage", "Disk"),
    ADDRESS: ("Networking", "Network Infrastructure", "IP address"),
}
"""By kind of a cost beside a node: service category, its subcategory, type of the resource."""

VIRTUAL_MACHINE = ("Compute", "Virtual Machines", "Virtual machine")


@dataclass(frozen=True, kw_only=True, slots=True)
class FocusFile:
    """A written file: its number of rows, and the sum of their `BilledCost` in micro-dollars."""

    path: Path
    rows: int
    micro_usd: int

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            f"not in the file, because spotrl does not know them: {LEFT_OUT}; traffic, which has no price",
            f"BillingAccountId of a cloud is `{UNKNOWN}`; SubAccountId is the account or project that a run used",
        )


def write_focus(session: Session, runs: Iterable[Run], path: Path) -> FocusFile:
    """Write the rows of these runs until now, as CSV with a header. Raises OSError."""
    count = micro_usd = 0
    with whole_file(path) as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        for run in runs:
            for row in focus_rows(session, run, run.clock.now_ms()):
                writer.writerow(row)
                count += 1
                micro_usd += round(Decimal(row["BilledCost"]) * MICRO)
    return FocusFile(path=path, rows=count, micro_usd=micro_usd)


def focus_rows(session: Session, run: Run, now_ms: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run until `now_ms`, by node. Money is in dollars with six decimals."""
    accounts = accounts_of(run)
    nodes = {node.name: node for node in session.scalars(select(Node).where(Node.run_id == run.id))}
    places = {node.id: _place(run, node, accounts) for node in nodes.values()}
    for cost in run_costs(session, run, now_ms).nodes:
        yield from _machine_rows(run, nodes[cost.node], cost, places[nodes[cost.node].id])
    by_id = {node.id: node for node in nodes.values()}
    for side in side_costs_of_run(session, run, now_ms):
        if side.micro_usd is not None:
            yield from _side_rows(run, side, None if side.node_id is None else by_id[side.node_id], places)
    yield from _judge_rows(session, run)


def _machine_rows(run: Run, node: Node, cost: NodeCost, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    category, subcategory, resource_type = VIRTUAL_MACHINE
    for charge in cost.charges:
        is_free = charge.micro_usd == 0 and charge.ms > 0 and charge.micro_usd_per_hour > 0
        has_minimum = charge.micro_usd > interval_micro_usd(charge.start_ms, charge.end_ms, charge.micro_usd_per_hour)
        moments = [] if cost.taken is None else [cost.taken.at_ms]
        for start_ms, end_ms, micro_usd in _by_hour(charge, moments):
            contracted = micro_usd
            if is_free:
                contracted = interval_micro_usd(start_ms, end_ms, charge.micro_usd_per_hour)
            hours = Decimal(end_ms - start_ms) / HOUR_MS
            if has_minimum and end_ms == charge.end_ms:  # the last piece has what is missing of the minimum billed time
                hours = Decimal(micro_usd) / charge.micro_usd_per_hour
            is_trainer = cost.taken is not None and start_ms >= cost.taken.at_ms
            yield place | {
                **_period(start_ms),
                "BilledCost": _usd(micro_usd),
                "EffectiveCost": _usd(micro_usd),
                "ContractedCost": _usd(contracted),
                "ContractedUnitPrice": _usd(charge.micro_usd_per_hour),
                "ListCost": _usd(round(hours * cost.on_demand_micro_usd_per_hour)),
                "ListUnitPrice": _usd(cost.on_demand_micro_usd_per_hour),
                "ChargeCategory": "Usage",
                "ChargeFrequency": "Usage-Based",
                "ChargeDescription": f"{cost.instance_type} {cost.market} in {cost.zone or cost.region}"
                + (", not billed: preempted in its first hour" if is_free else ""),
                "PricingCategory": "Dynamic" if cost.market == Market.SPOT else "Standard",
                "PricingQuantity": f"{hours:.9f}",
                "PricingUnit": "Hours",
                "ConsumedQuantity": f"{Decimal(end_ms - start_ms) / HOUR_MS:.9f}",
                "ConsumedUnit": "Hours",
                "AvailabilityZone": cost.zone,
                "ResourceType": resource_type,
                "ServiceCategory": category,
                "ServiceName": SERVICES[LOCAL if run.infra == LOCAL else cost.cloud, MACHINE],
                "ServiceSubcategory": subcategory,
                "SkuId": cost.instance_type,
                "SkuPriceId": f"{cost.instance_type}/{cost.market}",
                "x_Market": cost.market,
                "x_PriceSource": node.price_source,
                "x_Role": "trainer" if is_trainer else cost.role,
            }


def _side_rows(
    run: Run, side: SideCost, node: Node | None, places: dict[int, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    category, subcategory, resource_type = CATEGORIES.get(side.kind, VIRTUAL_MACHINE)
    place = _place(run, None, {}) if node is None else places[node.id]
    charge = Charge(
        start_ms=side.start_ms, end_ms=side.end_ms, micro_usd_per_hour=0, micro_usd=side.micro_usd or 0, closed=True
    )
    for start_ms, end_ms, micro_usd in _by_hour(charge, []):
        hours = Decimal(end_ms - start_ms) / HOUR_MS
        price = _usd(round(micro_usd / hours)) if hours else ""
        yield place | {
            **_period(start_ms),
            **dict.fromkeys(("BilledCost", "EffectiveCost", "ContractedCost", "ListCost"), _usd(micro_usd)),
            "ContractedUnitPrice": price,
            "ListUnitPrice": price,
            "ChargeCategory": "Usage" if node is not None else "Adjustment",
            "ChargeFrequency": "Usage-Based",
            "ChargeDescription": f"{side.kind}: {side.amount}",
            "PricingCategory": "Standard",
            "PricingQuantity": f"{hours:.9f}",
            "PricingUnit": "Hours",
            "ConsumedQuantity": f"{hours:.9f}",
            "ConsumedUnit": "Hours",
            "ResourceType": resource_type,
            "ServiceCategory": category,
            "ServiceName": "spotrl" if node is None else SERVICES[node.cloud, side.kind],
            "ServiceSubcategory": subcategory,
            "SkuId": side.kind,
            "SkuPriceId": side.kind,
            "x_PriceSource": side.source,
        }


def _judge_rows(session: Session, run: Run) -> Iterator[dict[str, Any]]:
    """Yield the paid calls of the run's judges, one row an hour."""
    calls: dict[int, list[int]] = {}
    rows = select(ProgressRow).where(ProgressRow.run_id == run.id, ProgressRow.kind == Judged.KIND)
    for row in session.scalars(rows.order_by(ProgressRow.id)):
        judged = Judged(**row.event)
        hour = calls.setdefault(row.at_ms // HOUR_MS, [0, 0])
        hour[0] += judged.micro_usd
        hour[1] += len(judged.calls)
    for hours_utc, (micro_usd, number) in sorted(calls.items()):
        yield _place(run, None, {}) | {
            **_period(hours_utc * HOUR_MS),
            **dict.fromkeys(("BilledCost", "EffectiveCost", "ContractedCost", "ListCost"), _usd(micro_usd)),
            "ChargeCategory": "Usage",
            "ChargeFrequency": "Usage-Based",
            "ChargeDescription": "calls of a paid judge",
            "PricingCategory": "Standard",
            "PricingQuantity": str(number),
            "PricingUnit": "Calls",
            "ConsumedQuantity": str(number),
            "ConsumedUnit": "Calls",
            "ProviderName": "The judge's server",
            "PublisherName": "The judge's server",
            "InvoiceIssuerName": "The judge's server",
            "ServiceCategory": "AI and Machine Learning",
            "ServiceSubcategory": "Generative AI",
            "ServiceName": "Judge",
            "ResourceName": "judge",
            "ResourceType": "Model",
            "SkuId": "judge",
            "SkuPriceId": "judge",
            "x_PriceSource": "the job's prices",
        }


def _place(run: Run, node: Node | None, accounts: dict[str, str]) -> dict[str, Any]:
    """Return the columns that all rows of a node share; of the run, without a node.

    No cloud provides a run on this machine, whatever offer its prices come from.
    """
    cloud = LOCAL if run.infra == LOCAL else ("" if node is None else node.cloud)
    provider = PROVIDERS.get(cloud, cloud) or "spotrl"
    tags = {"spotrl-run": run.name} | ({} if node is None else {"spotrl-node": node.name})
    # A run whose files were removed has the nodes' names alone.
    resource = "" if node is None else instance_id(run, node.name) or node.name
    return {
        "BillingAccountId": LOCAL if cloud == LOCAL else UNKNOWN,
        "BillingCurrency": "USD",
        "InvoiceIssuerName": provider,
        "ProviderName": provider,
        "PublisherName": provider,
        "RegionId": "" if node is None else node.region,
        "RegionName": "" if node is None else node.region,
        "ResourceId": resource,
        "ResourceName": "" if node is None else node.name,
        "SubAccountId": accounts.get(cloud, ""),
        "Tags": json.dumps(tags),
        "x_CostBasis": run.money_basis,
        "x_Run": run.name,
    }


def _by_hour(charge: Charge, moments: Iterable[int]) -> list[tuple[int, int, int]]:
    """Cut a charge at the hours (UTC) and at `moments`: (start, end, micro-dollars), with the charge's own sum."""
    first = charge.start_ms // HOUR_MS * HOUR_MS
    cuts = {charge.start_ms, charge.end_ms, *range(first + HOUR_MS, charge.end_ms, HOUR_MS)}
    cuts |= {moment for moment in moments if charge.start_ms < moment < charge.end_ms}
    if charge.ms == 0:
        return [(charge.start_ms, charge.end_ms, charge.micro_usd)]
    inside = sorted(cuts)
    return [
        (start_ms, end_ms, charge.until(end_ms) - charge.until(start_ms))
        for start_ms, end_ms in itertools.pairwise(inside)
    ]


def _period(start_ms: int) -> dict[str, str]:
    """Return the hour of a charge and the month of its bill, as times in UTC."""
    hour = datetime.fromtimestamp(start_ms // HOUR_MS * 3600, UTC)
    month = hour.replace(day=1, hour=0)
    next_month = month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
    end = datetime.fromtimestamp((start_ms // HOUR_MS + 1) * 3600, UTC)
    return {
        "BillingPeriodStart": _time(month),
        "BillingPeriodEnd": _time(next_month),
        "ChargePeriodStart": _time(hour),
        "ChargePeriodEnd": _time(end),
    }


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _usd(micro_usd: int) -> str:
    return f"{Decimal(micro_usd) / MICRO:.6f}"
