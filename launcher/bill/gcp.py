"""Rows of Google Cloud's detailed usage cost, exported from BigQuery.

BigQuery only adds rows to this table: a correction is another row. A row has no id, so its identity is what it says,
with the time of its export; equal rows of one file are counted. `cost` is a price without credits, which are beside it.
"""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from launcher.bill.rows import (
    BadValue,
    BillCharge,
    BillRow,
    Selection,
    decimal_of,
    digest,
    last_part,
    nested,
    our_labels,
    pico_usd_of,
    time_ms_of,
)
from launcher.bill.table import BillTable, Row
from launcher.exit_codes import Failure
from launcher.ledger.bills import BillKind

MARK = "billing_account_id"
"""A column that only this format has."""

MONTH, COST_TYPE, SKU, SKU_ID = "invoice.month", "cost_type", "sku.description", "sku.id"
START, END, PROJECT = "usage_start_time", "usage_end_time", "project.id"
NAME, GLOBAL_NAME = "resource.name", "resource.global_name"
COST, CURRENCY, RATE = "cost", "currency", "currency_conversion_rate"
CREDITS, EXPORTED, AMOUNT, LABELS = "credits", "export_time", "usage.amount", "labels"
UNIT = "usage.unit"

REQUIRED = (
    *(MARK, MONTH, COST_TYPE, SKU, SKU_ID, START, END, PROJECT, NAME, GLOBAL_NAME, COST, CURRENCY),
    *(CREDITS, EXPORTED, AMOUNT, LABELS),
)
OPTIONAL = (RATE, UNIT)

COST_KINDS = {"tax": BillKind.TAX, "adjustment": BillKind.REFUND, "rounding_error": BillKind.OTHER}
"""Kinds by `cost_type`; `regular` depends on the resource."""

SKU_KINDS = (
    (BillKind.ADDRESS, ("External IP",)),
    (BillKind.TRAFFIC, ("Egress", "Data Transfer", "Network")),
)
"""Kinds by a part of the SKU's description. They come before the kind of the resource."""

RESOURCE_KINDS = {"instances": BillKind.INSTANCE, "disks": BillKind.DISK, "addresses": BillKind.ADDRESS}
"""Kinds by the collection in the resource's global name: `//compute.googleapis.com/.../instances/4567`."""

CREDITS_OF_MONEY = ("PROMOTION", "FREE_TIER")
"""Types of credits that stand for money. Every other type is a discount: committed or sustained use, a contract."""


class GcpBill:
    """The columns of one file."""

    cloud = "gcp"

    def __init__(self, table: BillTable) -> None:
        if "labels_key" in table.columns or "credits_amount" in table.columns:
            raise Failure(
                f"{table.path} has `labels` or `credits` in columns of their own, so it repeats a row for each of them "
                "and would be counted several times; export them as JSON, as the query in docs/bill.md does"
            )
        self._select = select = Selection(table.path, table.columns, REQUIRED, OPTIONAL)
        self.places: Sequence[int] = select.places
        self._currency, self._labels = select.flat(CURRENCY), select.flat(LABELS)
        self._start, self._end = select.flat(START), select.flat(END)

    def account(self, row: Row) -> str:
        return self._select.get(row, PROJECT)

    def currency(self, row: Row) -> str:
        return row[self._currency] or ""

    def span(self, row: Row) -> tuple[str, str]:
        return row[self._start] or "", row[self._end] or ""

    def resources(self, row: Row) -> tuple[str, ...]:
        names = (last_part(self._select.get(row, field)) for field in (NAME, GLOBAL_NAME))
        return tuple(dict.fromkeys(name for name in names if name))

    def may_have_labels(self, row: Row) -> bool:
        return "spotrl" in (row[self._labels] or "")

    def read(self, row: Row) -> BillRow:
        get = self._select.get
        rate = self._rate(row)
        cost = decimal_of(get(row, COST), COST)
        amount, kind = decimal_of(get(row, AMOUNT), AMOUNT), self._kind(row)
        is_gpu = kind is BillKind.INSTANCE and "GPU" in get(row, SKU) and get(row, UNIT) == "seconds"
        gpu_hours = float(amount) / 3600 if is_gpu else None
        charges = [BillCharge(kind=kind, pico_usd=pico_usd_of(cost / rate, COST), gpu_hours=gpu_hours)]
        credits = nested(get(row, CREDITS), CREDITS) or []
        for credit in credits:
            if not isinstance(credit, dict):
                raise BadValue(f"{CREDITS} is no list of objects: {get(row, CREDITS)[:60]!r}")
            money = decimal_of(str(credit.get("amount") or 0), f"{CREDITS}.amount")
            kind = BillKind.CREDIT if credit.get("type") in CREDITS_OF_MONEY else BillKind.DISCOUNT
            charges.append(BillCharge(kind=kind, pico_usd=pico_usd_of(money / rate, CREDITS)))
        month = get(row, MONTH)
        if len(month) != 6 or not month.isdecimal():
            raise BadValue(f"{MONTH} is not like 202611: {month[:20]!r}")
        start_ms, end_ms = time_ms_of(get(row, START), START), time_ms_of(get(row, END), END)
        facts = [get(row, field) for field in (MARK, MONTH, COST_TYPE, SKU_ID, PROJECT, NAME, GLOBAL_NAME, CURRENCY)]
        facts += [str(moment) for moment in (start_ms, end_ms, time_ms_of(get(row, EXPORTED), EXPORTED))]
        facts += [_plain(cost), _plain(amount)]
        facts += [f"{charge.kind} {charge.pico_usd}" for charge in charges[1:]]
        labels = our_labels(nested(get(row, LABELS), LABELS))
        return BillRow(
            cloud=self.cloud,
            payer=get(row, MARK),
            month=f"{month[:4]}-{month[4:]}",
            account=self.account(row),
            resources=self.resources(row),
            labels=labels,
            start_ms=start_ms,
            end_ms=end_ms,
            charges=tuple(charges),
            identity=digest("gcp", *facts, *(f"{key}={labels[key]}" for key in sorted(labels))),
        )

    def _rate(self, row: Row) -> Decimal:
        """Return what a dollar costs in the row's currency: the bill's own rate."""
        if self.currency(row) == "USD":
            return Decimal(1)
        rate = decimal_of(self._select.get(row, RATE), RATE)
        if rate <= 0:
            raise Failure(
                f"a row about {next(iter(self.resources(row)), 'our run')} is in {self.currency(row) or 'no currency'} "
                f"and has no {RATE}; export that column too (nothing was imported)"
            )
        return rate

    def _kind(self, row: Row) -> BillKind:
        get = self._select.get
        if (cost_type := get(row, COST_TYPE)) in COST_KINDS:
            return COST_KINDS[cost_type]
        sku = get(row, SKU)
        for kind, parts in SKU_KINDS:
            if any(part in sku for part in parts):
                return kind
        collection: Any = get(row, GLOBAL_NAME).split("/")[-2:-1]
        return RESOURCE_KINDS.get(collection[0] if collection else "", BillKind.OTHER)


def _plain(number: Decimal) -> str:
    """Return a number as text: equal for the floating-point number of a parquet file and its text in a CSV file."""
    return repr(float(number))
