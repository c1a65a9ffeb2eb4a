"""Cleanup shared by `spotrl reap` and `spotrl panic`: list, ask, terminate, and name every resource still left.

Progress goes to stderr. The list and the result go to stdout (one JSON object with --json).
"""

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

import click

from launcher.cleanup.reaping import (
    Account,
    Cleared,
    Inventory,
    UncheckedRegion,
    clear_away,
    count_text,
    look,
    of_owners,
    only_of,
    price_of,
    sign_in,
)
from launcher.cli.confirm import confirm
from launcher.cli.layout import print_table
from launcher.cli.number import Number
from launcher.clouds.base import CloudApi, Instance, Resource
from launcher.exit_codes import ExitCode, Failure
from launcher.ledger.models import LOCAL
from launcher.market.offers import CLOUDS, Offer, current_catalog
from launcher.money import duration, hourly
from launcher.provision.local.local_nodes import LocalNodes
from launcher.settings import home, runs_folder

SIGN_IN_SECONDS = 30.0
"""Longest wait for a cloud to identify the caller. A busy cloud may be slow; after the wait, it counts as silent."""


class CredentialsRefused(Failure):
    """No cloud accepts the credentials."""

    exit_code = ExitCode.CREDENTIALS


class NoCloudAnswered(Failure):
    """No cloud answered."""

    exit_code = ExitCode.TEARDOWN_INCOMPLETE


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanupOptions:
    """Options of a cleanup command, as given by the user."""

    clouds: tuple[str, ...] = ()
    all_owners: bool = False
    account: tuple[str, ...] = ()
    yes: bool = False
    dry_run: bool = False
    timeout: float = 600.0
    as_json: bool = False


