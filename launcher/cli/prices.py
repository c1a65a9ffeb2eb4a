"""`spotrl prices`: show current and past prices from the ledger, and fetch new prices from the clouds."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from sqlalchemy.orm import Session, sessionmaker

from engine.events import Market
from launcher.cli.layout import print_table, print_text
from launcher.exit_codes import ExitCode, Failure
from launcher.ledger.prices import latest_prices, places, price_history
from launcher.market.instance_types import instance_type_of, instance_types
from launcher.market.offers import CLOUDS
from launcher.market.prices import PricePoint, iso
from launcher.money import dollars, duration, exact_dollars, hourly, parse_duration
from launcher.services.refresh import Answer, Refreshed, build_sources
from launcher.services.refresh import refresh as refresh_prices

Sessions = sessionmaker[Session]

REFUSALS_SHOWN = 5

LEAST_MS = 1000
"""Shortest duration of an option."""

LEAST_SINCE_MS = 3_600_000
"""Shortest AWS history fetched by `watch`: an hour. The next fetch then contains the changes during a failed fetch."""


class Duration(click.ParamType):
    """A duration like `10m` or `1d` of a second or more, converted to milliseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            ms = value if isinstance(value, int) else parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if ms < LEAST_MS:  # `watch --every 0s` would ask the clouds without a pause
            self.fail(f"{value} is less than a second; use more", param, ctx)
        return ms


