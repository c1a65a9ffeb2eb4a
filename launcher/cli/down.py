"""`spotrl down`: end a run, and wait until all its nodes are gone."""

import json

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.number import Number
from launcher.cli.run_argument import run_argument
from launcher.exit_codes import ExitCode
from launcher.ledger.store import find_run
from launcher.runs.runs import CLOUD_RELEASE_SECONDS, RELEASE_SECONDS, bring_down, release_seconds


@click.command()
@run_argument
@click.option(
    "--timeout",
    type=Number(least=0),
    help="Seconds to wait until every node is gone.  "
    f"[default: {RELEASE_SECONDS:g}, on clouds {CLOUD_RELEASE_SECONDS:g}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def down(sessions: sessionmaker[Session], run_name: str, timeout: float | None, as_json: bool) -> ExitCode:
    """End RUN: release every node, and wait until all are gone.

    The run's checkpoints and its records in the ledger are kept.

    Exit code 10 means: after the timeout, a node or process may still run and cost money. The output names each.

    \b
    Example:
      spotrl down digits
    """
    if timeout is None:
        with sessions() as session:
            timeout = release_seconds(find_run(session, run_name).infra)
    left = bring_down(sessions, run_name, timeout)
    if as_json:
        click.echo(json.dumps({"run": run_name, "left": left}))
    elif left:
        click.echo(f"Still there after {timeout:g} s: {', '.join(left)}. Try again, or see `spotrl logs {run_name}`.")
    else:
        click.echo(f"{run_name} is down; nothing of it is left running.")
    return ExitCode.TEARDOWN_INCOMPLETE if left else ExitCode.OK
