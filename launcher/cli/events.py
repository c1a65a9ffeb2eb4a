"""`spotrl events`: show all events of a run in order."""

import json
import time
from dataclasses import asdict

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.cli.status import event_text
from launcher.ledger.store import find_run
from launcher.runs.runs import still_running
from launcher.runs.views import event_lines, last_ids

LOOK_SECONDS = 0.5


@click.command()
@run_argument
@click.option("--follow", "-f", is_flag=True, help="Print new events until the run has ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per event, one per line.")
@click.pass_obj
def events(sessions: sessionmaker[Session], run_name: str, follow: bool, as_json: bool) -> None:
    """Show the events of RUN: status changes, nodes and engine.

    Times are on the run's clock.

    \b
    Example:
      spotrl events digits --follow
    """
    seen = (0, 0, 0)
    while True:
        is_over = not follow or not still_running(sessions, run_name)
        with sessions() as session:
            run = find_run(session, run_name)
            lines, seen = event_lines(session, run, seen), last_ids(session, run)
        for line in lines:
            click.echo(json.dumps(asdict(line)) if as_json else event_text(line, run_name))
        if is_over:
            return
        time.sleep(LOOK_SECONDS)
