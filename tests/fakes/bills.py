"""Bills as the clouds write them, made from what resources used: AWS's CUR 2.0 and Google Cloud's detailed usage cost.

    Used (one resource, a stretch of time, a price) -> a row for each hour (UTC) -> CSV, CSV in gzip, or parquet

Names and forms of the columns are the clouds' own. Columns that no reader of ours could need are empty.
"""

import csv
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from launcher.money import HOUR_MS

PAYER = "999988887777"
BILLING_ACCOUNT = "01ABCD-2345EF-678901"

AWS_TEXT = """
bill_bill_type bill_billing_entity bill_billing_period_end_date bill_billing_period_start_date bill_invoice_id
bill_invoicing_entity bill_payer_account_id bill_payer_account_name cost_category discount discount_bundled_discount
discount_total_discount identity_line_item_id identity_time_interval line_item_availability_zone line_item_blended_cost
line_item_blended_rate line_item_currency_code line_item_legal_entity line_item_line_item_description
line_item_line_item_type line_item_net_unblended_cost line_item_net_unblended_rate line_item_normalization_factor
line_item_normalized_usage_amount line_item_operation line_item_product_code line_item_resource_id line_item_tax_type
line_item_unblended_cost line_item_unblended_rate line_item_usage_account_id line_item_usage_account_name
line_item_usage_amount line_item_usage_end_date line_item_usage_start_date line_item_usage_type pricing_currency
pricing_lease_contract_length pricing_offering_class pricing_public_on_demand_cost pricing_public_on_demand_rate
pricing_purchase_option pricing_rate_code pricing_rate_id pricing_term pricing_unit product product_comment
product_fee_code product_fee_description product_from_location product_from_location_type product_from_region_code
product_instance_family product_instance_type product_instancesku product_location product_location_type
product_operation product_pricing_unit product_product_family product_region_code product_servicecode product_sku
product_to_location product_to_location_type product_to_region_code product_usagetype resource_tags
"""
AWS_COLUMNS = tuple(AWS_TEXT.split())

GCP_COLUMNS = (
    *("billing_account_id", "service", "sku", "usage_start_time", "usage_end_time", "project", "labels"),
    *("system_labels", "location", "resource", "tags", "price", "transaction_type", "seller_name", "export_time"),
    *("cost", "currency", "currency_conversion_rate", "usage", "credits", "invoice", "cost_type", "adjustment_info"),
    "cost_at_list",
)

INSTANCE, DISK, ADDRESS, TRAFFIC = "instance", "disk", "address", "traffic"


@dataclass(frozen=True, kw_only=True)
class Used:
    """One resource and its price over a time. `line_type`: AWS's type of the line. `credits`: of Google's rows.

    `is_free`: the rows have hours, and cost nothing.
    """

    resource: str
    start_ms: int
    end_ms: int
    micro_usd_per_hour: int
    kind: str = INSTANCE
    labels: Mapping[str, str] = field(default_factory=dict)
    account: str = "123456789012"
    region: str = "us-west-2"
    zone: str = "us-west-2a"
    instance_type: str = "g6.xlarge"
    market: str = "spot"
    is_free: bool = False
    currency: str = "USD"
    rate: str = "1"
    credits: Sequence[Mapping[str, Any]] = ()


