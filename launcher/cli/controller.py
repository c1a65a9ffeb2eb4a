"""`spotrl controller`: the process managing one run. `launch` starts the process detached; users may start it too."""

import logging
import time
from importlib.metadata import version
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.controller.run_process import run_controller
from launcher.decide.facts import OVER
from launcher.exit_codes import ExitCode
from launcher.ledger.store import find_run
from launcher.runs.own_folder import check_own_folder
from launcher.runs.service import remove_service
from launcher.runs.views import run_view


@click.command()
@click.argument("run_name", metavar="RUN")
@click.pass_obj
def controller(sessions: sessionmaker[Session], run_name: str) -> ExitCode:
    """Manage RUN until its end: buy and release nodes, record costs.

    `launch` and `resume` start the controller. The controller keeps no state in memory, so a killed controller can be
    started again at any moment. A run has one controller at a time. The exit code is 0 after the run's end; the
    controller then removes the service installed by `launch --service`.

    \b
    Example:
      spotrl controller digits
    """
    handler = logging.StreamHandler()
    handler.setFormatter(utc_format())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.info("spotrl %s looks after %s, from %s", version("spotrl"), run_name, Path(__file__).parents[2])
    with sessions() as session:
        check_own_folder(find_run(session, run_name))
    run_controller(sessions, run_name)
    if run_view(sessions, run_name).status not in OVER:
        return ExitCode.FAILURE  # lease lost to another controller: a service retries, in case the new holder dies
    remove_service(run_name)
    return ExitCode.OK


def utc_format() -> logging.Formatter:
    """Return log lines with UTC times, like those of nodes: a local time is there twice when summer time ends."""
    found = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    found.converter = time.gmtime
    return found
