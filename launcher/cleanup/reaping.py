"""Find our resources on the clouds by label, not by memory, and remove them.

look (every region of every account at once) -> removable resources -> VMs, then disks, then groups and roles -> look

`spotrl reap` removes resources that no live run of this ledger wants; `spotrl panic` removes everything. No state is
kept between two looks, so the process may be killed anywhere and started again. Promises:

A resource is gone when the cloud does not list the resource twice in a row: a VM in creation shows up late. A region
that does not answer is named and counts as left. The resources a VM depends on (its group, and its identity, with which
the VM can terminate itself) are not removed before the VM.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from launcher.clouds.base import (
    EVERYWHERE,
    CallerIdentity,
    CloudApi,
    CloudUnreachable,
    Instance,
    InstanceState,
    LoginNeeded,
    Resource,
)
from launcher.controller.lease import is_held
from launcher.decide.facts import OVER, Stage
from launcher.exit_codes import Failure
from launcher.ledger.models import LOCAL, ControllerLease, Node, Run
from launcher.ledger.store import current_status, open_ledger
from launcher.market.offers import Offer
from launcher.provision.sky.sky import Sky
from launcher.runs.runs import request_stop

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 16
"""Regions queried at the same time. Two clouds have about sixty regions, and a region without an answer takes 10 s."""

LOOK_SECONDS = 5.0
"""Time between two looks. A VM takes a minute or more to end; every look queries each region twice."""

SKY_SECONDS = 30.0
"""Longest wait for SkyPilot. SkyPilot's library takes 5 s to load, and VMs wait to be terminated meanwhile."""