def cleanup_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of both commands. The option names match the fields of `CleanupOptions`."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object. Progress goes to stderr."),
        click.option(
            "--timeout",
            type=Number(least=0),
            default=600.0,
            show_default=True,
            help="Seconds to wait until every node and resource is gone.",
        ),
        click.option("--dry-run", is_flag=True, help="List the nodes and resources; terminate nothing."),
        click.option("-y", "--yes", is_flag=True, help="Skip the confirmation before the cleanup."),
        click.option(
            "--account",
            multiple=True,
            metavar="ID",
            help="With --all-owners: id of the cloud account or project. Repeat for each cloud.",
        ),
        click.option(
            "--all-owners",
            is_flag=True,
            help="Include nodes and resources of other owners. Requires the account's id: with --account, or typed "
            "at a prompt.",
        ),
        click.option(
            "--cloud",
            "clouds",
            type=click.Choice(CLOUDS),
            multiple=True,
            help="Cloud to clean up (default: all clouds and this machine). Repeatable.",
        ),
    ):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Resources to terminate, resources to keep, and notes for the user."""

    goes: Inventory
    stays: Inventory = field(default_factory=Inventory)
    notes: Sequence[str] = ()


def where_to_look(chosen: CleanupOptions) -> dict[str, CloudApi]:
    """Return the APIs of the named clouds. If the user named no cloud, return all clouds and this machine."""
    from launcher.provision.provide import cloud_apis  # imports the clouds' libraries

    here = {} if chosen.clouds else {LOCAL: LocalNodes(runs_folder())}
    return {**cloud_apis(chosen.clouds or CLOUDS), **here}


def take(
    chosen: CleanupOptions,
    apis: Mapping[str, CloudApi],
    choose: Callable[[Inventory], Choice],
    *,
    known: Collection[str],
    bought: Collection[tuple[str, str]] | None,
    late_too: bool,
    first: Callable[[], Sequence[str]] = tuple,
    last: Callable[[], Sequence[str]] = tuple,
    clear: Callable[..., Cleared] = clear_away,
) -> ExitCode:
    """Run the whole cleanup command, and return its exit code.

    `known`: clouds expected to hold the user's resources. If a known cloud cannot be searched, the cleanup counts as
    incomplete.
    `bought`: (cloud, region) of every purchase in the ledger; None: not known.
    `late_too`: also terminate resources that appear during the cleanup, of any run. If False, the command terminates
    only resources of the runs in the list.
    `first` is called before the cleanup. `last` is called after the cleanup if `first` failed. Both return messages
    about failed steps. The user has to finish failed steps by hand.
    """
    accounts, refused = sign_in(apis, all_owners=chosen.all_owners, patience_s=min(SIGN_IN_SECONDS, chosen.timeout))
    unchecked = [one for one in refused if one.silent or one.cloud in {*known, *chosen.clouds}]
    _report_unchecked(refused, unchecked)
    here = [account for account in accounts if account.cloud == LOCAL]
    if accounts == here and look(here).is_empty:
        _raise_no_cloud(chosen, refused, first)
    _check_account(chosen, accounts)
    # List the resources of all owners. A user with a new login name would otherwise find nothing, and be misled.
    everybodys = look([replace(account, owner=None) for account in accounts], _progress, bought)
    found, others = of_owners(everybodys, accounts)
    choice = choose(found)
    choice = replace(choice, notes=[*choice.notes, *_of_others(others), *_of_forbidden(everybodys)])
    unchecked += found.unchecked
    _report_unchecked(found.unchecked, found.unchecked)
    offers = _offers()
    if not chosen.as_json:
        _show(choice, offers)
    document = {
        "found": _as_dicts(choice.goes, offers),
        "kept": _as_dicts(choice.stays, offers),
        "of_others": _as_dicts(others, offers),
        "notes": list(choice.notes),
        "accounts": {account.cloud: asdict(account.caller) for account in accounts},
    }
    if chosen.dry_run or (choice.goes.is_empty and not late_too):
        return _end(chosen, document, unchecked, Cleared(ended=(), left=Inventory()), others=others)
    if not chosen.yes:
        _confirm(choice)
    failed = list(first())
    runs = {one.run for one in choice.goes.instances} | {one.run for one in choice.goes.resources}
    cleared = clear(
        accounts,
        lambda inventory: choose(inventory).goes if late_too else only_of(choose(inventory).goes, runs),
        timeout_s=chosen.timeout,
        bought=bought,
        say=_say,
    )
    failed = list(last()) if failed else []
    unchecked = [one for one in unchecked if not one.region] + list(cleared.left.unchecked)
    return _end(chosen, document, unchecked, cleared, failed, others)


def _end(
    chosen: CleanupOptions,
    document: dict[str, Any],
    unchecked: Sequence[UncheckedRegion],
    cleared: Cleared,
    failed: Sequence[str] = (),
    others: Inventory | None = None,
) -> ExitCode:
    """Print the result, and return exit code 10 if any resource may still cost money.

    Resources with another owner's label also give exit code 10: the user may have created the resources under an
    earlier login name.
    """
    left_alone = others or Inventory()
    is_complete = cleared.left.is_empty and not unchecked and not failed and left_alone.is_empty
    code = ExitCode.OK if is_complete else ExitCode.TEARDOWN_INCOMPLETE
    if chosen.as_json:
        document |= {
            "dry_run": chosen.dry_run,
            "ended": list(cleared.ended),
            "left": [*cleared.left.ids, *failed],
            "unasked": [asdict(one) for one in unchecked],
            "troubles": list(cleared.troubles),
            "exit_code": int(code),
        }
        click.echo(json.dumps(document))
        return code
    if cleared.ended:
        click.echo(f"Gone: {', '.join(cleared.ended)}.")
    for trouble in (*cleared.troubles, *failed):
        click.echo(trouble)
    if not cleared.left.is_empty:
        click.echo(
            f"Still there: {', '.join(cleared.left.ids)}. It may cost money: try again, or use the cloud's console."
        )
    if unchecked:
        places = ", ".join(one.place for one in unchecked)
        click.echo(f"Not known: {places}. What is there may cost money; try again when it answers.")
    if chosen.dry_run:
        click.echo("Dry run: nothing was ended.")
    elif is_complete:
        click.echo("Nothing of it is left.")
    return code


def _raise_no_cloud(
    chosen: CleanupOptions, refused: Sequence[UncheckedRegion], first: Callable[[], Sequence[str]]
) -> NoReturn:
    """Raise an error, because no cloud was searched. With --yes, first stop the controllers from buying more nodes."""
    failed = first() if chosen.yes and not chosen.dry_run else ()
    words = "; ".join([*(one.why for one in refused), *failed])
    text = f"no cloud was looked at: {words}. What may run there has to be looked for by hand until this works"
    raise NoCloudAnswered(text) if any(one.silent for one in refused) else CredentialsRefused(text)


# --- words -------------------------------------------------------------------------------------------


def _show(choice: Choice, offers: Sequence[Offer]) -> None:
    goes = choice.goes
    if goes.is_empty:
        click.echo("Nothing was found.")
    if goes.instances:
        heading = ("machine", "node", "run", "owner", "where", "type", "market", "state", "age", "rate")
        print_table([heading, *(_row(one, offers) for one in goes.instances)])
    if goes.resources:
        print_table([("resource", "id", "run", "owner", "where", "size"), *map(_resource_row, goes.resources)])
    if not choice.stays.is_empty:
        stays = choice.stays
        runs = {node.run or "(all)" for node in stays.instances} | {part.run or "(all)" for part in stays.resources}
        click.echo(f"Left alone: {count_text(stays)} of {', '.join(sorted(runs))}.")
    for note in choice.notes:
        click.echo(note)


def _of_others(others: Inventory) -> list[str]:
    if others.is_empty:
        return []
    owners = sorted({one.owner for one in others.instances} | {one.owner for one in others.resources})
    return [f"Not yours, and left alone: {count_text(others)} of {', '.join(owners)}; --all-owners takes them too."]


def _of_forbidden(found: Inventory) -> list[str]:
    if not found.forbidden:
        return []
    places = ", ".join(one.place for one in found.forbidden)
    return [f"Refused, and nothing was bought there from this ledger: {places} ({found.forbidden[0].why})."]


def _row(instance: Instance, offers: Sequence[Offer]) -> tuple[str, ...]:
    price, age_ms = price_of(instance, offers), _age_ms(instance)
    return (
        instance.id,
        instance.name,
        instance.run,
        instance.owner,
        f"{instance.cloud}/{instance.zone or instance.region}",
        instance.instance_type,
        instance.market.value,
        instance.state.value,
        "unknown" if age_ms is None else duration(age_ms),
        "not priced" if price is None else hourly(price),
    )


def _resource_row(resource: Resource) -> tuple[str, ...]:
    size = "" if resource.size_gib is None else f"{resource.size_gib} GiB"
    return (
        resource.kind,
        resource.id,
        resource.run or "(all)",
        resource.owner,
        f"{resource.cloud}/{resource.region or 'global'}",
        size,
    )


def _as_dicts(found: Inventory, offers: Sequence[Offer]) -> list[dict[str, Any]]:
    instances = [
        {"kind": "machine", **asdict(one), "age_ms": _age_ms(one), "micro_usd_per_hour": price_of(one, offers)}
        for one in found.instances
    ]
    return instances + [asdict(one) for one in found.resources]


def _age_ms(instance: Instance) -> int | None:
    return None if instance.launched_ms is None else max(0, time.time_ns() // 1_000_000 - instance.launched_ms)


def _offers() -> Sequence[Offer]:
    """Return the offers with prices for the list; empty without a price table. The cleanup does not need prices."""
    try:
        return current_catalog(home() / "catalogs").all_offers()
    except Failure as failure:
        _say(f"no prices: {failure}")
        return ()


def _report_unchecked(refused: Iterable[UncheckedRegion], counted: Collection[UncheckedRegion]) -> None:
    for one in refused:
        expected = "" if one in counted else ", and nothing of yours is expected there"
        _say(f"{one.place} was not looked at{expected}: {one.why}")


def _progress(text: str) -> None:
    """Show progress as one changing line on a terminal. Print nothing to a log."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", nl=False, err=True)


