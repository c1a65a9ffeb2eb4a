"""`spotrl status`: show a run, its nodes and its last events."""

import json
import time
from dataclasses import asdict
from typing import Any

import click
from sqlalchemy.orm import Session, sessionmaker

from engine.events import Regrouped
from launcher.cli.layout import print_table, print_text
from launcher.cli.live import score_text
from launcher.cli.run_argument import run_argument
from launcher.ledger.left_in_buckets import left_words
from launcher.ledger.store import find_run
from launcher.money import dollars, duration, hourly
from launcher.report.sharing import groups_text
from launcher.report.words import point_words
from launcher.runs.event_lines import EventLine, event_lines
from launcher.runs.runs import still_running
from launcher.runs.views import RunView, run_view, short_name
from launcher.selftest.abandoned import is_abandoned

LAST_EVENTS = 8
LOOK_SECONDS = 1.0


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
    print_text(headline(view))
    if is_abandoned(sessions, run_name):
        print_text([f"its selftest has ended, and left it; end it: spotrl down {run_name}"])
    print_table(node_rows(view))
    print_text(event_text(line, view.name) for line in lines)


def headline(view: RunView) -> list[str]:
    """Return the run's status, progress and cost in a few lines."""
    reason = f" ({view.reason})" if view.reason else ""
    # Put the warning on its own line: an unwrapped command can be copied.
    warning = [f"{view.name} has no controller; start one: spotrl resume {view.name}"] if view.lacks_controller else []
    trouble = [f"in trouble: {view.trouble}; nothing is bought, limits and stops still work"] if view.trouble else []
    more = [f"Go on with more money: {view.resume_with}"] if view.resume_with else []
    removed = "; its files were removed" if view.is_removed else ""
    limit = f" of {dollars(view.max_total_micro_usd)}" if view.max_total_micro_usd is not None else ""
    # Without a controller nobody asks the cloud, and a node may have ended itself.
    most = "at most " if view.lacks_controller else ""
    learning = [f"learns nothing: {view.learning}"] if view.learning else []
    trainer = short_name(view.name, view.trainer)
    trains = [f"{trainer} took the role of the trainer {duration(view.trainer_ms)} ago"] if view.trainer else []
    kept = [
        f"{short_name(view.name, node.name)} failed, and is kept for {duration(node.goes_in_ms)} more: "
        f"spotrl ssh {view.name} {short_name(view.name, node.name)}"
        for node in view.nodes
        if node.goes_in_ms is not None
    ]
    target = f", target {view.target}" if view.target is not None and view.score is None else ""
    eta = "" if view.eta_seconds is None else f", {duration(round(view.eta_seconds * 1000))} left at most"
    return [
        f"{view.name}: {view.status}{reason}{removed}",
        *warning,
        *trouble,
        *learning,
        *more,
        *trains,
        *kept,
        f"iteration {view.iteration}/{view.iterations}, {score_text(view)}{target}{eta}",
        *([point] if (point := point_words(view.point, view.metric)) else []),
        f"spent {most}{dollars(view.spent_micro_usd)}{limit}, now {hourly(view.micro_usd_per_hour)}"
        + (f"; billed {dollars(view.billed_micro_usd)}" if view.billed_micro_usd is not None else ""),
        *([f"at {view.prices}"] if view.prices else []),
        *(f"left in buckets: {left_words(folder)}" for folder in view.left_in_buckets if folder.bytes != 0),
        _time(view),
    ]


def _time(view: RunView) -> str:
    """Return the time since the launch, and which clock it and the lines below are on."""
    passed = duration(view.elapsed_ms)
    if view.clock_factor == 1:
        return f"{passed} since the launch"
    wall = duration(round(view.wall_seconds * 1000))
    return f"{passed} on the run's clock ({view.clock_factor:g}x; {wall} by the wall), as are times below"


def node_rows(view: RunView) -> list[tuple[str, ...]]:
    """Return the heading and one row for each node."""
    shares = any(node.groups for node in view.nodes)
    rows: list[tuple[str, ...]] = [
        ("node", "market", "zone", "status", "age", "rate", *(["groups"] if shares else [])),
    ]
    for node in view.nodes:
        age, rate = duration(node.age_ms), hourly(node.micro_usd_per_hour)
        groups = [groups_text(node.groups)] if shares else []
        name = short_name(view.name, node.name)
        if node.role == "trainer" and not name.startswith("trainer"):
            name += " (trainer)"
        rows.append((name, node.market, node.zone, node.status, age, rate, *groups))
    return rows


def event_text(line: EventLine, run_name: str) -> str:
    """Return one event as a line: time (run's clock), source, kind and text."""
    source = short_name(run_name, line.source)
    text = line.text if line.text != line.kind else ""
    return f"{duration(max(0, line.elapsed_ms)):>10}  {source:<12} {line.kind} {text}".rstrip()
