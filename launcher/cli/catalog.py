"""`spotrl catalog`: the price tables used by plans, with the source, age and quality of each price."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.layout import print_table, print_text
from launcher.cli.price_option import prices_option
from launcher.exit_codes import ExitCode
from launcher.market.offers import (
    CLOUDS,
    MANIFEST,
    TOO_OLD,
    Catalog,
    CatalogError,
    Offer,
    Prices,
    age_of,
    age_text,
    current_catalog,
    read_folder,
    shipped_catalog,
)
from launcher.market.quality import USABLE, judge
from launcher.money import dollars
from launcher.services.refresh_catalog import (
    ORIGINS,
    Change,
    Origin,
    changes,
    find_offers,
    merged,
    replace_tables,
    seal,
)
from launcher.settings import home

CloudChoice = click.Choice(CLOUDS)

PRICES = ("$/h", "$/GPU-h")


@click.group()
def catalog() -> None:
    """Show, refresh and check the price tables used by plans.

    \b
    Example:
      spotrl catalog show --gpu H100
      spotrl catalog refresh --cloud aws
    """


def tables_folder() -> Path:
    """Return the folder of the refreshed tables."""
    return home() / "catalogs"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@catalog.command()
@click.option("--cloud", type=CloudChoice, help="Cloud (default: all).")
@click.option("--gpu", help="GPU type, like H100 (default: all).")
@click.option("--market", type=click.Choice(["spot", "on_demand"]), help="Capacity type (default: both).")
@click.option("--shipped", is_flag=True, help="Show the tables shipped with spotrl instead of the refreshed tables.")
@prices_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(cloud: str | None, gpu: str | None, market: str | None, shipped: bool, prices: Prices, as_json: bool) -> None:
    """Show offers with the price, and the price's quality, source and age. The cheapest GPU-hour comes first.

    \b
    Example:
      spotrl catalog show --gpu H100 --market spot
      spotrl catalog show --cloud gcp --json
    """
    found = shipped_catalog(prices) if shipped else current_catalog(tables_folder(), prices)
    offers = [
        offer
        for offer in found.all_offers()
        if cloud in (None, offer.cloud)
        and (gpu is None or gpu.lower() == offer.accelerator.lower())
        and market in (None, offer.market.value)
    ]
    now = now_ms()
    if as_json:
        rows = [asdict(offer) | {"age": age_of(offer.observed_at, offer.market, now).value} for offer in offers]
        tables = {name: asdict(table) for name, table in found.tables.items()}
        click.echo(json.dumps({"place": found.place, "tables": tables, "offers": rows}))
        return
    if not offers:
        known = ", ".join(sorted({offer.accelerator for offer in found.all_offers()}))
        click.echo(f"No such offer. The tables have {known}.")
        return
    offers.sort(key=lambda offer: offer.micro_usd_per_hour / offer.gpus)
    sources = list(dict.fromkeys((offer.source, age_text(offer.observed_at, now)) for offer in offers))
    heading = ("cloud", "region", "zone", "instance", "GPUs", "market", *PRICES, "quality", "from")
    numbered = [sources.index((offer.source, age_text(offer.observed_at, now))) + 1 for offer in offers]
    cells = [(*_cells(offer), f"[{number}]") for offer, number in zip(offers, numbered, strict=True)]
    print_table([heading, *cells], numbers=PRICES)
    print_text(["", *(f"[{number}] {source}: {age}" for number, (source, age) in enumerate(sources, 1))])
    print_text(summary(found, offers, now))


def _cells(offer: Offer) -> tuple[str, ...]:
    zone = offer.zone if offer.zone_id in ("", offer.zone) else f"{offer.zone} ({offer.zone_id})"
    return (
        offer.cloud,
        offer.region,
        zone or "any",
        offer.instance_type,
        f"{offer.accelerator}:{offer.gpus}",
        offer.market.value,
        dollars(offer.micro_usd_per_hour),
        dollars(offer.micro_usd_per_hour // offer.gpus),
        offer.quality.value,
    )


def summary(found: Catalog, offers: Sequence[Offer], now: int) -> list[str]:
    """Return lines with the number of offers, the number of untrusted prices, and the number of outdated prices."""
    doubted = sum(offer.quality not in USABLE for offer in offers)
    too_old = sum(age_of(offer.observed_at, offer.market, now) in TOO_OLD for offer in offers)
    lines = [f"{len(offers)} offers, {found.place}; {doubted} not to be believed, which plans leave out."]
    if too_old:
        lines.append(
            f"{too_old} of the prices are too old to buy by, or their date is not known: plans may be made from them, "
            "purchases not. Next: spotrl catalog refresh"
        )
    return lines


@catalog.command()
@click.option("--cloud", type=CloudChoice, help="Cloud (default: all).")
@click.option(
    "--from",
    "origin",
    type=click.Choice(ORIGINS),
    default="clouds",
    show_default=True,
    help="Price source. clouds: the clouds' APIs. recorded: the prices recorded by `spotrl prices`. gpuhunt: "
    "the prices published by dstack's gpuhunt (no account needed).",
)
@click.option("--dry-run", is_flag=True, help="Show the changes; write no table.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def refresh(
    sessions: sessionmaker[Session], cloud: str | None, origin: Origin, dry_run: bool, as_json: bool
) -> ExitCode:
    """Rebuild the price tables from current prices.

    The new tables are written to your own folder and replace the old tables in one step. An offer without a new price
    keeps its row and its date. If a source fails, the tables of its cloud stay unchanged and the exit code is not 0.

    \b
    Example:
      spotrl catalog refresh --cloud aws --dry-run
      spotrl catalog refresh --from recorded
    """
    folder, now = tables_folder(), now_ms()
    found = find_offers(origin, [cloud] if cloud else CLOUDS, sessions, now_ms=now, environ=os.environ)
    before = current_catalog(folder).all_offers()
    after = merged(before, found.offers)
    changed = changes(before, after)
    answered = {offer.cloud for offer in found.offers}
    failures = list(dict.fromkeys(map(str, found.failures)))  # both sources of a cloud may lack the same credentials
    if answered and not dry_run:
        own = read_folder(folder).tables if (folder / MANIFEST).exists() else {}
        written = [offer for offer in after if offer.cloud in answered]
        replace_tables(folder, written, own, source=f"spotrl catalog refresh --from {origin}", now_ms=now)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "folder": str(folder),
                    "written": sorted(answered) if not dry_run else [],
                    "changes": changes_json(changed),
                    "left_out": found.unknown,
                    "failures": failures,
                }
            )
        )
        return found.exit_code
    for line in change_lines(changed) if answered else ():
        click.echo(line)
    if found.unknown:
        click.echo(f"Left out, because we do not know their GPUs: {', '.join(found.unknown)}.")
    for failure in failures:
        click.echo(f"Error: {failure}", err=True)
    stays = [name for name in ([cloud] if cloud else CLOUDS) if name not in answered]
    if stays:
        click.echo(f"The tables of {' and '.join(stays)} are as they were.", err=True)
    if answered:
        what = f"the tables of {' and '.join(sorted(answered))} in {folder}"
        click.echo(f"Dry run: would replace {what}." if dry_run else f"Replaced {what}.")
    return found.exit_code


@catalog.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option(
    "--seal",
    "reseal",
    is_flag=True,
    help="Rewrite the qualities and the manifest in FOLDER. Use after a correction of a table by hand.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def validate(folder: Path | None, reseal: bool, as_json: bool) -> int:
    """Check price tables against their manifest, and compare all prices.

    Without FOLDER, the command checks the tables used by plans. Exit code 9 means a damaged table, or a row whose
    quality differs from the rules.

    \b
    Example:
      spotrl catalog validate
      spotrl catalog validate catalogs --seal    (after a table was corrected by hand)
    """
    if reseal:
        if folder is None:
            raise click.UsageError("--seal writes: name the FOLDER that it may write into")
        seal(folder, read_folder(folder, sealed=False))
    found = read_folder(folder) if folder else current_catalog(tables_folder())
    offers = found.all_offers()
    verdicts = judge(offers)
    wrong = [
        f"{_name(now)}: quality is {was.quality}, the rules say {now.quality}"
        for was, now in zip(offers, verdicts, strict=True)
        if was.quality is not now.quality
    ]
    counts = Counter(offer.quality.value for offer in verdicts)
    where = folder or tables_folder()
    remedy = f"{len(wrong)} rows have another verdict than the rules; `spotrl catalog validate {where} --seal`"
    if as_json:
        click.echo(json.dumps({"place": found.place, "rows": len(offers), "quality": counts, "wrong": wrong}))
        if wrong:
            click.echo(f"Error: {remedy}", err=True)
            return CatalogError.exit_code  # an error would print a second JSON object
    else:
        for offer in verdicts:
            if offer.quality not in USABLE:
                click.echo(f"{_name(offer)}: {offer.quality}, {dollars(offer.micro_usd_per_hour)}/h")
        for line in wrong:
            click.echo(line)
        click.echo(f"{found.place}: {len(offers)} rows; {', '.join(f'{n} {name}' for name, n in counts.items())}")
    if wrong:
        raise CatalogError(remedy)
    return ExitCode.OK


@catalog.command()
@click.argument("old", required=False, default="shipped")
@click.argument("new", required=False, default="current")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff(old: str, new: str, as_json: bool) -> None:
    """Show the changes from table set OLD to NEW.

    OLD and NEW are `recorded`, `shipped`, `current` or a folder (default: `shipped` and `current`). `recorded`: the
    shipped prices of the recorded markets.

    \b
    Example:
      spotrl catalog diff
      spotrl catalog diff recorded shipped
      spotrl catalog diff shipped my-tables
    """
    found = changes(_tables(old).all_offers(), _tables(new).all_offers())
    if as_json:
        click.echo(json.dumps({"old": old, "new": new, "changes": changes_json(found)}))
        return
    for line in change_lines(found):
        click.echo(line)


def _tables(name: str) -> Catalog:
    if name in ("recorded", "shipped"):
        return shipped_catalog(Prices.RECORDED if name == "recorded" else Prices.NEWEST)
    return current_catalog(tables_folder()) if name == "current" else read_folder(Path(name))


def changes_json(found: Iterable[Change]) -> list[dict[str, Any]]:
    return [asdict(change) for change in found]


def change_lines(found: Sequence[Change]) -> list[str]:
    """Return one line for each change, and a line with the number of changes of each kind."""
    if not found:
        return ["Nothing changed."]
    lines = [_change_line(change) for change in found]
    counts = Counter(change.kind for change in found)
    return [*lines, f"{len(found)} changes: {', '.join(f'{count} {kind}' for kind, count in counts.items())}"]


def _change_line(change: Change) -> str:
    offer, before = change.offer, change.before
    name, price = _name(offer), f"{dollars(offer.micro_usd_per_hour)}/h"
    match change.kind:
        case "new":
            return f"+ {name}: {price}, {offer.quality}"
        case "gone":
            return f"- {name}: was {price}"
        case "quality":
            return f"! {name}: {before.quality if before else ''} -> {offer.quality}"
        case _:
            was = before.micro_usd_per_hour if before else offer.micro_usd_per_hour
            percent = 100 * (offer.micro_usd_per_hour - was) / was
            return f"~ {name}: {dollars(was)}/h -> {price} ({percent:+.1f} %), {offer.quality}"


def _name(offer: Offer) -> str:
    return f"{offer.cloud} {offer.zone or offer.region} {offer.instance_type} {offer.market.value}"
