"""Find what of ours is on the clouds, by its labels and not by memory, and take it away.

look (every region of every account at once) -> what may go -> machines, then disks, then what was made for them -> look

`spotrl reap` takes what no live run of this ledger wants, `spotrl panic` everything. Nothing is remembered between
two looks, so it may be killed anywhere and started again. Promises:

Gone is what the cloud does not list any more, twice in a row: a machine that was just being made shows up late.
A region that cannot be asked is named and counts as left. What a machine lives on (its group, its identity, by which
it can end itself) is not taken away before the machine.
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

from launcher.cluster.clouds.base import Caller, CloudApi, CloudUnreachable, Machine, MachineState, Thing
from launcher.cluster.lease import is_held
from launcher.cluster.reconcile import OVER, Stage
from launcher.cluster.runs import request_stop
from launcher.cluster.sky import Sky
from launcher.exit_codes import Failure
from launcher.ledger.billing import LOCAL
from launcher.ledger.models import ControllerLease, Run
from launcher.ledger.store import current_status, open_ledger
from launcher.market.offers import Offer

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 16
"""Regions asked at the same time: two clouds have about sixty, and one that does not answer takes 10 s."""

LOOK_SECONDS = 5.0
"""Between two looks. A machine takes a minute or more to end; every look asks each region twice."""

SKY_SECONDS = 30.0
"""SkyPilot's library takes 5 s to load, and machines wait to be ended meanwhile."""

EVERYWHERE = "global"
"""Region of a thing that belongs to no region."""

PAID = ("disk", "address")
"""Things that cost money by themselves, and nothing else lives on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """A cloud that knows who asks. `owner`: whose things are looked at; None: everybody's."""

    api: CloudApi
    caller: Caller
    owner: str | None

    @property
    def cloud(self) -> str:
        return self.api.cloud


