"""`spotrl status`: show a run, its nodes and its last events."""

import json
import time
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from sqlalchemy.orm import Session, sessionmaker

from engine.events import Regrouped
from launcher.cli.layout import fitted
from launcher.cli.run_argument import run_argument
from launcher.ledger.store import find_run
from launcher.money import dollars, duration, hourly
from launcher.report.sharing import groups_text
from launcher.runs.runs import still_running
from launcher.runs.views import EventLine, RunView, event_lines, run_view, short_name

LAST_EVENTS = 8
LOOK_SECONDS = 1.0
PIPE_WIDTH = 200


@click.command()
@run_argument
@click.option("--watch", "-w", is_flag=True, help="Refresh every second until the run has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --watch, one per line every second.")
@click.pass_obj
def status(sessions: sessionmaker[Session], run_name: str, watch: bool, as_json: bool) -> None:
    """Show the progress, cost, nodes and last events of RUN.

    Each node is shown with its age, its rate and its SP groups.

    \b
    Example:
      spotrl status digits --watch
    """
    while True:
        is_over = not watch or not still_running(sessions, run_name)
        if watch and not as_json:
            click.clear()
        _show(sessions, run_name, as_json)
        if is_over:
            return
        time.sleep(LOOK_SECONDS)


def _show(sessions: sessionmaker[Session], run_name: str, as_json: bool) -> None:
    view = run_view(sessions, run_name)
    with sessions() as session:
        happened = event_lines(session, find_run(session, run_name))
    # Leave out regroups: SP groups may change many times a minute, and the table of nodes shows the groups.
    lines = [line for line in happened if line.kind != Regrouped.KIND][-LAST_EVENTS:]
    if as_json:
        document: dict[str, Any] = {**asdict(view), "events": [asdict(line) for line in lines]}
        click.echo(json.dumps(document))
        return
    for text in fitted(headline(view)):
        click.echo(text)
    print_table(node_table(view))
    for text in fitted(event_text(line, view.name) for line in lines):
        click.echo(text)


def print_table(table: Table) -> None:
    """Print a table. Without a terminal, print at full width: a truncated name cannot be copied."""
    console = Console(markup=False)  # `spotrl[sky]` is text, not a style
    (console if console.is_terminal else Console(width=PIPE_WIDTH, markup=False)).print(table)


def headline(view: RunView) -> list[str]:
    """Return the run's status, progress and cost in a few lines."""
    reason = f" ({view.reason})" if view.reason else ""
    # Put the warning on its own line: an unwrapped command can be copied.
    warning = [f"{view.name} has no controller; start one: spotrl resume {view.name}"] if view.lacks_controller else []
    removed = "; its files were removed" if view.is_removed else ""
    limit = f" of {dollars(view.max_total_micro_usd)}" if view.max_total_micro_usd is not None else ""
    score = "-" if view.score is None else f"{view.score:.3f}"
    peak = "-" if view.best_score is None else f"{view.best_score:.3f}"
    target = f", target {view.target}" if view.target is not None else ""
    eta = "" if view.eta_seconds is None else f", {duration(round(view.eta_seconds * 1000))} left at most"
    return [
        f"{view.name}: {view.status}{reason}{removed}",
        *warning,
        f"iteration {view.iteration}/{view.iterations}, {view.metric} {score} (best {peak}{target}){eta}",
        f"spent {dollars(view.spent_micro_usd)}{limit}, now {hourly(view.micro_usd_per_hour)}; "
        f"{duration(view.elapsed_ms)} on the run's clock ({view.clock_factor:g}x), "
        f"{duration(round(view.wall_seconds * 1000))} by the wall",
    ]


def node_table(view: RunView) -> Table:
    table = Table(box=None, pad_edge=False)
    shares = any(node.groups for node in view.nodes)
    for column in ("node", "market", "zone", "status", "age", "rate", *(["groups"] if shares else [])):
        table.add_column(column, no_wrap=True)
    for node in view.nodes:
        age, rate = duration(node.age_ms), hourly(node.micro_usd_per_hour)
        groups = [groups_text(node.groups)] if shares else []
        name = short_name(view.name, node.name)
        table.add_row(name, node.market, node.zone, node.status, age, rate, *groups)
    return table


def event_text(line: EventLine, run_name: str) -> str:
    """Return one event as a line: time (run's clock), source, kind and text."""
    source = short_name(run_name, line.source)
    return f"{duration(max(0, line.elapsed_ms)):>10}  {source:<12} {line.kind} {line.text}".rstrip()
