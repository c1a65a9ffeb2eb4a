"""`spotrl sync`: send the numbers that W&B or MLflow lack of a run that is over."""

import json
from dataclasses import asdict

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.exit_codes import ExitCode
from launcher.runs.late_numbers import send_late


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def sync(sessions: sessionmaker[Session], run_name: str, as_json: bool) -> int:
    """Send W&B and MLflow the numbers that they lack.

    The controller of a run sends its numbers to the sinks under `logging` in the job, and waits up to a minute for
    them at the run's end. A sink that was down then lacks some numbers. After the end of RUN, this command sends them
    from the ledger, into the same run of the sink. Each sink says which records it has, so none arrives twice.

    The clients and keys are those of this machine. Without the key of W&B the numbers are written to files, which
    `wandb sync` sends. Exit code 1: a sink still lacks numbers; repeat the command later.

    \b
    Example:
      spotrl sync digits
      spotrl sync digits --json
    """
    shipped = send_late(sessions, run_name)
    if as_json:
        click.echo(json.dumps({"run": run_name, "sinks": [asdict(one) for one in shipped]}))
    else:
        for one in shipped:
            place = f" ({one.where})" if one.where else ""
            numbers = f"{one.sent} of the {one.known} records of {run_name}"
            if one.is_offline:
                click.echo(f"{one.sink} was not asked; {numbers} are in files on this machine{place}")
            elif one.problem and not one.sent:  # the sink never said what it has
                click.echo(f"{one.sink} has an unknown number of the {one.known} records of {run_name}{place}")
            else:
                click.echo(f"{one.sink} has {numbers}{place}")
            if one.problem:
                click.echo(f"  {one.problem}", err=True)
    return ExitCode.OK if all(one.is_whole for one in shipped) else ExitCode.FAILURE