@dataclass(frozen=True, kw_only=True, slots=True)
class Unasked:
    """A place that did not say what is there. No `region`: the whole cloud. `silent`: it may answer another time."""

    cloud: str
    region: str
    why: str
    silent: bool

    @property
    def place(self) -> str:
        return f"{self.cloud}/{self.region}" if self.region else self.cloud


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What carries our labels, without machines that have ended; and where nobody could look."""

    machines: tuple[Machine, ...] = ()
    things: tuple[Thing, ...] = ()
    unasked: tuple[Unasked, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.machines and not self.things

    @property
    def ids(self) -> list[str]:
        """Every machine and thing by its id, with what and where it is."""
        return [f"machine {one.id} ({one.cloud}/{one.region})" for one in self.machines] + [
            f"{one.kind} {one.id} ({one.cloud}/{one.region or EVERYWHERE})" for one in self.things
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleared:
    """How it went: what was taken away, what is left, and what a cloud said when it would not let something go."""

    ended: tuple[str, ...]
    left: Inventory
    troubles: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        return self.left.is_empty and not self.left.unasked


# --- looking -----------------------------------------------------------------------------------------


def sign_in(
    apis: Mapping[str, CloudApi],
    *,
    all_owners: bool = False,
    patience_s: float = 0.0,
    now_s: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> tuple[list[Account], list[Unasked]]:
    """Who asks, on every cloud; and those clouds that do not let them. A silent one is asked again, for a while."""
    until_s = now_s() + patience_s
    callers: dict[str, Caller | Failure] = {}
    waiting = dict(apis)
    while waiting:
        callers |= zip(waiting, _all_at_once(waiting.values(), _caller), strict=True)
        waiting = {cloud: api for cloud, api in waiting.items() if isinstance(callers[cloud], CloudUnreachable)}
        if waiting and now_s() >= until_s:
            break
        if waiting:
            wait(min(LOOK_SECONDS, max(0.0, until_s - now_s())))
    accounts, refused = [], []
    for cloud, api in apis.items():
        caller = callers[cloud]
        if isinstance(caller, Failure):
            refused.append(_unasked(cloud, "", caller))
        else:
            accounts.append(Account(api=api, caller=caller, owner=None if all_owners else caller.owner))
    return accounts, refused


def look(accounts: Sequence[Account], say: Callable[[str], None] = lambda text: None) -> Inventory:
    """Everything with our labels in every region of every account."""
    unasked: list[Unasked] = []
    places: list[tuple[Account, str]] = []
    for account, regions in zip(accounts, _all_at_once(accounts, _regions), strict=True):
        if isinstance(regions, Failure):
            unasked.append(_unasked(account.cloud, "", regions))
        else:
            places += [(account, region) for region in regions]
    machines: list[Machine] = []
    things: dict[tuple[str, str, str], Thing] = {}
    asked = 0
    for (account, region), found in zip(places, _all_at_once(places, _in_region), strict=True):
        asked += 1
        say(f"looked at {asked} of {len(places)} regions ({account.cloud}/{region})")
        if isinstance(found, Failure):
            unasked.append(_unasked(account.cloud, region, found))
            continue
        machines += [machine for machine in found[0] if machine.state is not MachineState.GONE]
        # What belongs to no region may be listed by each of them.
        things |= {(thing.cloud, thing.kind, thing.id): thing for thing in found[1]}
    return Inventory(machines=tuple(machines), things=tuple(things.values()), unasked=tuple(unasked))


def split(found: Inventory, live_runs: Collection[str]) -> tuple[Inventory, Inventory]:
    """What may go, and what is left alone: everything of a live run, and what all runs share while there is one."""
    everything: list[Machine | Thing] = [*found.machines, *found.things]
    busy = {one.cloud for one in everything if one.run in live_runs}

    def stays(one: Machine | Thing) -> bool:
        return one.run in live_runs or (not one.run and one.cloud in busy)

    return _chosen(found, lambda one: not stays(one)), replace(_chosen(found, stays), unasked=())


def of_lost_runs(found: Inventory, local_runs: Collection[str]) -> tuple[Inventory, Inventory]:
    """Return everything but the nodes here of these live runs, and those nodes."""

    def goes(one: Machine | Thing) -> bool:
        return one.cloud != LOCAL or one.run not in local_runs

    return _chosen(found, goes), replace(_chosen(found, lambda one: not goes(one)), unasked=())


def of_owners(found: Inventory, accounts: Sequence[Account]) -> tuple[Inventory, Inventory]:
    """What belongs to the owners that are looked at, and what to others."""
    owners = {account.cloud: account.owner for account in accounts}

    def is_theirs(one: Machine | Thing) -> bool:
        return owners.get(one.cloud) in (None, one.owner)

    others = _chosen(found, lambda one: not is_theirs(one))
    return _chosen(found, is_theirs), replace(others, unasked=())


def only_of(found: Inventory, runs: Collection[str]) -> Inventory:
    """What belongs to these runs: what a person was shown, and what of it shows up late."""
    return _chosen(found, lambda one: one.run in runs)


def _chosen(found: Inventory, wanted: Callable[[Machine | Thing], bool]) -> Inventory:
    return replace(
        found,
        machines=tuple(one for one in found.machines if wanted(one)),
        things=tuple(one for one in found.things if wanted(one)),
    )


def price_of(machine: Machine, offers: Iterable[Offer]) -> int | None:
    """Micro-dollars an hour by the price list, nearest place first; None where no list has it."""
    same = [
        offer
        for offer in offers
        if (offer.cloud, offer.region, offer.instance_type, offer.market)
        == (machine.cloud, machine.region, machine.instance_type, machine.market)
    ]
    exact = [offer for offer in same if machine.zone and machine.zone in (offer.zone, offer.zone_id)]
    return max((offer.micro_usd_per_hour for offer in exact or same), default=None)


# --- taking away -------------------------------------------------------------------------------------


def clear_away(
    accounts: Sequence[Account],
    may_go: Callable[[Inventory], Inventory],
    *,
    timeout_s: float,
    say: Callable[[str], None] = lambda text: None,
    now_s: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Cleared:
    """End it, and look until it is gone or the time is over. `may_go` chooses anew from what each look found."""
    until_s = now_s() + timeout_s
    seen: dict[str, None] = {}
    calm = 0
    while True:
        whole = look(accounts)
        found = may_go(whole)
        seen |= dict.fromkeys(found.ids)
        is_calm = found.is_empty and not any(place.silent for place in found.unasked)
        calm = calm + 1 if is_calm else 0
        troubles: tuple[str, ...] = ()
        if not found.is_empty:
            say(f"ending {count_text(found)}")
            troubles = _end_once(accounts, found, whole)
        if calm == 2 or now_s() >= until_s:
            left = set(found.ids)
            return Cleared(ended=tuple(one for one in seen if one not in left), left=found, troubles=troubles)
        wait(min(LOOK_SECONDS, max(0.0, until_s - now_s())))


def _end_once(accounts: Sequence[Account], found: Inventory, whole: Inventory) -> tuple[str, ...]:
    """One order for everything that may go now. What the clouds said against it."""
    orders: list[Callable[[], object]] = []
    for account in accounts:
        machines = [one for one in found.machines if one.cloud == account.cloud]
        things = things_that_may_go(account.cloud, found, whole)
        for region in sorted({one.region for one in machines}):
            orders.append(partial(account.api.end, [one for one in machines if one.region == region]))
        for region in sorted({one.region for one in things}):
            # What it returns cannot go yet: the next look finds it again.
            orders.append(partial(account.api.remove, [one for one in things if one.region == region]))
    answers = _all_at_once(orders, lambda order: order())
    return tuple(dict.fromkeys(str(answer) for answer in answers if isinstance(answer, Failure)))


def things_that_may_go(cloud: str, found: Inventory, whole: Inventory) -> list[Thing]:
    """Of a cloud's things those that no machine lives on, which may be one that nobody could see.

    A disk or an address goes once its machine is gone; a group, a rule, an identity once all of its run's are.
    """
    alive = [one for one in whole.machines if one.cloud == cloud]
    names, runs = {one.name for one in alive}, {one.run for one in alive}
    unseen = {one.region for one in whole.unasked if one.cloud == cloud}

    def is_free(thing: Thing) -> bool:
        if thing.kind in PAID and thing.node:
            return thing.node not in names
        is_everywhere = thing.region in ("", EVERYWHERE)
        return (thing.run not in runs if thing.run else not runs) and not (is_everywhere and unseen)

    return [one for one in found.things if one.cloud == cloud and is_free(one)]


def count_text(found: Inventory) -> str:
    """`3 x machine, 2 x disk`."""
    kinds = [*("machine" for _ in found.machines), *(thing.kind for thing in found.things)]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "nothing"


# --- the ledger --------------------------------------------------------------------------------------


def live_runs(sessions: sessionmaker[Session]) -> dict[str, str]:
    """Runs that are not over, and how they stand: their nodes are their controller's business."""
    with sessions() as session:
        found = {}
        for run in session.scalars(select(Run)):
            status = current_status(session, run)
            if status is not None and Stage(status.status) not in OVER:
                held = is_held(session.get(ControllerLease, run.id))
                found[run.name] = status.status if held else f"{status.status}, and no controller looks after it"
        return found


