"""`spotrl reap`: end what runs left behind on the clouds."""

from typing import Any

import click
from sqlalchemy.orm import Session, sessionmaker

from launcher.cli.leftovers import Choice, Wish, take, what_to_take
from launcher.cluster.reaping import Inventory, known_clouds, live_runs, split
from launcher.exit_codes import ExitCode
from launcher.market.offers import CLOUDS


@click.command()
@what_to_take
@click.pass_obj
def reap(sessions: sessionmaker[Session], **options: Any) -> ExitCode:
    """End machines, disks and whatever else of yours no live run of this ledger wants, in every region.

    They are found by their labels on the clouds themselves, so it does not matter who has forgotten them. What is
    found is listed first. Runs that go on are left alone (`spotrl down RUN` ends one); a run of yours that another
    machine's ledger looks after is not known here, so look at the list.

    Exit code 10 when something is left, or a region could not be asked; it is named.

    \b
    Example:
      spotrl reap --dry-run
      spotrl reap -y
      spotrl reap --all-owners --account 123456789012 --dry-run
    """
    from launcher.cluster.provide import cloud_apis

    wish = Wish(**options)

    def choose(found: Inventory) -> Choice:
        live = live_runs(sessions)
        goes, stays = split(found, live)
        runs = sorted({one.run for one in stays.machines} | {one.run for one in stays.things} - {""})
        notes = [f"{run} is {live[run]}; `spotrl down {run}` ends it" for run in runs if run in live]
        return Choice(goes=goes, stays=stays, notes=notes)

    return take(wish, cloud_apis(wish.clouds or CLOUDS), choose, known=known_clouds(sessions), late_too=False)
