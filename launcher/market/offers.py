"""Read offers from dated price tables, and judge the age of the prices.

A table must match its manifest: schema, currency, digest, number of rows. A row that could mislead a budget (a price of
zero, below zero or not a number) makes the table unreadable. A price that only looks wrong keeps its verdict
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
"""Table names: one table for each cloud and capacity type."""

MANIFEST = "manifest.json"
SCHEMA = 1

COLUMNS = (
    *("cloud", "region", "zone", "zone_id", "instance_type", "accelerator", "gpus", "gpu_mem_gib", "market"),
    *("usd_per_hour", "source", "source_id", "observed_at", "quality", "note"),
)

DAY_MS = 24 * HOUR_MS
WARN_MS = {Market.ON_DEMAND: 7 * DAY_MS, Market.SPOT: 6 * HOUR_MS}
REFUSE_MS = {Market.ON_DEMAND: 30 * DAY_MS, Market.SPOT: 24 * HOUR_MS}
"""Age in milliseconds at which a price warns (`WARN_MS`) or is refused (`REFUSE_MS`). Assumed: AWS may change a
spot price at any time, GCP daily; on-demand lists rarely change."""

SKEW_MS = HOUR_MS
"""Tolerance for prices dated in the future, in milliseconds. A price beyond the tolerance has a wrong date, or the
clock of this machine is wrong."""


class CatalogError(Failure):
    """A price table that cannot be trusted, or is too old for a purchase."""

    exit_code = ExitCode.STALE_CATALOG


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """An instance type in a zone at a price, for the whole instance.

    `zone` is empty if any zone of the region will do.
    """

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
    """Time of the price as ISO 8601. Any other text describes the price instead, and counts as no date."""
    zone_id: str = ""
    """AWS: the zone's id, equal in all accounts (`use1-az4`)."""
    gpu_mem_gib: int = 0
    """Memory of one GPU in GiB; 0 if unknown."""
    source_id: str = ""
    """Name of the price at its source: a SKU, an offer term."""
    quality: Quality = Quality.OK
    note: str = ""
    """For people: the calculation of the figure, and its unknown parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Entry of a table in the manifest."""

    file: str
    fetched_at: str
    """Time of the download, ISO 8601. The date of a price is in its row."""
    sha256: str
    rows: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """All tables of one folder, checked against the manifest."""

    place: str
    """For people: `shipped with spotrl`, or the folder."""
    offers: Mapping[str, tuple[Offer, ...]]
    """Offers by table name, such as `aws_spot`."""
    tables: Mapping[str, Table]

    def all_offers(self) -> tuple[Offer, ...]:
        return tuple(offer for name in TABLES for offer in self.offers.get(name, ()))


class Prices(StrEnum):
    """Which of the shipped prices count. A table that was refreshed has one set of prices."""

    NEWEST = "newest"
    """The newest price that was published with its date, else the recorded one."""
    RECORDED = "recorded"
    """Prices of the time of the recorded markets (October 2025 to 2026), for replays of those markets."""


NEWER = "newest"
"""Folder of the shipped tables with the prices that were published later, and with later instance types."""


@cache
def shipped_catalog(prices: Prices = Prices.RECORDED) -> Catalog:
    """Return the tables that ship with spotrl. Raises CatalogError."""
    recorded = read_folder(files("catalogs"), "shipped with spotrl")
    if prices is Prices.RECORDED:
        return recorded
    newer = read_folder(files("catalogs") / NEWER)
    return Catalog(
        place=recorded.place,
        offers={name: _with_newer(offers, newer.offers.get(name, ())) for name, offers in recorded.offers.items()},
        tables={**recorded.tables, **{f"{NEWER}/{name}": table for name, table in newer.tables.items()}},
    )


