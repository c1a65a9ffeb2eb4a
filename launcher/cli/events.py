"""`spotrl events`: show the events of a run in order."""

import json
import time
from dataclasses import asdict

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.cli.status import event_text
from launcher.ledger.models import Run
from launcher.ledger.store import find_run
from launcher.money import parse_duration
from launcher.runs.event_lines import KINDS, Seen, Wanted, new_events
from launcher.runs.runs import still_running
from launcher.runs.views import last_moment_ms, nodes_called

LOOK_SECONDS = 0.5


@click.command()
@run_argument
@click.option("--tail", type=click.IntRange(min=1), metavar="N", help="Only the newest N events.")
@click.option("--since", metavar="DURATION", help="Only events of the last 90m (run's clock).")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), metavar="KIND", help="Only this kind.")
@click.option("--node", help="Only this node, or all nodes of a slot (trainer, spot-0, ...).")
@click.option("--follow", "-f", is_flag=True, help="Print new events until the run has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event, one per line.")
@click.pass_obj
def events(
    sessions: sessionmaker[Session],
    run_name: str,
    tail: int | None,
    since: str | None,
    kinds: tuple[str, ...],
    node: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Show the events of RUN: status changes, nodes and engine.

    Times are on the run's clock. KIND is the third column, like gone or evaluated, and can be given several times. A
    broken connection to a node (node_missed) is shown if work has to be done again, or by --kind node_missed.

    \b
    Example:
      spotrl events digits --follow
      spotrl events digits --kind gone --kind notice --since 2h
    """
    with sessions() as session:
        since_ms = _since_ms(session, find_run(session, run_name), since) if since is not None else 0
    seen = Seen()
    while True:
        is_over = not follow or not still_running(sessions, run_name)
        with sessions() as session:
            run = find_run(session, run_name)
            nodes = [row.name for row in nodes_called(session, run, node)] if node is not None else []
            lines, seen = new_events(session, run, seen, Wanted(kinds=kinds, nodes=nodes, since_ms=since_ms))
        for line in lines[-tail:] if tail is not None else lines:
            click.echo(json.dumps(asdict(line)) if as_json else event_text(line, run_name))
        tail = None
        if is_over:
            return
        time.sleep(LOOK_SECONDS)


def _since_ms(session: Session, run: Run, since: str) -> int:
    try:
        return last_moment_ms(session, run) - parse_duration(since)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from None
