"""`spotrl panic`: stop every run and end everything of yours on the clouds, now."""

from collections.abc import Sequence
from typing import Any

import click

from launcher.cli.leftovers import Choice, Wish, take, what_to_take, where_to_look
from launcher.cluster.local_nodes import recorded_clouds
from launcher.cluster.reaping import CloudRuns, Inventory, cloud_runs, of_lost_runs, stop_cloud_runs, stop_launches
from launcher.cluster.sky import Sky
from launcher.exit_codes import ExitCode
from launcher.market.offers import CLOUDS
from launcher.settings import ledger_path, runs_folder

REASON = "spotrl panic"


@click.command()
@what_to_take
def panic(**options: Any) -> ExitCode:
    """Stop every run on a cloud and end everything of yours there.

    Live runs too, in every region. Controllers are told to stop first, and SkyPilot to stop what it is launching;
    nodes are ended at once, without waiting for either, through the clouds' own APIs: it works when SkyPilot does
    not, and when the ledger is locked, broken or gone. Checkpoints in buckets stay. Runs of this machine (infra
    local) go on if the ledger knows them; nodes here of any other run are ended.

    Exit code 10 when something is left, a region could not be asked, or another owner's things were left alone; each
    is named.

    \b
    Example:
      spotrl panic --dry-run
      spotrl panic -y
    """
    wish, ledger = Wish(**options), ledger_path()
    live = cloud_runs(ledger)

    def choose(found: Inventory) -> Choice:
        notes = [f"These runs are stopped: {', '.join(live.names)}."] if live.names else []
        goes, stays = of_lost_runs(found, live.local)
        return Choice(goes=goes, stays=stays, notes=[*notes, *_troubles(live)])

    def stop() -> Sequence[str]:
        troubles = _troubles(stop_cloud_runs(ledger, REASON))
        why = stop_launches(live.names, Sky()) if live.names else ""
        if why:
            troubles.append(f"SkyPilot did not stop its launches ({why}): what they make may come up after this")
        return troubles

    # A controller that cannot be told may buy anew as soon as the ledger is free again: it is told at the end, too.
    return take(
        wish,
        where_to_look(wish),
        choose,
        known=CLOUDS if live.trouble else {*live.clouds, *recorded_clouds(runs_folder())},
        late_too=True,
        first=stop,
        last=stop,
    )


def _troubles(runs: CloudRuns) -> list[str]:
    if not runs.trouble:
        return []
    return [
        f"{runs.trouble}; its controllers were not told to stop and may buy again. End them by hand: the processes "
        "called `spotrl controller RUN`"
    ]
