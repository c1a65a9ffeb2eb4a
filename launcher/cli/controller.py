"""`spotrl controller`: the process that looks after one run. `launch` starts it, detached; so may anybody."""

import logging
from importlib.metadata import version
from pathlib import Path

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cluster.controller import run_controller
from launcher.cluster.reconcile import OVER
from launcher.cluster.runs import run_view
from launcher.cluster.service import remove_service
from launcher.exit_codes import ExitCode


@click.command()
@click.argument("run_name", metavar="RUN")
@click.pass_obj
def controller(sessions: sessionmaker[Session], run_name: str) -> ExitCode:
    """Look after RUN until it is over: buy, replace, account, stop. Started by `launch` and `resume`.

    It keeps no state, so it may be killed at any moment and started again; a run has one at a time. The exit code is 0
    when the run is over; then a service that was installed for it is removed.

    \b
    Example:
      spotrl controller digits
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.info("spotrl %s looks after %s, from %s", version("spotrl"), run_name, Path(__file__).parents[2])
    run_controller(sessions, run_name)
    if run_view(sessions, run_name).status not in OVER:
        return ExitCode.FAILURE  # its lease is lost: a service starts it again, in case the other one dies
    remove_service(run_name)
    return ExitCode.OK
