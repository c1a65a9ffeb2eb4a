"""`spotrl controller`: the process that looks after one run. `launch` starts it, detached; so may anybody."""

import logging

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cluster.controller import run_controller


@click.command()
@click.argument("run_name", metavar="RUN")
@click.pass_obj
def controller(sessions: sessionmaker[Session], run_name: str) -> None:
    """Look after RUN until it is over: buy, replace, account, stop. Started by `launch` and `resume`.

    It keeps no state, so it may be killed at any moment and started again; a run has one at a time.

    \b
    Example:
      spotrl controller digits
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run_controller(sessions, run_name)
