"""Rows of an AWS Cost and Usage Report: CUR 2.0 of Data Exports, hourly, with resource ids. A legacy CUR reads alike.

The amounts are unblended costs, whose sum over all kinds of lines is the invoice. A row's identity is AWS's line id
with the facts of the row: AWS gives new ids whenever it writes the month again, which importing.py sees by the cells.
"""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from launcher.bill.rows import (
    BillCharge,
    BillRow,
    Selection,
    decimal_of,
    digest,
    label_of,
    last_part,
    nested,
    our_labels,
    pico_usd_of,
    time_ms_of,
)
from launcher.bill.table import BillTable, Row
from launcher.exit_codes import Failure
from launcher.ledger.bills import BillKind
from launcher.market.prices import iso

MARK = "line_item_line_item_type"
"""A column that only this format has."""

RESOURCE, COST, CURRENCY = "line_item_resource_id", "line_item_unblended_cost", "line_item_currency_code"
START, END, ACCOUNT = "line_item_usage_start_date", "line_item_usage_end_date", "line_item_usage_account_id"
PAYER, PERIOD, LINE_ID = "bill_payer_account_id", "bill_billing_period_start_date", "identity_line_item_id"
USAGE_TYPE, AMOUNT, UNIT = "line_item_usage_type", "line_item_usage_amount", "pricing_unit"
OPERATION, TAX_TYPE = "line_item_operation", "line_item_tax_type"

REQUIRED = (
    *(MARK, RESOURCE, COST, CURRENCY, START, END, ACCOUNT, PAYER, PERIOD, LINE_ID, USAGE_TYPE),
    *(AMOUNT, OPERATION, TAX_TYPE),
)
OPTIONAL = (UNIT,)

TAG_MAPS = ("resource_tags", "tags")

LINE_KINDS = {
    "Tax": BillKind.TAX,
    "Credit": BillKind.CREDIT,
    "Refund": BillKind.REFUND,
    "SavingsPlanNegation": BillKind.DISCOUNT,
}
"""Kinds by `line_item_line_item_type`. Types that end in `Discount` are discounts."""

USAGE_KINDS = (
    (BillKind.INSTANCE, ("BoxUsage", "SpotUsage", "DedicatedUsage", "HostBoxUsage")),
    (BillKind.DISK, ("EBS:Volume", "EBS:SnapshotUsage", "EBS:Throughput", "EBS:IOPS")),
    (BillKind.ADDRESS, ("PublicIPv4", "ElasticIP")),
    (BillKind.TRAFFIC, ("DataTransfer", "-Bytes", "NatGateway", "VpcEndpoint")),
)
"""Kinds by a part of `line_item_usage_type`, which begins with the region: `USW2-SpotUsage:g6.xlarge`."""


class AwsBill:
    """The columns of one file."""

    cloud = "aws"

    def __init__(self, table: BillTable) -> None:
        self._select = select = Selection(table.path, table.columns, REQUIRED, OPTIONAL)
        tags = [
            place for place, name in enumerate(table.columns) if name in TAG_MAPS or ("tag" in name and label_of(name))
        ]
        self._tags = tuple(zip(select.add(tags), (table.columns[place] for place in tags), strict=True))
        self.places: Sequence[int] = select.places
        self._account, self._currency = select.flat(ACCOUNT), select.flat(CURRENCY)
        self._start, self._end, self._resource = select.flat(START), select.flat(END), select.flat(RESOURCE)

    def account(self, row: Row) -> str:
        return row[self._account] or ""

    def currency(self, row: Row) -> str:
        return row[self._currency] or ""

    def span(self, row: Row) -> tuple[str, str]:
        return row[self._start] or "", row[self._end] or ""

    def resources(self, row: Row) -> tuple[str, ...]:
        name = row[self._resource]
        return (last_part(name),) if name else ()

    def may_have_labels(self, row: Row) -> bool:
        for place, name in self._tags:
            text = row[place]
            if text and (name not in TAG_MAPS or "spotrl" in text):
                return True
        return False

    def read(self, row: Row) -> BillRow:
        get = self._select.get
        line_type, usage_type = get(row, MARK), get(row, USAGE_TYPE)
        if self.currency(row) not in ("USD", ""):
            raise Failure(
                f"a row about {get(row, RESOURCE) or 'our run'} is in {self.currency(row)}, and the bill has no "
                "rate to dollars; import an export in dollars (nothing was imported)"
            )
        kind = _kind(line_type, usage_type)
        cost = decimal_of(get(row, COST), COST)
        start_ms, end_ms = time_ms_of(get(row, START), START), time_ms_of(get(row, END), END)
        payer, account, month = get(row, PAYER), self.account(row), iso(time_ms_of(get(row, PERIOD), PERIOD))[:7]
        cell = [payer, month, account, line_type, usage_type, get(row, OPERATION), get(row, RESOURCE)]
        cell += [get(row, TAX_TYPE), str(start_ms), str(end_ms)]
        amount = decimal_of(get(row, AMOUNT), AMOUNT)
        is_hours = kind is BillKind.INSTANCE and get(row, UNIT).lower() in ("hrs", "hours", "hour", "")
        return BillRow(
            cloud=self.cloud,
            payer=payer,
            month=month,
            account=account,
            resources=self.resources(row),
            labels=self._labels(row),
            start_ms=start_ms,
            end_ms=end_ms,
            charges=(
                BillCharge(
                    kind=kind,
                    pico_usd=pico_usd_of(cost, COST),
                    hours=float(amount) if is_hours else None,
                ),
            ),
            identity=digest("aws", *cell, get(row, LINE_ID), _plain(cost), _plain(amount)),
            cell=digest("aws", *cell),
        )

    def _labels(self, row: Row) -> dict[str, str]:
        labels: dict[str, str] = {}
        for place, name in self._tags:
            text: Any = row[place]
            if text:
                labels |= our_labels(nested(text, name)) if name in TAG_MAPS else {label_of(name): text}
        return labels


def _kind(line_type: str, usage_type: str) -> BillKind:
    if line_type in LINE_KINDS or line_type.endswith("Discount"):
        return LINE_KINDS.get(line_type, BillKind.DISCOUNT)
    return next((kind for kind, parts in USAGE_KINDS if any(part in usage_type for part in parts)), BillKind.OTHER)


def _plain(number: Decimal) -> str:
    """Return a number as text, equal for `0.50` of a CSV file and `0.5` of a parquet file."""
    return f"{number.normalize():f}"
