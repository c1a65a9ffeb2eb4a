"""`spotrl panic`: stop every run and end everything of yours on the clouds, now."""

from collections.abc import Sequence
from typing import Any

import click

from launcher.cli.leftovers import Choice, Wish, take, what_to_take
from launcher.cluster.reaping import CloudRuns, Inventory, cloud_runs, stop_cloud_runs, stop_launches
from launcher.cluster.sky import Sky
from launcher.exit_codes import ExitCode
from launcher.market.offers import CLOUDS
from launcher.settings import ledger_path

REASON = "spotrl panic"


@click.command()
@what_to_take
def panic(**options: Any) -> ExitCode:
    """Stop every run on a cloud, live ones too, and end everything of yours there, in every region.

    Controllers are told to stop first, and SkyPilot to stop what it is launching; nodes are ended at once, without
    waiting for either, through the clouds' own APIs: it works when SkyPilot does not, and when the ledger is locked,
    broken or gone. Checkpoints in buckets stay, and runs of this machine (infra local) go on.

    Exit code 10 when something is left, or a region could not be asked; it is named.

    \b
    Example:
      spotrl panic --dry-run
      spotrl panic -y
    """
    from launcher.cluster.provide import cloud_apis

    wish, ledger = Wish(**options), ledger_path()
    live = cloud_runs(ledger)

    def choose(found: Inventory) -> Choice:
        notes = [f"These runs are stopped: {', '.join(live.names)}."] if live.names else []
        return Choice(goes=found, notes=[*notes, *_troubles(live)])

    def stop() -> Sequence[str]:
        troubles = _troubles(stop_cloud_runs(ledger, REASON))
        why = stop_launches(live.names, Sky()) if live.names else ""
        if why:
            troubles.append(f"SkyPilot did not stop its launches ({why}): what they make may come up after this")
        return troubles

    # A controller that cannot be told may buy anew as soon as the ledger is free again: it is told at the end, too.
    return take(
        wish,
        cloud_apis(wish.clouds or CLOUDS),
        choose,
        known=CLOUDS if live.trouble else live.clouds,
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
