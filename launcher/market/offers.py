"""What can be bought: offers read from the dated price tables in `catalogs/`.

A row that could mislead a budget (a price of zero, below zero or not a number; spot dearer than on demand) makes
the table unreadable; it is never dropped in silence. Sources and dates: catalogs/README.md.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from importlib.resources import files

from engine.events import Market
from launcher.exit_codes import ExitCode, Failure
from launcher.money import MICRO, hourly

TABLES = ("aws.csv", "gcp.csv")


class CatalogError(Failure):
    """A price table has a row that must not be believed."""

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


@cache
def read_catalog() -> tuple[Offer, ...]:
    """Every offer of the tables that ship with spotrl. Raises CatalogError."""
    return tuple(
        offer
        for table in TABLES
        for offer in parse_offers((files("catalogs") / table).read_text("utf-8").splitlines(), table)
    )


def parse_offers(lines: Iterable[str], table: str) -> tuple[Offer, ...]:
    """The offers of one CSV table, header first. Raises CatalogError with the line."""
    offers = []
    for number, row in enumerate(csv.DictReader(lines, restval=""), start=2):
        try:
            offers.append(_offer(row))
        except (KeyError, TypeError, ValueError) as error:
            raise CatalogError(f"{table}, line {number}: {error}; correct the row or leave it out") from None
    _refuse_spot_above_on_demand(offers, table)
    return tuple(offers)


def _offer(row: dict[str, str]) -> Offer:
    return Offer(
        cloud=_word(row, "cloud"),
        region=_word(row, "region"),
        zone=row["zone"].strip(),
        instance_type=_word(row, "instance_type"),
        accelerator=_word(row, "accelerator"),
        gpus=_at_least_one(row, "gpus"),
        market=Market(row["market"]),
        micro_usd_per_hour=_price(row["usd_per_hour"]),
        source=_word(row, "source"),
        observed_at=_word(row, "observed_at"),
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


def _price(text: str) -> int:
    try:
        micro_usd = Decimal(text) * MICRO
    except InvalidOperation:
        raise ValueError(f"usd_per_hour is {text!r}, which is no number") from None
    if not micro_usd.is_finite() or micro_usd <= 0 or micro_usd != micro_usd.to_integral_value():
        raise ValueError(f"usd_per_hour is {text!r}; a price is finite, above zero, and in whole micro-dollars")
    return int(micro_usd)


def _refuse_spot_above_on_demand(offers: Iterable[Offer], table: str) -> None:
    on_demand = {
        (offer.cloud, offer.region, offer.instance_type): offer.micro_usd_per_hour
        for offer in offers
        if offer.market is Market.ON_DEMAND
    }
    for offer in offers:
        limit = on_demand.get((offer.cloud, offer.region, offer.instance_type), offer.micro_usd_per_hour)
        if offer.micro_usd_per_hour > limit:
            raise CatalogError(
                f"{table}: spot {offer.instance_type} in {offer.zone} costs {hourly(offer.micro_usd_per_hour)}, "
                f"more than {hourly(limit)} on demand; one of the two is another product's price"
            )
