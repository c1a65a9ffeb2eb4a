"""`spotrl resume`: go on with a run whose controller died, or that was stopped."""

import json

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.cluster.runs import resume_run


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def resume(sessions: sessionmaker[Session], run_name: str, as_json: bool) -> None:
    """Start RUN's controller again, from the last checkpoint.

    Nodes that are still there are kept.

    \b
    Example:
      spotrl resume digits
    """
    pid = resume_run(sessions, run_name)
    if as_json:
        click.echo(json.dumps({"run": run_name, "controller": pid}))
    else:
        click.echo(f"{run_name} goes on, controlled by process {pid}. `spotrl status {run_name}` shows how.")
