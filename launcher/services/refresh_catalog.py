"""Refresh the price tables: reported prices -> offers -> verdicts -> changes -> replacement in one step.

The promises: tables are replaced together or not at all, in the user's home and never in the package. A row without a
new answer stays, with its own date. An instance type missing from `instance_types.py` is left out and named.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from sqlalchemy.orm import Session, sessionmaker

from engine.events import Market
from launcher.exit_codes import ExitCode, Failure
from launcher.market.instance_types import InstanceType, instance_type_of
from launcher.market.offers import (
    COLUMNS,
    DAY_MS,
    MANIFEST,
    SCHEMA,
    TABLES,
    Catalog,
    CatalogError,
    Offer,
    Table,
    as_row,
    key,
    sha256,
)
from launcher.market.prices import CURRENCY, PricePoint, iso
from launcher.market.quality import Quality, judge

# --- points -> offers --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Offers made of reported prices, and the instance types left out because `instance_types.py` lacks the types."""

    offers: tuple[Offer, ...]
    unknown: tuple[str, ...]


def offers_from(points: Iterable[PricePoint], quality: Quality = Quality.OK) -> Observed:
    """Return the newest price of each offer as an offer. `quality` is `unverified` for prices from a third party."""
    newest: dict[tuple[str, ...], tuple[int, Offer]] = {}
    unknown = set()
    for point in points:
        machine = instance_type_of(point.cloud, point.instance_type)
        if machine is None:
            unknown.add(f"{point.cloud} {point.instance_type}")
            continue
        offer = _offer(point, machine, quality)
        if point.observed_ms >= newest.get(key(offer), (point.observed_ms, offer))[0]:
            newest[key(offer)] = (point.observed_ms, offer)
    return Observed(offers=tuple(offer for _, offer in newest.values()), unknown=tuple(sorted(unknown)))


def _offer(point: PricePoint, machine: InstanceType, quality: Quality) -> Offer:
    # A spot price of a whole region holds for each zone; `zone` then names the region.
    whole_region = point.region if point.market is Market.SPOT else ""
    return Offer(
        cloud=point.cloud,
        region=point.region,
        zone=point.zone or point.zone_id or whole_region,
        zone_id=point.zone_id,
        instance_type=point.instance_type,
        accelerator=machine.accelerator,
        gpus=machine.gpus,
        gpu_mem_gib=machine.gpu_mem_gib,
        market=point.market,
        micro_usd_per_hour=point.micro_usd_per_hour,
        source=point.source,
        source_id=point.source_id,
        observed_at=iso(point.observed_ms),
        quality=quality,
    )


# --- offers -> tables --------------------------------------------------------------------------------


def merged(old: Iterable[Offer], fresh: Iterable[Offer]) -> tuple[Offer, ...]:
    """Replace old rows by fresh rows and keep the rest; sort the rows and judge all of them together.

    Drop a region-wide price once per-zone prices exist, because the region-wide price would list a zone twice.
    """
    fresh = tuple(fresh)
    with_zone_prices = {_product(offer) for offer in fresh if offer.zone not in ("", offer.region)}
    rows = {key(offer): offer for offer in (*old, *fresh)}
    kept = (offer for offer in rows.values() if offer.zone != offer.region or _product(offer) not in with_zone_prices)
    return judge(sorted(kept, key=key))


def _product(offer: Offer) -> tuple[str, str, str, Market]:
    return (offer.cloud, offer.region, offer.instance_type, offer.market)


def split(offers: Iterable[Offer]) -> dict[str, tuple[Offer, ...]]:
    """Group the offers by table."""
    tables: dict[str, list[Offer]] = {}
    for offer in offers:
        tables.setdefault(f"{offer.cloud}_{offer.market.value}", []).append(offer)
    return {name: tuple(tables[name]) for name in TABLES if name in tables}


def table_text(offers: Iterable[Offer]) -> str:
    """Format one CSV table for `parse_offers`."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_row(offer) for offer in offers)
    return out.getvalue()


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A difference in one offer."""

    kind: Literal["new", "gone", "price", "quality"]
    offer: Offer
    """The current offer; the former offer if the offer is gone."""
    before: Offer | None = None


def changes(before: Iterable[Offer], after: Iterable[Offer]) -> list[Change]:
    """Return the differences in the order of the tables. A row with only a newer date is no change."""
    old, new = {key(offer): offer for offer in before}, {key(offer): offer for offer in after}
    differences = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        if now is None:
            differences.append(Change(kind="gone", offer=old[name]))
        elif was is None:
            differences.append(Change(kind="new", offer=now))
        elif was.micro_usd_per_hour != now.micro_usd_per_hour:
            differences.append(Change(kind="price", offer=now, before=was))
        elif was.quality is not now.quality:
            differences.append(Change(kind="quality", offer=now, before=was))
    return differences