PAID = ("disk", "address")
"""Kinds of resources that are billed by themselves and have no dependents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """A cloud with valid credentials. `owner`: only this owner's resources are read; None: all owners'."""

    api: CloudApi
    caller: CallerIdentity
    owner: str | None

    @property
    def cloud(self) -> str:
        return self.api.cloud


@dataclass(frozen=True, kw_only=True, slots=True)
class UncheckedRegion:
    """A cloud or region whose inventory could not be read. `region` is empty if the whole cloud is meant.

    `silent`: the cloud gave no answer, so a retry may succeed.
    """

    cloud: str
    region: str
    why: str
    silent: bool

    @property
    def place(self) -> str:
        return f"{self.cloud}/{self.region}" if self.region else self.cloud


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The VMs and other resources with our labels, without ended VMs, and the regions without an answer."""

    instances: tuple[Instance, ...] = ()
    resources: tuple[Resource, ...] = ()
    unchecked: tuple[UncheckedRegion, ...] = ()
    forbidden: tuple[UncheckedRegion, ...] = ()
    """Regions that refused to be read and where the ledger bought nothing: an organisation forbids them."""

    @property
    def is_empty(self) -> bool:
        return not self.instances and not self.resources

    @property
    def ids(self) -> list[str]:
        """Return every VM and resource as text: id, kind and region."""
        return [f"machine {instance.id} ({instance.cloud}/{instance.region})" for instance in self.instances] + [
            f"{resource.kind} {resource.id} ({resource.cloud}/{resource.region or EVERYWHERE})"
            for resource in self.resources
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleared:
    """The result of a cleanup: removed resources, remaining resources, and errors of clouds that refused a removal."""

    ended: tuple[str, ...]
    left: Inventory
    troubles: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        return self.left.is_empty and not self.left.unchecked


# --- looking -----------------------------------------------------------------------------------------


def sign_in(
    apis: Mapping[str, CloudApi],
    *,
    all_owners: bool = False,
    patience_s: float = 0.0,
    now_s: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> tuple[list[Account], list[UncheckedRegion]]:
    """Return the caller's account on every cloud, and the clouds that refused.

    A silent cloud is asked again for `patience_s` seconds, and is then returned with the clouds that refused.
    """
    until_s = now_s() + patience_s
    callers: dict[str, CallerIdentity | Failure] = {}
    waiting = dict(apis)
    while waiting:
        callers |= zip(waiting, _all_at_once(waiting.values(), _caller), strict=True)
        waiting = {cloud: api for cloud, api in waiting.items() if _may_answer_soon(callers[cloud])}
        if waiting and now_s() >= until_s:
            break
        if waiting:
            wait(min(LOOK_SECONDS, max(0.0, until_s - now_s())))
    accounts, refused = [], []
    for cloud, api in apis.items():
        caller = callers[cloud]
        if isinstance(caller, Failure):
            refused.append(_unchecked(cloud, "", caller))
        else:
            accounts.append(Account(api=api, caller=caller, owner=None if all_owners else caller.owner))
    return accounts, refused


def look(
    accounts: Sequence[Account],
    say: Callable[[str], None] = lambda text: None,
    bought: Collection[tuple[str, str]] | None = None,
) -> Inventory:
    """Return all VMs and resources with our labels, in every region of every account. `say` prints the progress.

    `bought`: (cloud, region) of every purchase in the ledger; these are read even if the cloud does not list them.
    None: not known, so a region that refuses may hold something.
    """
    unchecked: list[UncheckedRegion] = []
    forbidden: list[UncheckedRegion] = []
    places: list[tuple[Account, str]] = []
    for account, regions in zip(accounts, _all_at_once(accounts, _regions), strict=True):
        listed: Sequence[str] = ()
        if isinstance(regions, Failure):
            unchecked.append(_unchecked(account.cloud, "", regions))
        else:
            listed = regions
        with_nodes = {region for cloud, region in bought or () if cloud == account.cloud}
        places += [(account, region) for region in sorted({*listed, *with_nodes, account.api.home})]
    instances: list[Instance] = []
    resources: dict[tuple[str, str, str], Resource] = {}
    readable: set[str] = set()
    asked = 0
    for (account, region), answer in zip(places, _all_at_once(places, _in_region), strict=True):
        asked += 1
        say(f"looked at {asked} of {len(places)} regions ({account.cloud}/{region})")
        if isinstance(answer, Failure):
            failed = _unchecked(account.cloud, region, answer)
            known_empty = bought is not None and (account.cloud, region) not in bought and region != account.api.home
            (forbidden if known_empty and not failed.silent else unchecked).append(failed)
            continue
        if region != account.api.home:
            readable.add(account.cloud)
        instances += [instance for instance in answer[0] if instance.state is not InstanceState.GONE]
        # Each region may list the global resources.
        resources |= {(resource.cloud, resource.kind, resource.id): resource for resource in answer[1]}
    # A cloud that refuses every region lacks a permission: no organisation forbids them all.
    return Inventory(
        instances=tuple(instances),
        resources=tuple(resources.values()),
        unchecked=(*unchecked, *(refusal for refusal in forbidden if refusal.cloud not in readable)),
        forbidden=tuple(refusal for refusal in forbidden if refusal.cloud in readable),
    )


def split(inventory: Inventory, live_runs: Collection[str]) -> tuple[Inventory, Inventory]:
    """Split the inventory into removable and kept resources.

    Resources of live runs, and shared resources beside a live run, are kept.
    """
    resources: list[Instance | Resource] = [*inventory.instances, *inventory.resources]
    busy = {resource.cloud for resource in resources if resource.run in live_runs}

    def stays(resource: Instance | Resource) -> bool:
        return resource.run in live_runs or (not resource.run and resource.cloud in busy)

    return _chosen(inventory, lambda resource: not stays(resource)), replace(_chosen(inventory, stays), unchecked=())


def of_lost_runs(inventory: Inventory, local_runs: Collection[str]) -> tuple[Inventory, Inventory]:
    """Split the inventory into removable resources and kept nodes.

    The kept nodes are the nodes on this machine of the live runs in `local_runs`.
    """

    def goes(resource: Instance | Resource) -> bool:
        return resource.cloud != LOCAL or resource.run not in local_runs

    return _chosen(inventory, goes), replace(_chosen(inventory, lambda resource: not goes(resource)), unchecked=())


def of_owners(inventory: Inventory, accounts: Sequence[Account]) -> tuple[Inventory, Inventory]:
    """Split the inventory by owner: resources of the selected owners, and the rest."""
    owners = {account.cloud: account.owner for account in accounts}

    def is_theirs(resource: Instance | Resource) -> bool:
        return owners.get(resource.cloud) in (None, resource.owner)

    of_others = _chosen(inventory, lambda resource: not is_theirs(resource))
    return _chosen(inventory, is_theirs), replace(of_others, unchecked=())


def only_of(inventory: Inventory, runs: Collection[str]) -> Inventory:
    """Return the resources of these runs.

    The user has confirmed the list of these runs. Resources of the same runs that appear later are included.
    """
    return _chosen(inventory, lambda resource: resource.run in runs)


def _chosen(inventory: Inventory, is_chosen: Callable[[Instance | Resource], bool]) -> Inventory:
    return replace(
        inventory,
        instances=tuple(instance for instance in inventory.instances if is_chosen(instance)),
        resources=tuple(resource for resource in inventory.resources if is_chosen(resource)),
    )


def price_of(instance: Instance, offers: Iterable[Offer]) -> int | None:
    """Return the listed price in micro-dollars an hour, nearest zone first; None if no list has the type."""
    same_type = [
        offer
        for offer in offers
        if (offer.cloud, offer.region, offer.instance_type, offer.market)
        == (instance.cloud, instance.region, instance.instance_type, instance.market)
    ]
    exact = [offer for offer in same_type if instance.zone and instance.zone in (offer.zone, offer.zone_id)]
    return max((offer.micro_usd_per_hour for offer in exact or same_type), default=None)


# --- removal -----------------------------------------------------------------------------------------


def clear_away(
    accounts: Sequence[Account],
    may_go: Callable[[Inventory], Inventory],
    *,
    timeout_s: float,
    bought: Collection[tuple[str, str]] | None = None,
    say: Callable[[str], None] = lambda text: None,
    now_s: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Cleared:
    """Terminate and read the inventory again, until nothing can be ended any more or `timeout_s` seconds have passed.

    `may_go` returns the removable part of an inventory. Each inventory is filtered anew. `bought` is that of `look`.
    What is left then depends on a region that refuses, and waiting would not change that.
    """
    until_s = now_s() + timeout_s
    all_ids: dict[str, None] = {}
    calm = 0
    while True:
        whole = look(accounts, bought=bought)
        removable = may_go(whole)
        all_ids |= dict.fromkeys(removable.ids)
        is_blocked = not removable.instances and not any(
            removable_resources(account.cloud, removable, whole) for account in accounts
        )
        # Somebody else's live VM may end, and then the group that it uses can go.
        waits_for_nothing = removable.is_empty or (is_blocked and not whole.instances)
        calm = calm + 1 if waits_for_nothing and not any(place.silent for place in removable.unchecked) else 0
        troubles: tuple[str, ...] = ()
        if not removable.is_empty:
            say(f"ending {count_text(removable)}")
            troubles = _end_once(accounts, removable, whole)
        if calm == 2 or now_s() >= until_s:
            remaining_ids = set(removable.ids)
            return Cleared(
                ended=tuple(text for text in all_ids if text not in remaining_ids), left=removable, troubles=troubles
            )
        wait(min(LOOK_SECONDS, max(0.0, until_s - now_s())))


def _end_once(accounts: Sequence[Account], removable: Inventory, whole: Inventory) -> tuple[str, ...]:
    """Order the removal of every resource that can be removed now, one order per region. Return the clouds' errors."""
    orders: list[Callable[[], object]] = []
    for account in accounts:
        instances = [instance for instance in removable.instances if instance.cloud == account.cloud]
        resources = removable_resources(account.cloud, removable, whole)
        for region in sorted({instance.region for instance in instances}):
            orders.append(partial(account.api.end, [instance for instance in instances if instance.region == region]))
        for region in sorted({resource.region for resource in resources}):
            # Returned resources cannot be removed yet; the next look finds them again.
            orders.append(
                partial(account.api.remove, [resource for resource in resources if resource.region == region])
            )
    answers = _all_at_once(orders, lambda order: order())
    return tuple(dict.fromkeys(str(answer) for answer in answers if isinstance(answer, Failure)))


def removable_resources(cloud: str, removable: Inventory, whole: Inventory) -> list[Resource]:
    """Return a cloud's resources without a dependent VM. An unreachable region may hide a VM.

    A disk or address can go once its VM is gone; a group, rule or identity once all VMs of its run are gone.
    """
    alive = [instance for instance in whole.instances if instance.cloud == cloud]
    names, runs = {instance.name for instance in alive}, {instance.run for instance in alive}
    unseen = {refusal.region for refusal in whole.unchecked if refusal.cloud == cloud}

    def is_free(resource: Resource) -> bool:
        if resource.kind in PAID and resource.node:
            return resource.node not in names
        is_everywhere = resource.region in ("", EVERYWHERE)
        return (resource.run not in runs if resource.run else not runs) and not (is_everywhere and unseen)

    return [resource for resource in removable.resources if resource.cloud == cloud and is_free(resource)]


def count_text(inventory: Inventory) -> str:
    """Return the counts by kind: `3 x machine, 2 x disk`."""
    kinds = [*("machine" for _ in inventory.instances), *(resource.kind for resource in inventory.resources)]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "nothing"


# --- the ledger --------------------------------------------------------------------------------------


def live_runs(sessions: sessionmaker[Session]) -> dict[str, str]:
    """Return the unfinished runs with their status. Only their controllers manage their nodes."""
    with sessions() as session:
        statuses = {}
        for run in session.scalars(select(Run)):
            status = current_status(session, run)
            if status is not None and Stage(status.status) not in OVER:
                held = is_held(session.get(ControllerLease, run.id))
                statuses[run.name] = status.status if held else f"{status.status}, and no controller looks after it"
        return statuses


def bought_in(sessions: sessionmaker[Session]) -> set[tuple[str, str]]:
    """Return (cloud, region) of every node that this ledger ever requested."""
    with sessions() as session:
        return {(cloud, region) for cloud, region in session.execute(select(Node.cloud, Node.region).distinct())}


def known_clouds(sessions: sessionmaker[Session]) -> set[str]:
    """Return the clouds on which a run of this ledger was launched."""
    with sessions() as session:
        return {cloud for infra in session.scalars(select(Run.infra)) for cloud in infra.split(",")} - {LOCAL}


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudRuns:
    """The live runs of a ledger. `names`: runs on clouds. `local`: runs on this machine.

    `trouble`: error of reading the ledger or of stopping the runs, as text; empty on success.
    """

    names: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    clouds: tuple[str, ...] = ()
    """Clouds of past and present runs, where resources may be left."""
    bought: frozenset[tuple[str, str]] | None = frozenset()
    """(cloud, region) of every purchase; None: the ledger could not be read."""
    trouble: str = ""


def cloud_runs(ledger: Path) -> CloudRuns:
    """Return the runs that `stop_cloud_runs` would stop.

    A missing ledger has no runs; an error is returned as `trouble`.
    """
    return _with_ledger(ledger, lambda sessions: None)


def stop_cloud_runs(ledger: Path, reason: str) -> CloudRuns:
    """Request a stop of all runs on clouds from their controllers, so that the controllers buy nothing more."""

    def stop(sessions: sessionmaker[Session]) -> None:
        for name in _live_on_clouds(sessions):
            request_stop(sessions, name, reason)

    return _with_ledger(ledger, stop)


def stop_launches(runs: Sequence[str], sky: Sky, timeout_s: float = SKY_SECONDS) -> str:
    """Cancel SkyPilot's pending launches for these runs: SkyPilot's server works on after a controller has died.

    Returns the error as text; empty on success. Waits `timeout_s` at most.
    """
    answers: list[str] = []

    def stop() -> None:
        try:
            sky.cancel_all(runs)
            answers.append("")
        except Exception as error:  # SkyPilot may be missing, broken or busy: the clouds are queried all the same
            answers.append(next(iter(str(error).splitlines()), type(error).__name__))

    thread = Thread(target=stop, name="stop launches", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else f"no answer within {timeout_s:.0f} s"


def _with_ledger(ledger: Path, do: Callable[[sessionmaker[Session]], None]) -> CloudRuns:
    if not ledger.exists():
        return CloudRuns()
    runs = CloudRuns(bought=None)
    try:
        sessions = open_ledger(ledger)
        on_clouds = _live_on_clouds(sessions)
        local_runs = tuple(sorted(live_runs(sessions).keys() - set(on_clouds)))
        runs = CloudRuns(
            names=on_clouds,
            local=local_runs,
            clouds=tuple(sorted(known_clouds(sessions))),
            bought=frozenset(bought_in(sessions)),
        )
        do(sessions)
    except (Failure, SQLAlchemyError, OSError, LookupError, ValueError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        return replace(runs, trouble=f"{ledger} cannot be used ({first_line})")
    return runs


def _live_on_clouds(sessions: sessionmaker[Session]) -> tuple[str, ...]:
    with sessions() as session:
        on_clouds = set(session.scalars(select(Run.name).where(Run.infra != LOCAL)))
    return tuple(sorted(on_clouds & live_runs(sessions).keys()))


# --- queries -----------------------------------------------------------------------------------------


def _all_at_once(questions: Iterable[T], ask: Callable[[T], R]) -> Iterator[R | Failure]:
    """Yield every answer in the order of the questions, as answers arrive. A Failure is an answer."""

    def answer(question: T) -> R | Failure:
        try:
            return ask(question)
        except Failure as failure:
            return failure
        except Exception as error:  # an error in one region must not keep the other regions' VMs alive
            return CloudUnreachable(f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        yield from pool.map(answer, questions)


def _caller(api: CloudApi) -> CallerIdentity:
    return api.caller()


def _regions(account: Account) -> Sequence[str]:
    return account.api.regions()


def _in_region(place: tuple[Account, str]) -> tuple[Sequence[Instance], Sequence[Resource]]:
    account, region = place
    return account.api.instances(region, owner=account.owner), account.api.resources(region, owner=account.owner)


def _may_answer_soon(answer: object) -> bool:
    """Return whether another look in a few seconds may bring an answer. An expired login heals by its user alone."""
    return isinstance(answer, CloudUnreachable) and not isinstance(answer, LoginNeeded)


def _unchecked(cloud: str, region: str, failure: Failure) -> UncheckedRegion:
    return UncheckedRegion(cloud=cloud, region=region, why=str(failure), silent=_may_answer_soon(failure))