def known_clouds(sessions: sessionmaker[Session]) -> set[str]:
    """Clouds that a run of this ledger was launched on."""
    with sessions() as session:
        return {cloud for infra in session.scalars(select(Run.infra)) for cloud in infra.split(",")} - {LOCAL}


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudRuns:
    """Live runs on clouds of a ledger. `trouble`: why it cannot be read, or told, in words; empty when it can.

    `local`: live runs of this machine.
    """

    names: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    clouds: tuple[str, ...] = ()
    """Where its runs are, or were: something of them may be there still."""
    trouble: str = ""


def cloud_runs(ledger: Path) -> CloudRuns:
    """What `stop_cloud_runs` would stop. A ledger that is missing has no runs; one that fails is an answer."""
    return _with_ledger(ledger, lambda sessions: None)


def stop_cloud_runs(ledger: Path, reason: str) -> CloudRuns:
    """Ask the controllers of all runs on clouds to end them, and so to buy nothing more."""

    def stop(sessions: sessionmaker[Session]) -> None:
        for name in _live_on_clouds(sessions):
            request_stop(sessions, name, reason)

    return _with_ledger(ledger, stop)


def stop_launches(runs: Sequence[str], sky: Sky, timeout_s: float = SKY_SECONDS) -> str:
    """Have SkyPilot stop what it is launching for these runs: its server works on when a controller has died.

    Returns why that is not known to have worked, in words; empty when it has. Waits `timeout_s` at most.
    """
    answers: list[str] = []

    def stop() -> None:
        try:
            sky.cancel_all(runs)
            answers.append("")
        except Exception as error:  # SkyPilot may be missing, broken or busy: the clouds are asked all the same
            answers.append(next(iter(str(error).splitlines()), type(error).__name__))

    thread = Thread(target=stop, name="stop launches", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else f"no answer within {timeout_s:.0f} s"


def _with_ledger(ledger: Path, do: Callable[[sessionmaker[Session]], None]) -> CloudRuns:
    if not ledger.exists():
        return CloudRuns()
    found = CloudRuns()
    try:
        sessions = open_ledger(ledger)
        on_clouds = _live_on_clouds(sessions)
        here = tuple(sorted(live_runs(sessions).keys() - set(on_clouds)))
        found = CloudRuns(names=on_clouds, local=here, clouds=tuple(sorted(known_clouds(sessions))))
        do(sessions)
    except (Failure, SQLAlchemyError, OSError, LookupError, ValueError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        return replace(found, trouble=f"{ledger} cannot be used ({first_line})")
    return found


def _live_on_clouds(sessions: sessionmaker[Session]) -> tuple[str, ...]:
    with sessions() as session:
        on_clouds = set(session.scalars(select(Run.name).where(Run.infra != LOCAL)))
    return tuple(sorted(on_clouds & live_runs(sessions).keys()))


# --- asking ------------------------------------------------------------------------------------------


def _all_at_once(questions: Iterable[T], ask: Callable[[T], R]) -> Iterator[R | Failure]:
    """Every answer in the order of its question, as they come; a Failure is an answer."""

    def answer(question: T) -> R | Failure:
        try:
            return ask(question)
        except Failure as failure:
            return failure
        except Exception as error:  # what one region does to a client must not keep the others' machines alive
            return CloudUnreachable(f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        yield from pool.map(answer, questions)


def _caller(api: CloudApi) -> Caller:
    return api.caller()


def _regions(account: Account) -> Sequence[str]:
    return account.api.regions()


def _in_region(place: tuple[Account, str]) -> tuple[Sequence[Machine], Sequence[Thing]]:
    account, region = place
    return account.api.machines(region, owner=account.owner), account.api.things(region, owner=account.owner)


def _unasked(cloud: str, region: str, failure: Failure) -> Unasked:
    return Unasked(cloud=cloud, region=region, why=str(failure), silent=isinstance(failure, CloudUnreachable))