def _say(text: str) -> None:
    click.echo(f"\r\033[K{text}" if sys.stderr.isatty() else text, err=True)


# --- asking ------------------------------------------------------------------------------------------


def is_a_person() -> bool:
    """Return True if a user at a terminal can answer questions."""
    return sys.stdin.isatty()


def _check_account(chosen: CleanupOptions, accounts: Sequence[Account]) -> None:
    """With --all-owners, require the id of each cloud account. Raises UsageError if an id is missing or different."""
    if not chosen.all_owners:
        return
    typed = set(chosen.account)
    for account in accounts:
        if account.cloud == LOCAL:
            continue  # local nodes belong to the current user
        wanted = account.caller.account
        if wanted not in typed and not typed and is_a_person():
            typed.add(
                click.prompt(f"This ends what anybody has in {account.cloud}. Type the id of the account", err=True)
            )
        if wanted not in typed:
            raise click.UsageError(
                f"these credentials are for another {account.cloud} account than the one that was named; say which you "
                "mean: --account ID, once for each cloud, or leave --all-owners out"
            )


def _confirm(choice: Choice) -> None:
    if not is_a_person():
        raise click.UsageError("nobody can be asked here; look at the list with --dry-run, then add -y")
    confirm(f"End {count_text(choice.goes)}?", default=False, declined="Nothing was ended.")
