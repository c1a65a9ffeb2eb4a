"""One row of a cloud's bill as a value, and how its columns are found and read.

Both clouds write the same facts in other columns (aws.py, gcp.py). Columns may be flat (`resource.name`,
`resource_name`) or nested (`resource`, as JSON). Only a row that may concern us is read further than its account,
currency and labels.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from launcher.bill.table import Row, plain_name
from launcher.clouds.base import NODE_LABEL, OWNER_LABEL, RUN_LABEL
from launcher.exit_codes import Failure
from launcher.ledger.bills import PICO, BillKind

LABELS = {plain_name(label): label for label in (RUN_LABEL, NODE_LABEL, OWNER_LABEL)}
"""Our labels by the last part of a column's or a key's name, as `plain_name` writes it."""


class BadValue(ValueError):
    """A value of a row that cannot be read. The message names the column and the value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BillCharge:
    """One amount of a row. A row of Google Cloud has one for its cost and one for each credit.

    `hours`: of the instance; `gpu_hours`: of its GPUs together. None: the row does not say.
    """

    kind: BillKind
    pico_usd: int
    hours: float | None = None
    gpu_hours: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BillRow:
    """One row. `labels`: ours, by their name. `identity`, `cell`, `payer`, `month`: as in `BillLine`.

    `resources`: the names of what was used, without their folders; the first is the one to show.
    """

    cloud: str
    payer: str
    month: str
    account: str
    resources: tuple[str, ...]
    labels: Mapping[str, str]
    start_ms: int
    end_ms: int
    charges: tuple[BillCharge, ...]
    identity: str
    cell: str = ""


class BillFormat(Protocol):
    """The columns of one cloud's bill in one file.

    `places`: the file's columns to read; the methods take rows of these.
    """

    cloud: str
    places: Sequence[int]

    def account(self, row: Row) -> str: ...
    def currency(self, row: Row) -> str: ...
    def span(self, row: Row) -> tuple[str, str]:
        """Return the start and the end of the usage as the file writes them."""

    def resources(self, row: Row) -> tuple[str, ...]: ...
    def may_have_labels(self, row: Row) -> bool:
        """Return False if the row has none of our labels for sure."""

    def read(self, row: Row) -> BillRow:
        """Return the whole row. Raises BadValue, and Failure for money that cannot be told in dollars."""


class Selection:
    """The wanted columns of one file. `places`: columns to read; `get`: a value of a row of these columns."""

    def __init__(self, path: Path, columns: Sequence[str], required: Sequence[str], optional: Sequence[str]) -> None:
        found: dict[str, tuple[int, str]] = {}
        for field in (*required, *optional):
            parent, _, key = field.partition(".")
            if plain_name(field) in columns:
                found[field] = (columns.index(plain_name(field)), "")
            elif key and parent in columns:
                found[field] = (columns.index(parent), key)
        missing = [field for field in required if field not in found]
        if missing:
            raise Failure(
                f"{path} lacks {'the column' if len(missing) == 1 else 'the columns'} {', '.join(missing)}; "
                "docs/bill.md says which export has all of them"
            )
        self.places = tuple(sorted({place for place, _ in found.values()}))
        self._where = {field: (self.places.index(place), key) for field, (place, key) in found.items()}

    def add(self, places: Sequence[int]) -> tuple[int, ...]:
        """Read further columns of the file. Return their places in a row."""
        old = self.places
        self.places = tuple(sorted({*old, *places}))
        moved = {number: self.places.index(place) for number, place in enumerate(old)}
        self._where = {field: (moved[number], key) for field, (number, key) in self._where.items()}
        return tuple(self.places.index(place) for place in places)

    def flat(self, field: str) -> int:
        """Return the place of a column in a row. It is not a part of another column."""
        place, key = self._where[field]
        assert not key, field
        return place

    def get(self, row: Row, field: str) -> str:
        """Return a value as text, empty if the row has none."""
        where = self._where.get(field)
        if where is None:
            return ""
        value = row[where[0]] or ""
        if not where[1]:
            return value
        inner = nested(value, field)
        text = inner.get(where[1]) if isinstance(inner, dict) else None
        return "" if text is None else str(text)


@lru_cache(maxsize=8192)
def nested(text: str, column: str) -> Any:
    """Return a nested value, not to be changed. Raises BadValue. Rows repeat accounts and resources, so it is kept."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise BadValue(f"{column} is no JSON: {text[:60]!r}") from None


def our_labels(value: Any) -> dict[str, str]:
    """Return our labels in a map, in a list of pairs, or in a list of objects with `key` and `value`."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                pairs.append((item.get("key"), item.get("value")))
            elif isinstance(item, list) and len(item) == 2:
                pairs.append((item[0], item[1]))
    found = {label_of(plain_name(str(key))): str(text) for key, text in pairs if key and text}
    return {label: text for label, text in found.items() if label}


def label_of(name: str) -> str:
    """Return our label that a plain name of a column or a key ends with, or an empty text."""
    return next((label for plain, label in LABELS.items() if name == plain or name.endswith(f"_{plain}")), "")


def decimal_of(text: str, column: str) -> Decimal:
    """Return a number of a bill exactly; an empty value is 0. Raises BadValue."""
    try:
        value = Decimal(text or "0")
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite():
        raise BadValue(f"{column} is no number: {text[:40]!r}")
    return value


def pico_usd_of(usd: Decimal, column: str) -> int:
    """Return dollars in pico-dollars, rounded once; a half goes to the even number. Raises BadValue."""
    if abs(usd) >= 10**6:
        raise BadValue(f"{column} is {usd:.2f} dollars for one row; at most a million are read")
    return round(usd * PICO)


def time_ms_of(text: str, column: str) -> int:
    """Return a time (UTC without a zone) in milliseconds since 1970. Raises BadValue."""
    if text.isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text.removesuffix(" UTC"))
    except ValueError:
        raise BadValue(f"{column} is no time: {text[:40]!r}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def last_part(name: str) -> str:
    """Return the last part of a resource's name: `i-0abc` of an ARN, the VM's name of a path."""
    return name.rpartition("/")[2]


def digest(*parts: str) -> str:
    """Return a name for these facts, which is equal for equal facts alone."""
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()
