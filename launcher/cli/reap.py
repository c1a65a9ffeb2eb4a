"""`spotrl reap`: end what runs left behind on the clouds."""

from typing import Any

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.leftovers import Choice, Wish, take, what_to_take, where_to_look
from launcher.cluster.local_nodes import recorded_clouds
from launcher.cluster.reaping import Inventory, known_clouds, live_runs, split
from launcher.exit_codes import ExitCode
from launcher.settings import runs_folder


@click.command()
@what_to_take
@click.pass_obj
def reap(sessions: sessionmaker[Session], **options: Any) -> ExitCode:
    """End machines, disks and the like that no live run wants.

    Whatever of yours no live run of this ledger wants is ended, in every region and on this machine. It is found by
    its labels on the clouds themselves, and nodes on this machine by the mark of their processes, so it does not
    matter who has forgotten it: no ledger is needed. What is found is listed first. Runs that go on are left alone
    (`spotrl down RUN` ends one); a run of yours that another machine's ledger looks after is not known here, so look
    at the list.

    Exit code 10 when something is left, a region could not be asked, or another owner's things were left alone; each
    is named.

    \b
    Example:
      spotrl reap --dry-run
      spotrl reap -y
      spotrl reap --all-owners --account 123456789012 --dry-run
    """
    wish = Wish(**options)

    def choose(found: Inventory) -> Choice:
        live = live_runs(sessions)
        goes, stays = split(found, live)
        runs = sorted({one.run for one in stays.machines} | {one.run for one in stays.things} - {""})
        notes = [f"{run} is {live[run]}; `spotrl down {run}` ends it" for run in runs if run in live]
        return Choice(goes=goes, stays=stays, notes=notes)

    known = known_clouds(sessions) | recorded_clouds(runs_folder())
    return take(wish, where_to_look(wish), choose, known=known, late_too=False)
