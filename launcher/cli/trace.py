"""`spotrl trace`: write a timeline of a run's workers as a file for Perfetto."""

import json
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.ledger.store import find_run
from launcher.report.trace import chrome_trace
from launcher.whole_file import whole_file


@click.command()
@run_argument
@click.option(
    "--out", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Output file (default: ./RUN.trace.json)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the trace as JSON; write no file.")
@click.pass_obj
def trace(sessions: sessionmaker[Session], run_name: str, out: Path | None, as_json: bool) -> None:
    """Write a timeline of RUN's workers and nodes for Perfetto.

    The timeline shows the phases of every worker, the lifecycle of the nodes, iterations and regroups. The command
    also works during the run.

    Open the file at https://ui.perfetto.dev or chrome://tracing.

    \b
    Example:
      spotrl trace digits-ocr -o digits.json
    """
    with sessions() as session:
        run = find_run(session, run_name)
        name, made = run.name, json.dumps(chrome_trace(session, run))
    if as_json:
        click.echo(made)
        return
    path = out or Path(f"{name}.trace.json")
    with whole_file(path) as file:
        file.write(made)
    click.echo(f"{path}: open it at https://ui.perfetto.dev")
