"""`spotrl report`: show a run's results and costs."""

import json
from collections.abc import Callable
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.number import Number
from launcher.cli.output_file import check_output, say_written
from launcher.cli.run_argument import run_argument
from launcher.ledger.models import Removal, Run
from launcher.ledger.store import find_run
from launcher.report.build import build_report
from launcher.report.focus import write_focus
from launcher.report.tables import write_tables
from launcher.report.terminal import a_console, print_report
from launcher.storage.stores import StoreError, read_object, run_stores
from launcher.whole_file import whole_file


@click.command()
@run_argument
@click.option("--target-reward", type=Number(), help="Target score (default: the job's target).")
@click.option("--against", metavar="RUN2", help="Baseline run. The report adds the saving against RUN2.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object. Its field `schema` is the version of the format."
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the report to this file, as one HTML page that works offline.",
)
@click.option(
    "--csv", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER", help="Also write each table as CSV."
)
@click.option(
    "--focus",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.csv",
    help="Also write the costs by node and hour to this file, as rows of FOCUS 1.2.",
)
@click.pass_obj
def report(
    sessions: sessionmaker[Session],
    run_name: str,
    target_reward: float | None,
    against: str | None,
    as_json: bool,
    html: Path | None,
    csv: Path | None,
    focus: Path | None,
) -> None:
    """Show the dollars and hours that RUN took to its target.

    The report splits the costs by role, market, node and phase, and lists the preemptions with their cost.

    \b
    Example:
      spotrl report digits-ocr --target-reward 0.8 --html report.html
    """
    if focus is not None:
        check_output(focus)
    with sessions() as session:
        run = find_run(session, run_name)
        other = find_run(session, against) if against else None
        built = build_report(session, run, run.clock.now_ms(), target_reward, other)
        if session.get(Removal, run.id) is not None:
            click.echo(
                f"{run.name} was removed with `spotrl rm`: its images and logs are gone, its facts are not", err=True
            )
    if html is not None:
        from launcher.report.html import render_html  # the charts' libraries take a second to import

        page = render_html(built, image_reader(run))
        with whole_file(html) as file:
            file.write(page)
        click.echo(f"wrote {html}", err=True)
    if csv is not None:
        for path in write_tables(built, csv):
            click.echo(f"wrote {path}", err=True)
    if focus is not None:
        with sessions() as session:
            say_written(write_focus(session, [find_run(session, run_name)], focus))
    if as_json:
        click.echo(json.dumps(built.to_dict(), indent=2, allow_nan=False))
    else:
        print_report(built, a_console())


def image_reader(run: Run) -> Callable[[str], bytes | None]:
    """Return a reader of images in the run's stores. If a bucket cannot be read, the reader warns and returns None."""

    def read(path: str) -> bytes | None:
        try:
            stores = run_stores(run.infra, run.job.get("store") or {}, run.name, Path(run.folder))
            return read_object(stores, path)
        except StoreError as error:
            click.echo(f"the report lacks {path}: {error}", err=True)
            return None

    return read
