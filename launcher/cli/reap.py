"""`spotrl reap`: terminate nodes and delete resources left behind by runs."""

from typing import Any

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cleanup.reaping import Inventory, bought_in, known_clouds, live_runs, split
from launcher.cli.leftovers import Choice, CleanupOptions, cleanup_options, take, where_to_look
from launcher.exit_codes import ExitCode
from launcher.provision.local.local_nodes import recorded_clouds
from launcher.settings import runs_folder


@click.command()
@cleanup_options
@click.pass_obj
def reap(sessions: sessionmaker[Session], /, **options: Any) -> ExitCode:
    """Terminate nodes and delete resources that no live run owns.

    The command finds your nodes, disks and other resources in every region by their labels on the cloud, and nodes on
    this machine by a mark on their processes. The search needs no ledger. The command prints the list, and asks
    before terminating anything.

    Live runs in the ledger are left alone (`spotrl down RUN` ends a run). Check the list for live runs started from
    another machine: the ledger does not contain them, so the command would terminate their nodes.

    Exit code 10 means: a resource is left, a region did not answer, or another owner's resources were left alone. The
    output names each case.

    \b
    Example:
      spotrl reap --dry-run
      spotrl reap -y
      spotrl reap --all-owners --account 123456789012 --dry-run
    """
    chosen = CleanupOptions(**options)

    def choose(found: Inventory) -> Choice:
        live = live_runs(sessions)
        goes, stays = split(found, live)
        runs = sorted({one.run for one in stays.instances} | {one.run for one in stays.resources} - {""})
        notes = [f"{run} is {live[run]}; `spotrl down {run}` ends it" for run in runs if run in live]
        return Choice(goes=goes, stays=stays, notes=notes)

    known = known_clouds(sessions) | recorded_clouds(runs_folder())
    return take(chosen, where_to_look(chosen), choose, known=known, bought=bought_in(sessions), late_too=False)
