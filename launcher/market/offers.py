"""What can be bought: offers read from dated price tables, and how old their prices are.

A table is believed as its manifest describes it: schema, currency, digest, rows. A row that could mislead a budget (a
price of zero, below zero or not a number) makes the table unreadable; a price that only looks wrong keeps its verdict
(launcher/market/quality.py) and is not bought. Sources and dates: catalogs/README.md.
"""

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from engine.events import Market
from launcher.exit_codes import ExitCode, Failure
from launcher.market.prices import CURRENCY, time_ms
from launcher.market.quality import Quality
from launcher.money import HOUR_MS, MICRO, duration, hourly

CLOUDS = ("aws", "gcp")
TABLES = tuple(f"{cloud}_{market.value}" for cloud in CLOUDS for market in (Market.ON_DEMAND, Market.SPOT))
"""One table for each cloud and price model."""

MANIFEST = "manifest.json"
SCHEMA = 1

COLUMNS = (
    *("cloud", "region", "zone", "zone_id", "instance_type", "accelerator", "gpus", "gpu_mem_gib", "market"),
    *("usd_per_hour", "source", "source_id", "observed_at", "quality", "note"),
)

DAY_MS = 24 * HOUR_MS
WARN_MS = {Market.ON_DEMAND: 7 * DAY_MS, Market.SPOT: 6 * HOUR_MS}
REFUSE_MS = {Market.ON_DEMAND: 30 * DAY_MS, Market.SPOT: 24 * HOUR_MS}
"""Ages of a price (research notes cost 2). AWS may change a spot price at any time, GCP daily; lists rarely move."""

SKEW_MS = HOUR_MS
"""A price from further in the future than this has a wrong date, or we have a wrong clock."""


class CatalogError(Failure):
    """A price table that must not be believed, or is too old to buy by."""

    exit_code = ExitCode.STALE_CATALOG


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One thing a cloud will sell us, at one price, for the whole instance. `zone` is empty where any zone will do."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    accelerator: str
    gpus: int
    market: Market
    micro_usd_per_hour: int
    source: str
    observed_at: str
    """When the price was seen, as ISO 8601; other words say what is known instead, and count as no date."""
    zone_id: str = ""
    """AWS: the zone by the name that all accounts share (`use1-az4`)."""
    gpu_mem_gib: int = 0
    """Of one GPU; 0 where nobody said."""
    source_id: str = ""
    """What the source calls it: a SKU, an offer term."""
    quality: Quality = Quality.OK
    note: str = ""
    """For people: how the figure was put together, what is not known of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What the manifest says of one table."""

    file: str
    fetched_at: str
    """When we read it, ISO 8601. What a price is dated by stands in its row."""
    sha256: str
    rows: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """Every table of one folder, checked against its manifest."""

    place: str
    """For people: `shipped with spotrl`, or the folder."""
    offers: Mapping[str, tuple[Offer, ...]]
    """By table, `aws_spot`."""
    tables: Mapping[str, Table]

    def all_offers(self) -> tuple[Offer, ...]:
        return tuple(offer for name in TABLES for offer in self.offers.get(name, ()))


@cache
def shipped_catalog() -> Catalog:
    """The tables that ship with spotrl. Raises CatalogError."""
    return read_folder(files("catalogs"), "shipped with spotrl")


@cache
def read_catalog() -> tuple[Offer, ...]:
    """Every offer of the tables that ship with spotrl; the local infra is priced by them. Raises CatalogError."""
    return shipped_catalog().all_offers()


def current_catalog(folder: Path) -> Catalog:
    """What was refreshed into `folder`, and the shipped table where nothing was. Raises CatalogError."""
    shipped = shipped_catalog()
    if not (folder / MANIFEST).exists():
        return shipped
    own = read_folder(folder)
    return Catalog(
        place=own.place if own.tables.keys() >= shipped.tables.keys() else f"{own.place}, else {shipped.place}",
        offers={**shipped.offers, **own.offers},
        tables={**shipped.tables, **own.tables},
    )


