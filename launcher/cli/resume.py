"""`spotrl resume`: continue a stopped or failed run, or a run with a dead controller."""

import json

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.runs.runs import resume_run


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def resume(sessions: sessionmaker[Session], run_name: str, as_json: bool) -> None:
    """Continue RUN from its last checkpoint with a new controller.

    Use the command after a stop or a failure, or if the controller died. Running nodes are kept.

    \b
    Example:
      spotrl resume digits
    """
    pid = resume_run(sessions, run_name)
    if as_json:
        click.echo(json.dumps({"run": run_name, "controller": pid}))
    else:
        click.echo(f"{run_name} goes on, controlled by process {pid}. `spotrl status {run_name}` shows how.")
