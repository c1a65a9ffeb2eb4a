"""`spotrl bill`: read the clouds' own bills."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.bill.importing import BillImport, import_bills
from launcher.cli.layout import print_text
from launcher.money import dollars

SHOWN = 10
"""Most unknown resources, nodes and accounts that are named. `--json` has them all."""


@click.group()
def bill() -> None:
    """Compare what spotrl metered with what the clouds billed.

    \b
    Example:
      spotrl bill import export-00001.csv.gz
      spotrl report my-run
    """


@bill.command("import")
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--replace",
    is_flag=True,
    help="Forget first what earlier imports said of the months in the files. For a month from which AWS has withdrawn "
    "rows.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object. Progress goes to stderr.")
@click.pass_obj
def import_(sessions: sessionmaker[Session], files: tuple[Path, ...], replace: bool, as_json: bool) -> None:
    """Import bills of AWS (Cost and Usage Report 2.0) and Google Cloud (detailed usage cost).

    FILE is CSV, CSV in gzip or parquet. Only rows about the nodes of this ledger are kept, each once: a file may be
    imported again. Name all files of a month of AWS in one command. Reports then show billed beside metered; limits
    and budgets go on with what was metered.

    \b
    Example:
      spotrl bill import BILLING_PERIOD=2026-11/export-*.csv.gz
      spotrl bill import gcp-2026-11.parquet --json
    """
    found = import_bills(sessions, files, replace=replace, progress=_progress)
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", err=True, nl=False)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    print_text(bill_lines(found))


def _progress(path: Path, share: float) -> None:
    """Show progress as one changing line on a terminal. Print nothing to a log."""
    if sys.stderr.isatty():
        click.echo(f"\r{path.name}: {100 * share:.0f} %\x1b[K", err=True, nl=False)


def bill_lines(found: BillImport) -> Iterator[str]:
    """Yield what an import found, as sentences."""
    yield f"{found.rows} rows read, {found.our_rows} about runs of this ledger"
    kept = f"{found.added} amounts added, {found.known} known before"
    yield kept + (f", {found.replaced} of an earlier bill of the same month replaced" if found.replaced else "")
    if found.months:
        yield f"months: {'; '.join(found.months)}"
    for run, micro_usd in found.billed_micro_usd.items():
        yield f"{run}: billed {dollars(micro_usd)}; `spotrl report {run}` compares"
    if found.unknown:
        total = dollars(sum(thing.micro_usd for thing in found.unknown))
        yield f"{len(found.unknown)} resources with our labels are none of this ledger's nodes, {total}:"
        for thing in found.unknown[:SHOWN]:
            name = f"{thing.resource or 'no resource'} ({thing.node or thing.run})"
            yield f"  {thing.cloud} {thing.account} {name}: {dollars(thing.micro_usd)}; {thing.why}"
    if found.nodes_without_rows:
        names = found.nodes_without_rows
        yield f"{len(names)} nodes of that time and these accounts are on no bill yet: {_some(names)}"
    if found.other_accounts:
        yield f"{sum(found.other_accounts.values())} rows of other accounts: {_counts(found.other_accounts)}"
    if found.other_currencies:
        yield f"{sum(found.other_currencies.values())} rows in other currencies: {_counts(found.other_currencies)}"


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _counts(rows: Mapping[str, int]) -> str:
    return _some(tuple(f"{name} ({count})" for name, count in sorted(rows.items(), key=lambda item: -item[1])))
