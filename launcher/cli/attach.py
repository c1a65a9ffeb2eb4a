"""`spotrl attach`: follow a run that was started before."""

import click
from rich.console import Console
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.follow import Follow, Hangup, Terminated, can_ask, last_words, signals, watch
from launcher.cli.run_argument import run_argument
from launcher.exit_codes import ExitCode
from launcher.ledger.store import find_run
from launcher.runs.runs import release_seconds, still_running
from launcher.runs.views import run_view


@click.command()
@run_argument
@click.pass_obj
def attach(sessions: sessionmaker[Session], run_name: str) -> ExitCode:
    """Follow RUN on one screen until it ends.

    The screen shows progress, money, nodes and the last events. Keys: q leaves, s stops the run, l shows logs, ? helps.
    Ctrl-C asks whether to detach, continue or stop. Without a terminal, one line is printed for each change, and Ctrl-C
    leaves the run running. The exit code is that of `launch`.
    A run without a controller is not continued: `spotrl resume` does that, because it may buy nodes.

    \b
    Example:
      spotrl attach digits
    """
    with sessions() as session:
        run = find_run(session, run_name)
    follow = Follow(
        name=run_name,
        out=Console(),
        on_exit="ask" if can_ask() else "keep",
        release_seconds=release_seconds(run.infra),
        restarts_controller=False,
    )
    code = ExitCode.OK
    try:
        with signals():
            code = watch(sessions, follow, f"on {run.infra}")
    except (Hangup, Terminated):
        pass  # the run continues; only following ended
    for line in last_words(run_view(sessions, run_name), still_running(sessions, run_name)):
        follow.say(line)
    return code
