"""`spotrl ls`: every run, newest first."""

import json
from dataclasses import asdict

import click
from rich.table import Table
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.status import print_table
from launcher.cluster.runs import RunView, run_views
from launcher.money import dollars, hourly


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def ls(sessions: sessionmaker[Session], as_json: bool) -> None:
    """Show every run: how it goes, and what it has cost.

    \b
    Example:
      spotrl ls
    """
    views = run_views(sessions)
    if as_json:
        click.echo(json.dumps([asdict(view) for view in views]))
        return
    if not views:
        click.echo("No runs yet; `spotrl launch JOB` starts one.")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("run", "status", "iteration", "score", "spent", "rate", "nodes"):
        table.add_column(column, no_wrap=True)
    for view in views:
        table.add_row(*_row(view))
    print_table(table)


def _row(view: RunView) -> tuple[str, ...]:
    score = "-" if view.score is None else f"{view.score:.3f}"
    live = [node for node in view.nodes if node.status in ("asked", "starting", "ready", "draining", "stopping")]
    return (
        view.name,
        view.status if view.controlled or not live else f"{view.status} (no controller)",
        f"{view.iteration}/{view.iterations}",
        score,
        dollars(view.spent_micro_usd),
        hourly(view.micro_usd_per_hour),
        str(len(live)),
    )
