"""`spotrl panic`: stop every cloud run and terminate all your cloud nodes and resources, now."""

from collections.abc import Sequence
from typing import Any

import click

from launcher.cleanup.reaping import CloudRuns, Inventory, cloud_runs, of_lost_runs, stop_cloud_runs, stop_launches
from launcher.cli.leftovers import Choice, CleanupOptions, cleanup_options, take, where_to_look
from launcher.exit_codes import ExitCode
from launcher.market.offers import CLOUDS
from launcher.provision.local.local_nodes import recorded_clouds
from launcher.provision.sky.sky import Sky
from launcher.settings import ledger_path, runs_folder

REASON = "spotrl panic"


@click.command()
@cleanup_options
def panic(**options: Any) -> ExitCode:
    """Stop all cloud runs and terminate all your cloud nodes now.

    The command terminates nodes and deletes disks and other resources in every region, of live runs too. First,
    controllers get the order to stop, and SkyPilot gets the order to stop its launches. Then the clouds' own APIs
    terminate the nodes without waiting for controllers or SkyPilot. The command also works when SkyPilot fails, and
    when the ledger is locked, broken or missing. Checkpoints in buckets stay.

    Live local runs (infra local) in the ledger continue. All remaining nodes on this machine are terminated.

    Exit code 10 means: a resource is left, a region did not answer, or another owner's resources were left alone. The
    output names each case.

    \b
    Example:
      spotrl panic --dry-run
      spotrl panic -y
    """
    chosen, ledger = CleanupOptions(**options), ledger_path()
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

    # A controller behind a locked ledger may buy again after the lock. Repeat a failed stop order after the cleanup.
    return take(
        chosen,
        where_to_look(chosen),
        choose,
        known=CLOUDS if live.trouble else {*live.clouds, *recorded_clouds(runs_folder())},
        bought=live.bought,
        late_too=True,
        first=stop,
        last=stop,
    )


def _troubles(runs: CloudRuns) -> list[str]:
    if not runs.trouble:
        return []
    return [
        f"{runs.trouble}; its controllers were not told to stop and may buy again. End them by hand: the processes "
        "whose command line ends in `controller RUN` (`pgrep -af ' controller '`)"
    ]