def hours_of(start_ms: int, end_ms: int) -> Iterator[tuple[int, int, int]]:
    """Yield each hour (UTC) that a time touches, with the milliseconds in it."""
    for hour_ms in range(start_ms // HOUR_MS * HOUR_MS, end_ms, HOUR_MS):
        yield hour_ms, hour_ms + HOUR_MS, min(end_ms, hour_ms + HOUR_MS) - max(start_ms, hour_ms)


# --- AWS ----------------------------------------------------------------------------------------------


def aws_rows(used: Iterable[Used], delivery: str = "1") -> list[dict[str, Any]]:
    """Return the rows of an hourly CUR 2.0 with resource ids. Another `delivery` has other line ids."""
    return [
        aws_row(
            one,
            hour_ms,
            usage=_aws_usage(one),
            amount=Decimal(ms) / HOUR_MS,
            usd=Decimal(0) if one.is_free else Decimal(one.micro_usd_per_hour) * ms / HOUR_MS / 10**6,
            delivery=delivery,
        )
        for one in used
        for hour_ms, _, ms in hours_of(one.start_ms, one.end_ms)
    ]


def aws_row(
    used: Used,
    start_ms: int,
    *,
    usd: Decimal | str,
    usage: str = "",
    amount: Decimal | str = "1",
    line_type: str = "Usage",
    delivery: str = "1",
    note: str = "",
    end_ms: int = 0,
) -> dict[str, Any]:
    """Return one row of an hour, or until `end_ms`. `note`: tells rows apart that are equal otherwise."""
    end_ms = end_ms or start_ms + HOUR_MS
    interval = f"{_iso(start_ms)}/{_iso(end_ms)}"
    month, after = _months(start_ms)
    told = f"{delivery} {used.resource} {usage} {line_type} {start_ms} {note}"
    tags = {f"user_{key.replace('-', '_')}": value for key, value in used.labels.items()}
    cost = f"{Decimal(usd):.10f}"
    found = {
        "bill_bill_type": "Anniversary",
        "bill_billing_entity": "AWS",
        "bill_billing_period_start_date": month,
        "bill_billing_period_end_date": after,
        "bill_invoicing_entity": "Amazon Web Services, Inc.",
        "bill_payer_account_id": PAYER,
        "identity_line_item_id": hashlib.blake2b(told.encode(), digest_size=26).hexdigest(),
        "identity_time_interval": interval,
        "line_item_availability_zone": used.zone,
        "line_item_blended_cost": cost,
        "line_item_currency_code": used.currency,
        "line_item_legal_entity": "Amazon Web Services, Inc.",
        "line_item_line_item_description": f"{line_type} {usage}",
        "line_item_line_item_type": line_type,
        "line_item_operation": "RunInstances" if used.kind == INSTANCE else "",
        "line_item_product_code": "AmazonVPC" if used.kind == ADDRESS else "AmazonEC2",
        "line_item_resource_id": used.resource,
        "line_item_tax_type": "VAT" if line_type == "Tax" else "",
        "line_item_unblended_cost": cost,
        "line_item_usage_account_id": used.account,
        "line_item_usage_amount": f"{Decimal(amount):.10f}",
        "line_item_usage_start_date": _iso(start_ms),
        "line_item_usage_end_date": _iso(end_ms),
        "line_item_usage_type": usage,
        "pricing_currency": used.currency,
        "pricing_unit": {INSTANCE: "Hrs", ADDRESS: "Hrs", DISK: "GB-Mo"}.get(used.kind, "GB"),
        "product": {"product_name": "Amazon Elastic Compute Cloud"},
        "product_instance_type": used.instance_type if used.kind == INSTANCE else "",
        "product_region_code": used.region,
        "product_servicecode": "AmazonEC2",
        "resource_tags": tags,
    }
    return dict.fromkeys(AWS_COLUMNS, "") | found


def _aws_usage(used: Used) -> str:
    return {
        INSTANCE: f"USW2-{'SpotUsage' if used.market == 'spot' else 'BoxUsage'}:{used.instance_type}",
        DISK: "USW2-EBS:VolumeUsage.gp3",
        ADDRESS: "USW2-PublicIPv4:InUseAddress",
        TRAFFIC: "USW2-DataTransfer-Out-Bytes",
    }[used.kind]


# --- Google Cloud -------------------------------------------------------------------------------------


def gcp_rows(used: Iterable[Used], export_time: str = "2027-01-03 04:05:06.000000 UTC") -> list[dict[str, Any]]:
    """Return rows of the detailed usage cost. An instance has a row an hour for its host and one for its GPU."""
    rows = []
    for one in used:
        parts = {
            INSTANCE: (
                ("G2 Instance Core running in Americas", 1),
                ("Nvidia L4 GPU attached to Spot Preemptible VMs running in Americas", 3),
            )
        }
        skus = {DISK: "Balanced PD Capacity", ADDRESS: "External IP Charge on a Spot Preemptible VM"}
        skus |= {TRAFFIC: "Network Internet Data Transfer Out from Americas to Americas"}
        for sku, weight in parts.get(one.kind, ((skus.get(one.kind, ""), 4),)):
            for hour_ms, end_ms, ms in hours_of(one.start_ms, one.end_ms):
                usd = (
                    Decimal(0) if one.is_free else Decimal(one.micro_usd_per_hour * weight * ms) / (4 * HOUR_MS * 10**6)
                )
                rows.append(gcp_row(one, hour_ms, end_ms, sku=sku, usd=usd, seconds=ms / 1000, export_time=export_time))
    return rows


def gcp_row(
    used: Used,
    start_ms: int,
    end_ms: int,
    *,
    sku: str,
    usd: Decimal | str,
    seconds: float = 3600,
    cost_type: str = "regular",
    export_time: str = "2027-01-03 04:05:06.000000 UTC",
) -> dict[str, Any]:
    """Return one row. The money is in the currency of `used`, at its rate."""
    start = datetime.fromtimestamp(start_ms / 1000, UTC)
    kinds = {INSTANCE: "instances", TRAFFIC: "instances", DISK: "disks", ADDRESS: "addresses"}
    number = int(hashlib.blake2b(used.resource.encode(), digest_size=7).hexdigest(), 16)
    name = f"//compute.googleapis.com/projects/1234567/zones/{used.zone}/{kinds[used.kind]}/{number}"
    return {
        "billing_account_id": BILLING_ACCOUNT,
        "service": {"id": "6F81-5844-456A", "description": "Compute Engine"},
        "sku": {"id": hashlib.blake2b(sku.encode(), digest_size=6).hexdigest().upper(), "description": sku},
        "usage_start_time": _utc(start_ms),
        "usage_end_time": _utc(end_ms),
        "project": {"id": used.account, "number": "1234567", "name": used.account, "ancestry_numbers": "/42/"},
        "labels": [{"key": key, "value": value} for key, value in used.labels.items()],
        "system_labels": [{"key": "compute.googleapis.com/machine_spec", "value": used.instance_type}],
        "location": {"location": used.zone, "country": "US", "region": used.region, "zone": used.zone},
        "resource": {"name": used.resource, "global_name": name} if used.resource else {},
        "tags": [],
        "price": {"unit": "hour"},
        "transaction_type": "GOOGLE",
        "export_time": export_time,
        "cost": float(Decimal(usd) * Decimal(used.rate)),
        "currency": used.currency,
        "currency_conversion_rate": float(used.rate),
        "usage": {"amount": seconds, "unit": "seconds", "amount_in_pricing_units": seconds / 3600},
        "credits": [dict(credit) for credit in used.credits],
        "invoice": {"month": start.strftime("%Y%m")},
        "cost_type": cost_type,
        "cost_at_list": float(Decimal(usd) * Decimal(used.rate)),
    }


# --- files --------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> Path:
    """Write CSV, in gzip if the name ends so. Nested values are JSON, as `TO_JSON_STRING` of BigQuery writes them."""
    columns = columns or (AWS_COLUMNS if "line_item_line_item_type" in rows[0] else GCP_COLUMNS)
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {key: json.dumps(value) if isinstance(value, dict | list) else value for key, value in row.items()}
            )
    return path


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write parquet with the types of the clouds' own files: maps, structs, lists, times and numbers."""
    import duckdb

    lines = path.with_suffix(".jsonl")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "line_item_line_item_type" in rows[0]:
        numbers = ("line_item_unblended_cost", "line_item_usage_amount", "line_item_blended_cost")
        kinds = dict.fromkeys(AWS_COLUMNS, "VARCHAR") | dict.fromkeys(numbers, "DOUBLE")
        kinds |= {name: "TIMESTAMP" for name in AWS_COLUMNS if name.endswith("_date")}
        kinds["resource_tags"] = kinds["product"] = "MAP(VARCHAR, VARCHAR)"
        texts = ", ".join(f"{key}: '{kind}'" for key, kind in kinds.items())
        chosen = "*"
    else:
        pair = "STRUCT(key VARCHAR, value VARCHAR)[]"
        kinds = dict.fromkeys(GCP_COLUMNS, "VARCHAR") | {"labels": pair, "system_labels": pair, "tags": pair}
        kinds |= dict.fromkeys(("cost", "currency_conversion_rate", "cost_at_list"), "DOUBLE")
        kinds |= dict.fromkeys(("usage_start_time", "usage_end_time", "export_time"), "VARCHAR")
        kinds |= {"resource": "STRUCT(name VARCHAR, global_name VARCHAR)", "invoice": "STRUCT(month VARCHAR)"}
        kinds |= {
            "service": "STRUCT(id VARCHAR, description VARCHAR)",
            "sku": "STRUCT(id VARCHAR, description VARCHAR)",
        }
        kinds |= {"project": "STRUCT(id VARCHAR, number VARCHAR, name VARCHAR)"}
        kinds |= {"usage": "STRUCT(amount DOUBLE, unit VARCHAR, amount_in_pricing_units DOUBLE)"}
        kinds |= {"credits": "STRUCT(name VARCHAR, amount DOUBLE, full_name VARCHAR, id VARCHAR, type VARCHAR)[]"}
        texts = ", ".join(f"\"{key}\": '{kind}'" for key, kind in kinds.items())
        times = ("usage_start_time", "usage_end_time", "export_time")
        chosen = "* REPLACE (" + ", ".join(
            f"CAST(replace({name}, ' UTC', '+00') AS TIMESTAMPTZ) AS {name}" for name in times
        )
        chosen += ")"
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT {chosen} FROM read_json('{lines}', format = 'newline_delimited', columns = {{{texts}}})) "
            f"TO '{path}' (FORMAT parquet)"
        )
    lines.unlink()
    return path


def _iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _utc(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _months(at_ms: int) -> tuple[str, str]:
    month = datetime.fromtimestamp(at_ms / 1000, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    after = month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
    return _iso(round(month.timestamp() * 1000)), _iso(round(after.timestamp() * 1000))
