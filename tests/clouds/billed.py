"""The clouds' bills of a run on the fake clouds, made from their own meters, against `spotrl report`.

Each cloud's bill has what a company's bill has: other people's resources, tax, credits, discounts, a split line,
another currency, an instance that no ledger knows. It comes in two files, and twice.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from launcher.ledger.models import wall_ms
from launcher.market.side_prices import MINIMUM_BILLED_MS, side_rates
from launcher.money import HOUR_MS
from tests.clouds.launched import Launched
from tests.fakes.bills import (
    ADDRESS,
    DISK,
    TRAFFIC,
    Used,
    aws_row,
    aws_rows,
    gcp_row,
    gcp_rows,
    write_csv,
    write_parquet,
)
from tests.fakes.clouds import addresses, prices
from tests.fakes.clouds.aws import RECLAIMED

ACCOUNTS = {"aws": addresses.ACCOUNT, "gcp": addresses.PROJECT}
STRANGER = {"aws": "210987654321", "gcp": "another-project"}
LOST = "i-no-ledger-knows"


def instances_of(run: Launched) -> list[dict[str, Any]]:
    """Return every instance of the run since the launch, as its cloud meters it."""
    return [one for one in run.world.machines() if (one.get("labels") or {}).get("spotrl-run") == run.name]


def used_by(instance: Mapping[str, Any]) -> Iterator[Used]:
    """Yield what a cloud meters of an instance: a minute at least, and nothing for a first hour that AWS ended."""
    ended_ms = instance["ended_ms"] or wall_ms()
    life_ms = ended_ms - instance["launched_ms"]
    used = Used(
        resource=instance["name"] if instance["cloud"] == "gcp" else instance["id"],
        labels=instance["labels"],
        account=ACCOUNTS[instance["cloud"]],
        region=instance["region"],
        zone=instance["zone"],
        instance_type=instance["instance_type"],
        market=instance["market"],
        start_ms=instance["launched_ms"],
        end_ms=instance["launched_ms"] + max(life_ms, MINIMUM_BILLED_MS),
        micro_usd_per_hour=prices.micro_usd_per_hour(instance["zone"], instance["instance_type"], instance["market"]),
        is_free=instance["reason"] == RECLAIMED and life_ms < HOUR_MS,
    )
    yield used
    for rate in side_rates(instance["cloud"], instance["market"]):
        kind = {"disk": DISK, "address": ADDRESS}[rate.kind]
        beside = replace(used, kind=kind, resource=f"{kind}-{used.resource}", end_ms=ended_ms, is_free=False)
        yield replace(beside, micro_usd_per_hour=rate.micro_usd_per_hour)


def rows_of(cloud: str, used: list[Used], export: int = 1) -> list[dict[str, Any]]:
    """Return the rows of a bill with all that a company's bill has beside the run's nodes."""
    first = replace(used[0], is_free=False)  # what is added below costs something on any bill
    stranger = replace(first, resource="stranger", account=STRANGER[cloud])
    theirs = replace(first, resource="theirs", labels={"spotrl-run": "theirs", "spotrl-node": "theirs-trainer-g0"})
    plain = replace(first, resource="plain", labels={}, account=STRANGER[cloud])
    lost = replace(
        first, resource=LOST, labels={**first.labels, "spotrl-node": f"{first.labels['spotrl-run']}-lost-g9"}
    )
    more = [stranger, theirs, plain, lost, replace(first, kind=TRAFFIC)]
    hour_ms = first.start_ms // HOUR_MS * HOUR_MS
    if cloud == "aws":
        rows = aws_rows([*used, *more], str(export))
        split = [aws_row(first, hour_ms, usd="0.0100000001", usage="Other", note=note) for note in ("a", "b")]
        kinds = {"Tax": "0.1234567891", "Credit": "-0.2", "EdpDiscount": "-0.05", "Refund": "-0.01"}
        return [*rows, *split, *(aws_row(first, hour_ms, usd=usd, line_type=kind) for kind, usd in kinds.items())]
    time = f"2027-01-0{export} 04:05:06.000000 UTC"
    rows = gcp_rows([*used, *more], time)
    credits = [
        {"name": "trial", "type": "PROMOTION", "amount": -0.2},
        {"name": "sud", "type": "DISCOUNT", "amount": -0.05},
    ]
    euro = replace(first, kind=TRAFFIC, currency="EUR", rate="0.9", credits=credits)
    equal = gcp_row(first, hour_ms, hour_ms + HOUR_MS, sku="Equal", usd="0.01")
    tax = gcp_row(first, hour_ms, hour_ms + HOUR_MS, sku="Tax", usd="0.123456789", cost_type="tax")
    return [*rows, gcp_row(euro, hour_ms, hour_ms + HOUR_MS, sku="Network Data Transfer", usd="0.5"), equal, equal, tax]


def usd_of(row: Mapping[str, Any]) -> Decimal:
    """Return the dollars of a row by the columns of its cloud, with its credits."""
    if "line_item_unblended_cost" in row:
        return Decimal(row["line_item_unblended_cost"])
    amounts = [row["cost"], *(credit["amount"] for credit in row["credits"])]
    return sum((Decimal(repr(amount)) for amount in amounts), Decimal(0)) / Decimal(
        repr(row["currency_conversion_rate"])
    )


def is_of(run: str, row: Mapping[str, Any]) -> bool:
    """Return whether a row is of the run: by its label, and not of a stranger's account."""
    if "line_item_unblended_cost" in row:
        return (
            row["resource_tags"].get("user_spotrl_run") == run and row["line_item_usage_account_id"] == ACCOUNTS["aws"]
        )
    labels = {label["key"]: label["value"] for label in row["labels"]}
    return labels.get("spotrl-run") == run and row["project"]["id"] == ACCOUNTS["gcp"]