def _with_newer(recorded: tuple[Offer, ...], newer: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """Return the rows of both. A newer price of an instance type in a region replaces all recorded ones there."""

    def product(offer: Offer) -> tuple[str, str]:
        return offer.region, offer.instance_type

    replaced = {product(offer) for offer in newer}
    return (*(offer for offer in recorded if product(offer) not in replaced), *newer)


@cache
def read_catalog() -> tuple[Offer, ...]:
    """Return every recorded offer that ships with spotrl; prices of the local infra. Raises CatalogError."""
    return shipped_catalog().all_offers()


def current_catalog(folder: Path, prices: Prices = Prices.NEWEST) -> Catalog:
    """Return the tables refreshed into `folder`, and the shipped table for each table not refreshed.

    Raises CatalogError.
    """
    shipped = shipped_catalog(prices)
    if not (folder / MANIFEST).exists():
        return shipped
    own = read_folder(folder)
    return Catalog(
        place=own.place if own.tables.keys() >= set(TABLES) else f"{own.place}, else {shipped.place}",
        offers={**shipped.offers, **own.offers},
        tables={**shipped.tables, **own.tables},
    )


def read_folder(folder: Traversable, place: str = "", *, sealed: bool = True) -> Catalog:
    """Return the tables named in the folder's manifest.

    Raises CatalogError for a table that differs from the manifest.

    `sealed=False`: a person is correcting the tables, and the digests are not up to date yet.
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
    """Return the tables by name. Raises CatalogError for a foreign schema or currency, or for an unknown table."""
    try:
        raw: dict[str, Any] = json.loads(text)
        schema, currency, tables = raw["schema"], raw["currency"], raw["tables"]
        parsed = {name: Table(**table) for name, table in tables.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CatalogError(f"{MANIFEST} cannot be read ({error}); `spotrl catalog refresh` writes it anew") from None
    if schema != SCHEMA:
        raise CatalogError(f"{MANIFEST} has schema {schema}; this spotrl reads {SCHEMA}: refresh with this version")
    if currency != CURRENCY:
        raise CatalogError(
            f"{MANIFEST} is in {currency}; prices are compared in {CURRENCY}, so convert or refresh them"
        )
    if unknown := parsed.keys() - set(TABLES):
        raise CatalogError(f"{MANIFEST} names {', '.join(sorted(unknown))}; tables are {', '.join(TABLES)}")
    return parsed


def _text(folder: Traversable, name: str) -> str:
    try:
        return (folder / name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(
            f"{folder}/{name} cannot be read ({error}); `spotrl catalog refresh` writes it anew"
        ) from None


# --- rows --------------------------------------------------------------------------------------------


def parse_offers(lines: Iterable[str], table: str) -> tuple[Offer, ...]:
    """Return the offers of one CSV table, header first. Raises CatalogError with the line."""
    reader = csv.DictReader(lines, restval="")
    _check_header(reader.fieldnames or (), table)
    offers: list[Offer] = []
    line_of: dict[tuple[str, ...], int] = {}
    for number, row in enumerate(reader, start=2):
        try:
            offer = _offer(row)
            if (first := line_of.setdefault(key(offer), number)) != number:
                raise ValueError(f"the same offer as line {first}")
        except (KeyError, TypeError, ValueError) as error:
            raise CatalogError(f"{table}, line {number}: {error}; correct the row or leave it out") from None
        offers.append(offer)
    return tuple(offers)


def key(offer: Offer) -> tuple[str, ...]:
    """Return the identity of an offer, without the price.

    An AWS zone has a single id, but a different name in each account.
    """
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
    """Convert dollars to micro-dollars.

    Raises ValueError for 0, below 0, nan, or a price finer than a micro-dollar.
    """
    try:
        micro_usd = Decimal(text) * MICRO
    except InvalidOperation:
        raise ValueError(f"usd_per_hour is {text!r}, which is no number") from None
    if not micro_usd.is_finite() or micro_usd <= 0 or micro_usd != micro_usd.to_integral_value():
        raise ValueError(f"usd_per_hour is {text!r}; a price is finite, above zero, and in whole micro-dollars")
    return int(micro_usd)


def as_row(offer: Offer) -> dict[str, str]:
    """Format an offer as a CSV row. `parse_offers` reads the row back as the same offer."""
    row = {field.name: str(getattr(offer, field.name)) for field in fields(offer)}
    whole, _, decimals = f"{(Decimal(offer.micro_usd_per_hour) / MICRO).normalize():f}".partition(".")
    # At least two decimals, as people write dollars, and no rounding.
    row |= {"usd_per_hour": f"{whole}.{decimals:0<2}", "gpu_mem_gib": str(offer.gpu_mem_gib or "")}
    return {name: row[name] for name in COLUMNS}


# --- buyable offers ----------------------------------------------------------------------------------

_AWS_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")

_AWS_EDGE_ID = re.compile(r"[a-z]+\d+-[a-z]+\d+-.+")
"""Ids of Local Zones (usw2-lax1-az1) and Wavelength Zones (use1-wl1-bos-wlz1). A zone of a region is use1-az1."""


def is_at_the_edge(offer: Offer) -> bool:
    """Return whether the offer is in a Local Zone or a Wavelength Zone of AWS.

    An account has none of them unless it asked for them, and SkyPilot launches nothing there.
    """
    if offer.cloud != "aws":
        return False
    is_named = re.match(rf"{re.escape(offer.region)}-[a-z]+-?\d", offer.zone) is not None
    return is_named or _AWS_EDGE_ID.fullmatch(offer.zone_id) is not None


def buyable(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """Return the offers without the AWS offers whose region or zone does not exist on AWS.

    The shipped tables hold such offers for the local infra: zones like `us-east-1-cheapest`, and a region `us`. An AWS
    spot offer also needs a zone id. If an AWS zone has no valid name, the zone id replaces the name. Local Zones and
    Wavelength Zones are left out.
    """
    kept = []
    for offer in offers:
        if offer.cloud != "aws":
            kept.append(offer)
        elif is_at_the_edge(offer):
            continue
        elif _AWS_REGION.fullmatch(offer.region) and (offer.zone_id or offer.market is Market.ON_DEMAND):
            has_name = not offer.zone or re.fullmatch(rf"{offer.region}[a-z]", offer.zone)
            kept.append(offer if has_name else replace(offer, zone=offer.zone_id))
    return tuple(kept)


# --- age ---------------------------------------------------------------------------------------------


class Age(StrEnum):
    """Verdict on the age of a price."""

    FRESH = "fresh"
    OLD = "old"
    """Usable for a purchase, with a warning."""
    EXPIRED = "expired"
    """Not usable for a purchase."""
    UNKNOWN = "unknown"
    """No date, or a date in the future. Treated like expired."""


TOO_OLD = frozenset({Age.EXPIRED, Age.UNKNOWN})


def age_of(observed_at: str, market: Market, now_ms: int) -> Age:
    """Judge a price's age.

    A spot price warns after 6 h and expires after 24 h, an on-demand price after 7 and 30 days.
    """
    at_ms = time_ms(observed_at)
    if at_ms is None or at_ms > now_ms + SKEW_MS:
        return Age.UNKNOWN
    if now_ms - at_ms > REFUSE_MS[market]:
        return Age.EXPIRED
    return Age.OLD if now_ms - at_ms > WARN_MS[market] else Age.FRESH


def age_text(observed_at: str, now_ms: int) -> str:
    """Return `3h 20m old`, or the text given instead of a date."""
    at_ms = time_ms(observed_at)
    if at_ms is None:
        return f"date unknown ({observed_at})"
    if at_ms > now_ms + SKEW_MS:
        return f"dated in the future ({observed_at})"
    return f"{duration(max(0, now_ms - at_ms))} old"


OLD_FIGURE_MS = 90 * DAY_MS
"""Age in milliseconds of a price above which a figure made of it says so. Assumed: Google may change a spot price
daily, and one of H100 rose by a fifth within three months of 2026."""


def dates_text(observed_at: Iterable[str], now_ms: int) -> str:
    """Return the dates of the prices of a figure: `prices of 2026-07-20 to 2026-08-03, older than 90 days`.

    A text in place of a date is named first.
    """
    texts = list(dict.fromkeys(observed_at))
    days = sorted({text[:10] for text in texts if time_ms(text) is not None})
    undated = [text for text in texts if time_ms(text) is None]
    named = " and ".join([*undated, *([" to ".join(dict.fromkeys((days[0], days[-1])))] if days else [])])
    oldest_ms = min(filter(None, map(time_ms, texts)), default=None)
    if oldest_ms is not None and now_ms - oldest_ms > OLD_FIGURE_MS:
        return f"prices of {named}, older than 90 days"
    return f"prices of {named}{', perhaps older than 90 days' if undated else ''}"


def without_expired(offers: Iterable[Offer], now_ms: int) -> tuple[Offer, ...]:
    """Drop expired prices from each table that has usable prices.

    Tables without a usable price stay complete, for plans that are shown and not bought. Without this filter, an
    outdated price could win over current prices.
    """
    offers = tuple(offers)
    bought_by = [offer for offer in offers if age_of(offer.observed_at, offer.market, now_ms) not in TOO_OLD]
    fresh = {(offer.cloud, offer.market) for offer in bought_by}
    return (*bought_by, *(offer for offer in offers if (offer.cloud, offer.market) not in fresh))


def refuse_stale(offers: Iterable[Offer], now_ms: int) -> None:
    """Raise CatalogError for the first price that is too old. Called before every purchase."""
    for offer in offers:
        if age_of(offer.observed_at, offer.market, now_ms) in TOO_OLD:
            raise CatalogError(
                f"the {offer.market.value} price of {offer.cloud} {offer.instance_type} in "
                f"{offer.zone or offer.region} ({hourly(offer.micro_usd_per_hour)}, {offer.source}) is "
                f"{age_text(offer.observed_at, now_ms)}; nothing is bought by a {offer.market.value} price older than "
                f"{duration(REFUSE_MS[offer.market])}: `spotrl catalog refresh`"
            )