# --- tables -> disk ----------------------------------------------------------------------------------


def replace_tables(
    folder: Path, offers: Iterable[Offer], old: Mapping[str, Table], *, source: str, now_ms: int
) -> None:
    """Write the tables with rows in `offers`; `old` are the tables of this folder that stay.

    Each table is a new file with the digest in the file name. The manifest names the files, so replacing the manifest
    replaces all tables in one step. Raises CatalogError if the folder cannot be written; the old tables then stay
    unchanged.
    """
    written, tables = {}, dict(old)
    for name, rows in split(offers).items():
        text = table_text(rows)
        file = f"{name}.{sha256(text)[:8]}.csv"
        written[file] = text
        tables[name] = Table(file=file, fetched_at=iso(now_ms), sha256=sha256(text), rows=len(rows), source=source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in written.items():
            _write(folder / file, text)
        _write(folder / MANIFEST, manifest_text(tables))
        # A reader that has just read the old manifest still finds the old tables.
        named = {table.file for table in (*tables.values(), *old.values())}
        for path in folder.glob("*_*.*.csv"):
            if path.name not in named:
                path.unlink()
    except OSError as error:
        raise CatalogError(f"{folder} cannot be written ({error.strerror}); the tables are as they were") from None


def manifest_text(tables: Mapping[str, Table]) -> str:
    described = {name: asdict(tables[name]) for name in TABLES if name in tables}
    return json.dumps({"schema": SCHEMA, "currency": CURRENCY, "tables": described}, indent=2) + "\n"


def _write(path: Path, text: str) -> None:
    """Write the whole file or none of it, durably, before the manifest names the file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def seal(folder: Path, catalog: Catalog) -> None:
    """Rewrite a folder's tables and manifest after corrections by hand: verdicts, digests, numbers of rows."""
    verdicts = split(judge(catalog.all_offers()))
    tables = {}
    for name, table in catalog.tables.items():
        text = table_text(verdicts.get(name, ()))
        tables[name] = replace(table, sha256=sha256(text), rows=len(verdicts.get(name, ())))
        _write(folder / table.file, text)
    _write(folder / MANIFEST, manifest_text(tables))


# --- origins -----------------------------------------------------------------------------------------

ORIGINS = ("clouds", "recorded", "gpuhunt")
"""Sources of a refresh: the clouds, the ledger alone, or dstack's library."""

Origin = Literal["clouds", "recorded", "gpuhunt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Offers for the tables, and the failures that leave the remaining rows unchanged."""

    offers: tuple[Offer, ...]
    unknown: tuple[str, ...]
    failures: tuple[Failure, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        """Return 0 only if every query was answered."""
        return next((failure.exit_code for failure in self.failures), ExitCode.OK)


def find_offers(
    origin: Origin,
    clouds: Sequence[str],
    sessions: sessionmaker[Session],
    *,
    now_ms: int,
    environ: Mapping[str, str],
) -> Found:
    """Query the origin, and make offers of the answers.

    A cloud with a failed price source gives no offers, so the cloud's tables stay.
    """
    match origin:
        case "gpuhunt":
            from launcher.market.gpuhunt_prices import fetch_gpuhunt

            points = [point for point in fetch_gpuhunt(now_ms) if point.cloud in clouds]
            failures: list[Failure] = []
            quality = Quality.UNVERIFIED
        case "clouds":
            points, failures = _ask_clouds(clouds, sessions, now_ms, environ)
            quality = Quality.OK
        case "recorded":
            points, failures = _recorded(clouds, sessions)
            quality = Quality.OK
    observed = offers_from(points, quality)
    return Found(offers=observed.offers, unknown=observed.unknown, failures=tuple(failures))


def _ask_clouds(
    clouds: Sequence[str], sessions: sessionmaker[Session], now_ms: int, environ: Mapping[str, str]
) -> tuple[list[PricePoint], list[Failure]]:
    from launcher.services.refresh import build_sources, refresh

    sources = build_sources(clouds, since_ms=now_ms - DAY_MS, environ=environ)
    answers = refresh(sources, sessions, now_ms).answers
    failed = {
        source.cloud for source, answer in zip(sources, answers, strict=True) if answer.failures and source.gives_prices
    }
    points, silent = _recorded([cloud for cloud in clouds if cloud not in failed], sessions)
    return points, [failure for answer in answers for failure in answer.failures] + silent


def _recorded(clouds: Sequence[str], sessions: sessionmaker[Session]) -> tuple[list[PricePoint], list[Failure]]:
    from launcher.ledger.prices import latest_prices

    with sessions() as session:
        points = latest_prices(session, clouds=clouds) if clouds else []
    silent = [cloud for cloud in clouds if not any(point.cloud == cloud for point in points)]
    return points, [
        CatalogError(f"the ledger has no price of {cloud}; `spotrl prices refresh` asks for them") for cloud in silent
    ]