def check_bill(run: Launched, folder: Path) -> dict[str, Any]:
    """Import the bills of all clouds of the run, in parts and twice, and return the report's `bill`.

    Raises AssertionError unless every node is matched and the differences explain the bill to the micro-dollar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metered = instances_of(run)
    total = Decimal(0)
    for cloud in sorted({one["cloud"] for one in metered}):
        used = [part for one in metered if one["cloud"] == cloud for part in used_by(one)]
        rows = rows_of(cloud, used)
        total += sum((usd_of(row) for row in rows if is_of(run.name, row)), Decimal(0))
        parts = [rows[: len(rows) * 2 // 3], rows[len(rows) // 3 :]] if cloud == "gcp" else [rows[::2], rows[1::2]]
        files = [
            write_parquet(folder / f"{cloud}-1.parquet", parts[0]),
            write_csv(folder / f"{cloud}-2.csv.gz", parts[1]),
        ]
        first = _import(run, *files)
        assert first["added"] > 0
        again = _import(run, files[1], files[0])
        assert (again["added"], again["replaced"]) == (0, 0)
        if cloud == "aws":
            newer = _import(run, write_csv(folder / "aws-newer.csv", rows_of(cloud, used, 2)))
            assert newer["replaced"] == newer["added"] == first["added"]
        assert {thing["resource"] for thing in first["unknown"]} == {"stranger", "theirs"}
        assert first["other_accounts"].keys() == {STRANGER[cloud]}
        names = {one["labels"]["spotrl-node"] for one in metered if one["cloud"] == cloud}
        assert names <= set(first["nodes"]), "every node that the cloud metered was matched"
    bill: dict[str, Any] = json.loads(run.spotrl("report", run.name, "--json").stdout)["bill"]
    explained = sum(one["micro_usd"] for one in bill["differences"])
    assert bill["billed_micro_usd"] - bill["metered_micro_usd"] == explained
    assert bill["billed_micro_usd"] == round(total * 10**6)
    kinds = {one["kind"] for one in bill["differences"]}
    assert {"tax", "credit", "discount", "traffic", "unknown"} <= kinds
    assert [one["why"] for one in bill["differences"] if one["kind"] == "unknown" and LOST in one["why"]]
    assert {node["basis"] for node in bill["nodes"]} == {"billed"}, bill["nodes"]
    return bill


def _import(run: Launched, *files: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.spotrl("bill", "import", *files, "--json").stdout)
    return found