def read_folder(folder: Traversable, place: str = "", *, sealed: bool = True) -> Catalog:
    """The tables that the folder's manifest names. Raises CatalogError for one that is not as the manifest says.

    `sealed=False`: a person is correcting the tables, and their digests are not up to date yet.
    """
    tables = parse_manifest(_text(folder, MANIFEST))
    offers = {}
    for name, table in tables.items():
        text = _text(folder, table.file)
        if sealed and sha256(text) != table.sha256:
            raise CatalogError(
                f"{folder}/{table.file} is not the table that its manifest describes (another sha256); look at what "
                f"changed, then `spotrl catalog validate {folder} --seal`"
            )
        offers[name] = parse_offers(text.splitlines(), table.file)
        if sealed and len(offers[name]) != table.rows:
            raise CatalogError(f"{folder}/{table.file} has {len(offers[name])} rows; its manifest says {table.rows}")
        _check_belongs(name, offers[name], table.file)
    return Catalog(place=place or str(folder), offers=offers, tables=tables)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def parse_manifest(text: str) -> dict[str, Table]:
    """Tables by name. Raises CatalogError for another schema or currency, or a table that is none of ours."""
    try:
        raw: dict[str, Any] = json.loads(text)
        schema, currency, tables = raw["schema"], raw["currency"], raw["tables"]
        found = {name: Table(**table) for name, table in tables.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CatalogError(f"{MANIFEST} cannot be read ({error}); `spotrl catalog refresh` writes it anew") from None
    if schema != SCHEMA:
        raise CatalogError(f"{MANIFEST} has schema {schema}; this spotrl reads {SCHEMA}: refresh with this version")
    if currency != CURRENCY:
        raise CatalogError(
            f"{MANIFEST} is in {currency}; prices are compared in {CURRENCY}, so convert or refresh them"
        )
    if unknown := found.keys() - set(TABLES):
        raise CatalogError(f"{MANIFEST} names {', '.join(sorted(unknown))}; tables are {', '.join(TABLES)}")
    return found


def _text(folder: Traversable, name: str) -> str:
    try:
        return (folder / name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(
            f"{folder}/{name} cannot be read ({error}); `spotrl catalog refresh` writes it anew"
        ) from None


# --- rows --------------------------------------------------------------------------------------------


def parse_offers(lines: Iterable[str], table: str) -> tuple[Offer, ...]:
    """The offers of one CSV table, header first. Raises CatalogError with the line."""
    reader = csv.DictReader(lines, restval="")
    _check_header(reader.fieldnames or (), table)
    offers: list[Offer] = []
    seen: dict[tuple[str, ...], int] = {}
    for number, row in enumerate(reader, start=2):
        try:
            offer = _offer(row)
            if (first := seen.setdefault(key(offer), number)) != number:
                raise ValueError(f"the same offer as line {first}")
        except (KeyError, TypeError, ValueError) as error:
            raise CatalogError(f"{table}, line {number}: {error}; correct the row or leave it out") from None
        offers.append(offer)
    return tuple(offers)


def key(offer: Offer) -> tuple[str, ...]:
    """What makes two rows the same offer, whatever they cost. An AWS zone has one id, and a name in each account."""
    return (offer.cloud, offer.region, offer.zone_id or offer.zone, offer.instance_type, offer.market.value)


def _check_header(header: Iterable[str], table: str) -> None:
    missing, extra = [name for name in COLUMNS if name not in header], [name for name in header if name not in COLUMNS]
    if missing or extra:
        lacks = f"lacks {', '.join(missing)}" if missing else ""
        has = f"has {', '.join(extra)}" if extra else ""
        raise CatalogError(
            f"{table} {' and '.join(filter(None, (lacks, has)))}; the columns are {','.join(COLUMNS)}, and prices are "
            f"in {CURRENCY} an hour for the whole instance"
        )


def _check_belongs(name: str, offers: Iterable[Offer], file: str) -> None:
    for offer in offers:
        if f"{offer.cloud}_{offer.market.value}" != name:
            raise CatalogError(f"{file} has a row of {offer.cloud} {offer.market.value}; it belongs into another table")


def _offer(row: dict[str, str]) -> Offer:
    return Offer(
        cloud=_word(row, "cloud"),
        region=_word(row, "region"),
        zone=row["zone"].strip(),
        instance_type=_word(row, "instance_type"),
        accelerator=_word(row, "accelerator"),
        gpus=_at_least_one(row, "gpus"),
        market=Market(row["market"]),
        micro_usd_per_hour=price_of(row["usd_per_hour"]),
        source=_word(row, "source"),
        observed_at=_word(row, "observed_at"),
        zone_id=row["zone_id"].strip(),
        gpu_mem_gib=int(row["gpu_mem_gib"] or 0),
        source_id=row["source_id"].strip(),
        quality=Quality(row["quality"]),
        note=row["note"].strip(),
    )


def _word(row: dict[str, str], column: str) -> str:
    word = row[column].strip()
    if not word:
        raise ValueError(f"{column} is empty")
    return word


def _at_least_one(row: dict[str, str], column: str) -> int:
    count = int(row[column])
    if count < 1:
        raise ValueError(f"{column} is {count}")
    return count


def price_of(text: str) -> int:
    """Dollars -> micro-dollars. Raises ValueError for what is no price: 0, below 0, nan, finer than a micro-dollar."""
    try:
        micro_usd = Decimal(text) * MICRO
    except InvalidOperation:
        raise ValueError(f"usd_per_hour is {text!r}, which is no number") from None
    if not micro_usd.is_finite() or micro_usd <= 0 or micro_usd != micro_usd.to_integral_value():
        raise ValueError(f"usd_per_hour is {text!r}; a price is finite, above zero, and in whole micro-dollars")
    return int(micro_usd)


def as_row(offer: Offer) -> dict[str, str]:
    """What `parse_offers` reads back as the same offer."""
    row = {field.name: str(getattr(offer, field.name)) for field in fields(offer)}
    whole, _, decimals = f"{(Decimal(offer.micro_usd_per_hour) / MICRO).normalize():f}".partition(".")
    # At least two decimals, as people write dollars; and every one there is.
    row |= {"usd_per_hour": f"{whole}.{decimals:0<2}", "gpu_mem_gib": str(offer.gpu_mem_gib or "")}
    return {name: row[name] for name in COLUMNS}


# --- what somebody could buy -------------------------------------------------------------------------

_AWS_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")


def buyable(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """Offers whose place a cloud would understand; an AWS zone that has no name here goes by its id.

    The shipped tables also price the local infra, by zones called `us-east-1-cheapest` and a region called `us`.
    """
    found = []
    for offer in offers:
        if offer.cloud != "aws":
            found.append(offer)
        elif _AWS_REGION.fullmatch(offer.region) and (offer.zone_id or offer.market is Market.ON_DEMAND):
            has_name = not offer.zone or re.fullmatch(rf"{offer.region}(-[a-z]+-\d)?[a-z]", offer.zone)
            found.append(offer if has_name else replace(offer, zone=offer.zone_id))
    return tuple(found)


# --- age ---------------------------------------------------------------------------------------------


class Age(StrEnum):
    """How a price's age counts."""

    FRESH = "fresh"
    OLD = "old"
    """Bought by, with a warning."""
    EXPIRED = "expired"
    """Not bought by."""
    UNKNOWN = "unknown"
    """No date, or one in the future: as bad as expired."""


TOO_OLD = frozenset({Age.EXPIRED, Age.UNKNOWN})


def age_of(observed_at: str, market: Market, now_ms: int) -> Age:
    """A spot price warns after 6 h and expires after 24 h, an on-demand price after 7 and 30 days."""
    at_ms = time_ms(observed_at)
    if at_ms is None or at_ms > now_ms + SKEW_MS:
        return Age.UNKNOWN
    if now_ms - at_ms > REFUSE_MS[market]:
        return Age.EXPIRED
    return Age.OLD if now_ms - at_ms > WARN_MS[market] else Age.FRESH


def age_text(observed_at: str, now_ms: int) -> str:
    """`3h 20m old`, or what is known instead of a date."""
    at_ms = time_ms(observed_at)
    if at_ms is None:
        return f"date unknown ({observed_at})"
    if at_ms > now_ms + SKEW_MS:
        return f"dated in the future ({observed_at})"
    return f"{duration(max(0, now_ms - at_ms))} old"


def without_expired(offers: Iterable[Offer], now_ms: int) -> tuple[Offer, ...]:
    """Of each table that has prices to buy by, only those; of the others everything, for a plan that nobody can buy.

    Else a price that nobody repeats any more could win over those that hold.
    """
    offers = tuple(offers)
    bought_by = [offer for offer in offers if age_of(offer.observed_at, offer.market, now_ms) not in TOO_OLD]
    fresh = {(offer.cloud, offer.market) for offer in bought_by}
    return (*bought_by, *(offer for offer in offers if (offer.cloud, offer.market) not in fresh))


def refuse_stale(offers: Iterable[Offer], now_ms: int) -> None:
    """Before anything is bought by these prices. Raises CatalogError naming the first that is too old."""
    for offer in offers:
        if age_of(offer.observed_at, offer.market, now_ms) in TOO_OLD:
            raise CatalogError(
                f"the {offer.market.value} price of {offer.cloud} {offer.instance_type} in "
                f"{offer.zone or offer.region} ({hourly(offer.micro_usd_per_hour)}, {offer.source}) is "
                f"{age_text(offer.observed_at, now_ms)}; nothing is bought by a {offer.market.value} price older than "
                f"{duration(REFUSE_MS[offer.market])}: `spotrl catalog refresh`"
            )
