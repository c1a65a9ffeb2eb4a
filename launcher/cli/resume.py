"""`spotrl resume`: continue a stopped or failed run, or a run with a dead controller."""

import json
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.run_argument import run_argument
from launcher.cli.typed import typed
from launcher.job.values import DurationMs, MicroUsd, MicroUsdPerHour
from launcher.runs.new_limits import NewLimits
from launcher.runs.runs import resume_run


class _JobValue(click.ParamType):
    """A value written as in a job file, such as `$40` or `12h30m`."""

    def __init__(self, name: str, written: Any) -> None:
        """Take the metavariable of the help text, and the pydantic type of the job field."""
        self.name = name
        self._written = TypeAdapter(written)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the text. Raises click.BadParameter, with the allowed form."""
        try:
            return int(self._written.validate_python(value))
        except ValidationError as error:
            self.fail(str(error.errors()[0]["ctx"]["error"]), param, ctx)


@click.command()
@run_argument
@click.option("--max-total", type=_JobValue("dollars", MicroUsd), help="New budget of the run, with what it has spent.")
@click.option(
    "--max-hourly", type=_JobValue("dollars", MicroUsdPerHour), help="New limit on the price of all nodes per hour."
)
@click.option(
    "--max-judges",
    type=_JobValue("dollars", MicroUsd),
    help="New budget of the run's paid judges, with what they have spent; a part of the run's budget.",
)
@click.option(
    "--deadline",
    type=_JobValue("duration", DurationMs),
    help="Time from now in which the run should be done. Without --max-runtime the run also ends then.",
)
@click.option("--max-runtime", type=_JobValue("duration", DurationMs), help="Longest time from now until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def resume(
    sessions: sessionmaker[Session],
    run_name: str,
    max_total: int | None,
    max_hourly: int | None,
    max_judges: int | None,
    deadline: int | None,
    max_runtime: int | None,
    as_json: bool,
) -> None:
    """Continue RUN from its last checkpoint with a new controller.

    Use the command after a stop or a failure, or if the controller died. Running nodes are kept. A run that its budget
    or its deadline stopped needs a new limit, else it stops again at once. `spotrl status RUN` names the command if a
    budget stopped the run.

    \b
    Example:
      spotrl resume digits
      spotrl resume digits --max-total 60 --deadline 6h
    """
    limits = NewLimits(
        max_total_micro_usd=max_total,
        max_hourly_micro_usd=max_hourly,
        max_judges_micro_usd=max_judges,
        deadline_ms=deadline,
        max_runtime_ms=max_runtime,
    )
    pid = resume_run(sessions, run_name, limits, typed())
    if as_json:
        click.echo(json.dumps({"run": run_name, "controller": pid}))
    else:
        click.echo(f"{run_name} goes on, controlled by process {pid}. `spotrl status {run_name}` shows how.")