def offer_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for choosing offers, shared by the commands."""
    for option in (
        click.option("--gpu", "accelerators", multiple=True, help="GPU type, like H100 (default: all). Repeatable."),
        click.option("--region", "regions", multiple=True, help="Region, like us-east-1 (default: all). Repeatable."),
        click.option(
            "--cloud", "clouds", type=click.Choice(CLOUDS), multiple=True, help="Cloud (default: all). Repeatable."
        ),
    ):
        command = option(command)
    return command


@click.group()
def prices() -> None:
    """Show current and past GPU prices by cloud, region and zone.

    \b
    Example:
      spotrl prices refresh --gpu H100
      spotrl prices show --gpu H100
    """


@prices.command()
@offer_options
@click.option("--market", type=click.Choice([market.value for market in Market]), help="Capacity type (default: both).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show(
    sessions: Sessions,
    clouds: tuple[str, ...],
    regions: tuple[str, ...],
    accelerators: tuple[str, ...],
    market: str | None,
    as_json: bool,
) -> int:
    """Show the current price in each zone, with its source and age.

    If the ledger has no matching price, the command fetches prices from the clouds first.

    \b
    Example:
      spotrl prices show --gpu H100 --market spot
    """
    code = ExitCode.OK
    points = _latest(sessions, clouds, regions, accelerators, market)
    if not points:
        code = _ask_first(sessions, clouds, regions, accelerators)
        points = _latest(sessions, clouds, regions, accelerators, market)
    now = now_ms()
    if as_json:
        click.echo(json.dumps({"at": iso(now), "prices": [price_json(point, now) for point in points]}))
        return code
    if not points:
        click.echo("No such price is known. `spotrl prices refresh` asks the clouds.")
        click.echo("`spotrl catalog show` lists the prices that ship with spotrl.")
        return code
    print_table(price_rows(points, now), numbers=("$/h", "$/GPU-h"))
    print_text(f"[{number}] {source}" for number, source in enumerate(_sources(points), 1))
    return code


@prices.command()
@click.argument("place")
@click.option("--gpu", "accelerators", multiple=True, help="GPU type, like H100 (default: all). Repeatable.")
@click.option("--market", type=click.Choice([market.value for market in Market]), help="Capacity type (default: both).")
@click.option(
    "--last",
    "last_ms",
    type=Duration(),
    default="7d",
    show_default=True,
    help="Length of the history up to now, like 7d or 12h.",
)
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a chart to this file as HTML, instead of printing a table.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def history(
    sessions: Sessions,
    place: str,
    accelerators: tuple[str, ...],
    market: str | None,
    last_ms: int,
    page: Path | None,
    as_json: bool,
) -> int:
    """Show the price history of PLACE.

    PLACE is the name of a zone, an AWS zone id, or a region. A region selects the region-wide prices only, not the
    prices of its zones.

    \b
    Example:
      spotrl prices history us-east-1a --gpu H100 --last 30d --html h100.html
    """
    until_ms = now_ms()
    since_ms = until_ms - last_ms
    types = _types((), accelerators)
    with sessions() as session:
        points = price_history(
            session,
            place,
            since_ms=since_ms,
            until_ms=until_ms,
            instance_types=types,
            market=None if market is None else Market(market),
        )
        if not points:
            known = places(session)
            near = f"prices are known of {', '.join(known)}" if known else "no price is known yet"
            raise Failure(f"no such price of {place} up to now; {near}. Next: spotrl prices refresh")
    if page is not None:
        from launcher.report.price_page import price_page  # altair takes long to import

        title = f"Prices in {place}, last {duration(last_ms)}"
        html = price_page(title, points, since_ms=since_ms, until_ms=until_ms, until=_minute(until_ms))
        try:
            page.write_text(html, encoding="utf-8")
        except OSError as error:
            raise Failure(f"{page} cannot be written ({error.strerror}); name another file") from None
        click.echo(f"The chart is in {page}.", err=as_json)
    if as_json:
        click.echo(json.dumps({"place": place, "prices": [price_json(point, until_ms) for point in points]}))
    elif page is None:
        print_table(history_rows(points), numbers=("$/h",))
    return ExitCode.OK


@prices.command()
@offer_options
@click.option(
    "--since",
    "since_ms",
    type=Duration(),
    default="1d",
    show_default=True,
    help="Length of the spot price history to fetch from AWS, like 1d. AWS keeps 90 days.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, including every refused price.")
@click.pass_obj
def refresh(
    sessions: Sessions,
    clouds: tuple[str, ...],
    regions: tuple[str, ...],
    accelerators: tuple[str, ...],
    since_ms: int,
    as_json: bool,
) -> int:
    """Fetch prices from the clouds, and record the plausible prices.

    Implausible prices are refused and listed. If a source fails, the command names the source and records the prices
    of the remaining sources. Exit code 4 means missing credentials for a cloud.

    \b
    Example:
      spotrl prices refresh --cloud aws --region us-east-1 --gpu H100
    """
    refreshed = _refresh(sessions, clouds, regions, accelerators, since_ms)
    if as_json:
        click.echo(json.dumps(refreshed_json(refreshed)))
        return refreshed.exit_code
    heading, *_ = rows = answer_rows(refreshed)
    print_table(rows, numbers=heading[1:])
    _print_problems(refreshed.answers)
    return refreshed.exit_code


@prices.command()
@offer_options
@click.option(
    "--every",
    "every_ms",
    type=Duration(),
    default="10m",
    show_default=True,
    help="Time to wait between fetches, like 10m.",
)
@click.option("--times", type=click.IntRange(min=1), help="Number of fetches (default: until Ctrl-C).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per fetch, one per line.")
@click.pass_obj
def watch(
    sessions: Sessions,
    clouds: tuple[str, ...],
    regions: tuple[str, ...],
    accelerators: tuple[str, ...],
    every_ms: int,
    times: int | None,
    as_json: bool,
) -> int:
    """Fetch prices repeatedly, and print the changes.

    Plausible prices are recorded. Missing credentials end the command with exit code 4.

    \b
    Example:
      spotrl prices watch --gpu H100 --every 5m
    """
    known = _by_pool(_latest(sessions, clouds, regions, accelerators))
    asked = 0
    while True:
        refreshed = _refresh(sessions, clouds, regions, accelerators, max(every_ms, LEAST_SINCE_MS))
        before, known = known, _by_pool(_latest(sessions, clouds, regions, accelerators))
        changed = [(before.get(pool), point) for pool, point in known.items() if _moved(before.get(pool), point)]
        if as_json:
            news = [price_json(point, now_ms()) | {"before": _exact(was)} for was, point in changed]
            click.echo(json.dumps({"at": iso(now_ms()), **refreshed_json(refreshed), "changed": news}))
        else:
            for line in watch_lines(refreshed, changed):
                click.echo(line)
            _print_problems(refreshed.answers)
        asked += 1
        if refreshed.exit_code is ExitCode.CREDENTIALS or asked == times:
            return refreshed.exit_code
        time.sleep(every_ms / 1000)


# --- shared by the commands --------------------------------------------------------------------------


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _refresh(
    sessions: Sessions, clouds: Sequence[str], regions: Sequence[str], accelerators: Sequence[str], since_ms: int
) -> Refreshed:
    _types(clouds, accelerators)
    now = now_ms()
    sources = build_sources(
        clouds or CLOUDS, since_ms=now - since_ms, environ=os.environ, regions=regions, accelerators=accelerators
    )
    return refresh_prices(sources, sessions, now)


def _ask_first(
    sessions: Sessions, clouds: Sequence[str], regions: Sequence[str], accelerators: Sequence[str]
) -> ExitCode:
    click.echo("No such price is known yet: asking the clouds.", err=True)
    refreshed = _refresh(sessions, clouds, regions, accelerators, parse_duration("1d"))
    _print_problems(refreshed.answers)
    return refreshed.exit_code


def _latest(
    sessions: Sessions,
    clouds: Sequence[str],
    regions: Sequence[str],
    accelerators: Sequence[str],
    market: str | None = None,
) -> list[PricePoint]:
    with sessions() as session:
        return latest_prices(
            session,
            clouds=clouds,
            regions=regions,
            instance_types=_types(clouds, accelerators),
            market=None if market is None else Market(market),
        )


def _types(clouds: Sequence[str], accelerators: Sequence[str]) -> tuple[str, ...]:
    """Return the instance types with these GPUs; empty if no GPU was named. Raises UsageError for an unknown GPU."""
    for name in accelerators:
        if not instance_types(clouds, (name,)):
            known = ", ".join(sorted({machine.accelerator for machine in instance_types(clouds)}))
            raise click.UsageError(f"no machine with {name} is known there; there are {known}")
    return tuple(machine.instance_type for machine in instance_types(clouds, accelerators)) if accelerators else ()


def _by_pool(points: Sequence[PricePoint]) -> dict[object, PricePoint]:
    return {point.pool: point for point in points}


def _moved(before: PricePoint | None, now: PricePoint) -> bool:
    return before is None or before.micro_usd_per_hour != now.micro_usd_per_hour


def _exact(point: PricePoint | None) -> str | None:
    return None if point is None else exact_dollars(point.micro_usd_per_hour)


# --- JSON --------------------------------------------------------------------------------------------


def price_json(point: PricePoint, at_ms: int) -> dict[str, Any]:
    machine = instance_type_of(point.cloud, point.instance_type)
    return {
        "cloud": point.cloud,
        "region": point.region,
        "zone": point.zone,
        "zone_id": point.zone_id,
        "instance_type": point.instance_type,
        "accelerator": machine.accelerator if machine else "",
        "gpus": machine.gpus if machine else 0,
        "market": point.market.value,
        "usd_per_hour": exact_dollars(point.micro_usd_per_hour),
        "micro_usd_per_hour": point.micro_usd_per_hour,
        "source": point.source,
        "source_id": point.source_id,
        "effective": iso(point.effective_ms),
        "last_seen": iso(point.observed_ms),
        "age_seconds": max(0, at_ms - point.observed_ms) / 1000,
    }


def refreshed_json(refreshed: Refreshed) -> dict[str, Any]:
    return {
        "exit_code": int(refreshed.exit_code),
        "sources": [
            {
                "source": answer.source,
                "cloud": answer.cloud,
                "prices": len(answer.points),
                "new": refreshed.new[answer.source],
                "estimates": len(answer.advice),
                "refused": [asdict(one.raw) | {"reason": one.reason} for one in answer.refused],
                "failures": [str(failure) for failure in answer.failures],
                "notes": list(answer.notes),
            }
            for answer in refreshed.answers
        ],
    }


# --- tables and lines --------------------------------------------------------------------------------


def price_rows(points: Sequence[PricePoint], at_ms: int) -> list[tuple[str, ...]]:
    """Return the heading and one row for each price."""
    rows: list[tuple[str, ...]] = [
        ("cloud", "region", "zone", "instance", "GPUs", "market", "$/h", "$/GPU-h", "since", "seen", "from")
    ]
    sources = _sources(points)
    for point in sorted(points, key=lambda p: (p.cloud, p.region, p.instance_type, p.market, p.micro_usd_per_hour)):
        machine = instance_type_of(point.cloud, point.instance_type)
        row = (
            point.cloud,
            point.region,
            _zone(point),
            point.instance_type,
            f"{machine.accelerator}:{machine.gpus}" if machine else "",
            point.market.value,
            dollars(point.micro_usd_per_hour),
            dollars(point.micro_usd_per_hour // machine.gpus) if machine else "",
            _minute(point.effective_ms),
            _ago(at_ms - point.observed_ms),
            f"[{sources.index(point.source) + 1}]",
        )
        rows.append(row)
    return rows


def history_rows(points: Sequence[PricePoint]) -> list[tuple[str, ...]]:
    """Return the heading and one row for each price."""
    rows = [
        (
            _minute(point.effective_ms),
            _zone(point),
            point.instance_type,
            point.market.value,
            dollars(point.micro_usd_per_hour),
            point.source,
        )
        for point in points
    ]
    return [("since (UTC)", "zone", "instance", "market", "$/h", "source"), *rows]


def answer_rows(refreshed: Refreshed) -> list[tuple[str, ...]]:
    """Return the heading and one row for each source: a name and five counts."""
    rows: list[tuple[str, ...]] = [("source", "prices", "new", "refused", "estimates", "failures")]
    for answer in refreshed.answers:
        reported, new, refused = len(answer.points), refreshed.new[answer.source], len(answer.refused)
        counts = (reported, new, refused, len(answer.advice), len(answer.failures))
        rows.append((answer.source, *map(str, counts)))
    return rows


def watch_lines(refreshed: Refreshed, changed: Sequence[tuple[PricePoint | None, PricePoint]]) -> list[str]:
    """Return one line for the fetch, and one line for each new or changed price."""
    reported = sum(len(answer.points) for answer in refreshed.answers)
    refused = sum(len(answer.refused) for answer in refreshed.answers)
    lines = [f"{_minute(now_ms())} UTC: {reported} prices heard, {len(changed)} moved or new, {refused} refused"]
    for before, point in changed:
        was = "" if before is None else f"{hourly(before.micro_usd_per_hour)} -> "
        where = f"{point.market.value} {point.instance_type} in {_zone(point)} ({point.region})"
        lines.append(f"  {where}: {was}{hourly(point.micro_usd_per_hour)}")
    return lines


def _print_problems(answers: Sequence[Answer]) -> None:
    """Print refused prices, notes and failures with their reasons. Use stderr, so a table on stdout can be piped."""
    for answer in answers:
        for refusal in answer.refused[:REFUSALS_SHOWN]:
            click.echo(f"Refused: {refusal} ({answer.source})", err=True)
        if (more := len(answer.refused) - REFUSALS_SHOWN) > 0:
            click.echo(f"Refused: {more} more of {answer.source}; --json lists them all", err=True)
        for note in answer.notes:
            click.echo(f"Note: {note}", err=True)
    # Two sources of one cloud may report the same missing credentials. Print equal failures once.
    for failure in dict.fromkeys(str(failure) for answer in answers for failure in answer.failures):
        click.echo(f"Error: {failure}", err=True)


def _sources(points: Sequence[PricePoint]) -> list[str]:
    return sorted({point.source for point in points})


def _ago(ms: int) -> str:
    return "just now" if ms < 1000 else f"{duration(ms)} ago"


def _zone(point: PricePoint) -> str:
    if point.zone and point.zone_id:
        return f"{point.zone} ({point.zone_id})"
    return point.zone or point.zone_id or "any"


def _minute(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
