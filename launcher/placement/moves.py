"""Where the next node of a run is bought: zone after zone, then region after region, then on the other cloud.

what was tried + what the sites offer -> buy this option | wait until then | nothing is left

The rules, so that a run neither hangs on a place without capacity nor scatters over the world:

- A run is where its newest trainer is. Its rollout nodes are bought in that region, or not at all.
- A place that refused cools down, longer each time, half an hour at most; refusals of one burst count as one. A place
  that took a node back is left alone for a while if there is another. Of the places that may be asked, the cheapest
  comes first, whether it was ever asked or not.
- A stand-in (on demand, in a spot slot) works until a spot node has replaced it. One node at a time asks whether a
  place has spot capacity again; the others follow when its node has stayed for ten minutes.
- The trainer is asked for at home until its region was out for `trainer_wait_ms`; then everywhere, the least refused
  place first, so that every option is tried in the end. It never gives up by itself: money and deadline end a run.
- Rollout nodes of a region that was given up, or moved away from, are let go: nothing is paid for without a trainer.
- A denial (a quota, a permission) removes the option for the run. A run fails when no option for its trainer is left.
  A quota that nodes of ours use up is no denial: one of them ends soon, and the place is asked again.

Pure: no clock, no I/O. The same attempts in any order give the same answer.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

from engine.events import Market
from launcher.market.hazard import BURST_MS, bursts
from launcher.market.prices import time_ms
from launcher.placement.placement import Placement
from launcher.placement.value import COOL_MOST_MS, COOL_MS, most_in_one_zone

AGAIN_MS = 10_000
"""A trainer that was refused at home is asked for again after 10 s, 20 s, 40 s, ...: its spot nodes are paid for. So is
a node for which our own nodes leave no quota: it is free as soon as one of them has ended."""

GIVE_BACK_AFTER_MS = 600_000
"""Spot capacity that came back ten minutes ago is taken to stay."""

GIVE_BACK_GAP_MS = 1_800_000
"""A slot gives a stand-in back at most once in half an hour, so that it does not go back and forth."""

QUOTA_LAG_MS = 300_000
"""For so long after its end a node may still count against a quota."""


# --- what can be bought -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One thing that a role may be bought as, and what the same costs on demand: its worst case."""

    placement: Placement
    on_demand_micro_usd_per_hour: int

    @property
    def place(self) -> tuple[str, ...]:
        """What has or lacks capacity: a type in a zone (or anywhere in a region), in one market."""
        bought = self.placement
        return bought.cloud, bought.region, bought.zone, bought.instance_type, bought.market


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteOptions:
    """A region of a cloud with everything a run could be bought as there, each in order of preference."""

    cloud: str
    region: str
    trainer: tuple[Option, ...]
    rollout: tuple[Option, ...]
    """Spot of each zone and type, and on demand."""

    @property
    def place(self) -> tuple[str, str]:
        return self.cloud, self.region


# --- what was tried -----------------------------------------------------------------------------------


class Outcome(StrEnum):
    """How asking for a node went."""

    LIVE = "live"
    REFUSED = "refused"
    """There was no capacity."""
    DENIED = "denied"
    """The cloud will say no again: a quota, a permission."""
    FULL = "full"
    """Nodes of ours used up the quota; when one of them has ended, the cloud may say yes."""
    RECLAIMED = "reclaimed"
    ENDED = "ended"
    """In any other way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A node that was asked for. `up_ms`: when the cloud had it for us, however it ended; None: never."""

    name: str
    role: str
    option: Option
    requested_ms: int
    outcome: Outcome
    ended_ms: int | None = None
    up_ms: int | None = None
    evidence: str = ""
    is_quota_used_up: bool = False
    """Of a denial: the cloud's words name a quota that is used up, not one that is 0."""
    holds_in_its_zone_alone: bool = False
    """True of a denial if the zone lacks something, such as a subnet, that other zones of its region may have."""

    @property
    def was_up(self) -> bool:
        return self.up_ms is not None

    @property
    def place(self) -> tuple[str, ...]:
        return self.option.place

    @property
    def site(self) -> tuple[str, str]:
        return self.option.placement.cloud, self.option.placement.region


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRules:
    """How patient a run is (`recovery:` of the job). Milliseconds of the run's clock."""

    trainer_wait_ms: int = 600_000
    """A region that has no trainer for so long loses the run to the next."""
    on_demand: bool = True
    """Whether rollout nodes may be bought on demand when no zone of the region has had spot capacity for long."""

    @property
    def cool_down_ms(self) -> int:
        """A place that refused is left alone for so long, then twice as long, ... Who waits less also asks sooner."""
        return min(COOL_MS, self.trainer_wait_ms)

    @property
    def on_demand_after_ms(self) -> int:
        """Two cool-downs in vain: the first refusals of all zones were no accident."""
        return 3 * self.cool_down_ms


# --- what to do ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Nothing can be asked for before `until_ms`; None: before something else happens."""

    until_ms: int | None
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingLeft:
    """Every option was denied. `why` names each quota or permission."""

    why: str


Move = Option | Wait | NothingLeft


class Tried:
    """What was tried, sorted out once for all questions of a moment. In whatever order it is told, it is the same.

    What ended before `since_ms` is forgiven: the run was resumed then.
    """

    def __init__(self, attempts: Iterable[Attempt] = (), since_ms: int = 0) -> None:
        self.trainer: Attempt | None = None
        """The newest that is there, or on its way."""
        self.home: tuple[str, str] | None = None
        """Where the last trainer came up; None before the first."""
        self.trainers_refused: list[Attempt] = []
        """That no place had for us since the last one that came up."""
        self._since_ms = since_ms
        self._refused: defaultdict[tuple[str, ...], list[Attempt]] = defaultdict(list)
        self._full: defaultdict[tuple[str, ...], list[Attempt]] = defaultdict(list)
        self._live: defaultdict[tuple[str, ...], list[Attempt]] = defaultdict(list)
        self._lacked_ms: dict[tuple[str, ...], int] = {}
        self._taken: dict[tuple[str, ...], Attempt] = {}
        self._denied: dict[tuple[str, ...], Attempt] = {}
        self._live_in: Counter[str] = Counter()
        known = sorted(attempts, key=lambda attempt: (attempt.requested_ms, attempt.name))
        for attempt in known:
            waits = attempt.outcome is Outcome.DENIED and _is_full(attempt, known)
            self.add(replace(attempt, outcome=Outcome.FULL) if waits else attempt)

    def add(self, attempt: Attempt) -> None:
        """One that was asked for after all the others."""
        if attempt.role == "trainer":
            if attempt.outcome is Outcome.LIVE:
                self.trainer = attempt
            if attempt.was_up:
                self.home = attempt.site
                self.trainers_refused.clear()
        if attempt.was_up:
            self._refused.pop(attempt.place, None)
            self._full.pop(_quota(attempt.option), None)
        if attempt.ended_ms is not None and attempt.ended_ms < self._since_ms:
            return
        match attempt.outcome:
            case Outcome.LIVE:
                self._live_in[attempt.option.placement.zone] += attempt.role == "rollout"
                self._live[attempt.place].append(attempt)
            case Outcome.REFUSED | Outcome.FULL:
                if attempt.outcome is Outcome.REFUSED:
                    self._refused[attempt.place].append(attempt)
                    self._lacked(attempt)
                else:
                    self._full[_quota(attempt.option)].append(attempt)
                if attempt.role == "trainer":
                    self.trainers_refused.append(attempt)
            case Outcome.RECLAIMED:
                self._lacked(attempt)
                last = self._taken.get(attempt.place, attempt)
                self._taken[attempt.place] = max(last, attempt, key=_end)
            case Outcome.DENIED:
                held = attempt.place if attempt.holds_in_its_zone_alone else _quota(attempt.option)
                self._denied.setdefault(held, attempt)

    def _lacked(self, attempt: Attempt) -> None:
        self._lacked_ms[attempt.place] = max(_end(attempt)[0], self._lacked_ms.get(attempt.place, 0))

    @property
    def out_since_ms(self) -> int | None:
        """Since when no trainer can be had."""
        return min((attempt.requested_ms for attempt in self.trainers_refused), default=None)

    def refused(self, option: Option) -> list[Attempt]:
        """Refusals at a place since it last had a node for us, for want of capacity or of quota."""
        return [*self._refused.get(option.place, []), *self.full(option)]

    def full(self, option: Option) -> list[Attempt]:
        """Refusals for want of quota alone."""
        return self._full.get(_quota(option), [])

    def cools_until_ms(self, option: Option, cool_down_ms: int) -> int:
        """Until when a place is not asked: it refused, or nodes of ours use up its quota."""
        lacking = _cools_until_ms(self._refused.get(option.place, []), cool_down_ms)
        return max(lacking, _cools_until_ms(self.full(option), AGAIN_MS))

    def there_since_ms(self, option: Option) -> int | None:
        """Since when a place has had capacity, by the nodes that came up since it last lacked any. None: not known."""
        lacked_ms = self._lacked_ms.get(option.place, -1)
        ups = [attempt.up_ms for attempt in self._live[option.place] if attempt.up_ms is not None]
        return min((up_ms for up_ms in ups if up_ms > lacked_ms), default=None)

    def has_stayed(self, option: Option, now_ms: int) -> bool:
        """Return whether a place has had capacity for `GIVE_BACK_AFTER_MS`."""
        since_ms = self.there_since_ms(option)
        return since_ms is not None and now_ms >= since_ms + GIVE_BACK_AFTER_MS

    def is_on_trial(self, option: Option, now_ms: int) -> bool:
        """Return whether a node of ours is finding out if a place has capacity again."""
        if self.has_stayed(option, now_ms):
            return False
        is_asked = any(not attempt.was_up for attempt in self._live[option.place])
        return is_asked or self.there_since_ms(option) is not None

    def taken_until_ms(self, option: Option, cool_down_ms: int) -> int:
        """Until when a place that took a node back is left alone, if there is another."""
        last = self._taken.get(option.place)
        return 0 if last is None else _end(last)[0] + gap_ms(1, cool_down_ms, last.name)

    def is_denied(self, option: Option) -> bool:
        """Return whether a denial holds there: of a type in the whole region, as quotas do, or of the zone alone."""
        return _quota(option) in self._denied or option.place in self._denied

    def denials(self, role: str) -> str:
        """Each quota and permission, by the clouds' words."""
        words = (attempt.evidence for attempt in self._denied.values() if attempt.role == role)
        return "; ".join(dict.fromkeys(filter(None, words))) or "nothing on offer fits"

    def live_in(self, zone: str) -> int:
        """Rollout nodes that are there, or on their way."""
        return self._live_in[zone]


def home_of(tried: Tried, sites: Sequence[SiteOptions]) -> SiteOptions:
    """Where the run is at home: at its last trainer that came up, or where the plan begins."""
    return next((site for site in sites if site.place == tried.home), sites[0])


def site_of_run(tried: Tried, sites: Sequence[SiteOptions]) -> SiteOptions:
    """Where the run is now: at its live trainer, or at home."""
    here = tried.trainer.site if tried.trainer is not None else None
    return next((site for site in sites if site.place == here), home_of(tried, sites))


def next_trainer(tried: Tried, sites: Sequence[SiteOptions], rules: MoveRules, now_ms: int) -> Move:
    """Where to ask for the trainer."""
    if tried.trainer is not None:
        return Wait(until_ms=None, why="there is a trainer")
    at_home = [option for option in home_of(tried, sites).trainer if not tried.is_denied(option)]
    if at_home and not is_home_given_up(tried, rules, now_ms):
        out_since_ms = tried.out_since_ms
        gives_up_ms = None if out_since_ms is None else out_since_ms + rules.trainer_wait_ms
        return _least_refused(at_home, tried, AGAIN_MS, now_ms, gives_up_ms, rules.cool_down_ms)
    everywhere = [option for site in sites for option in site.trainer if not tried.is_denied(option)]
    if not everywhere:
        return NothingLeft(why=tried.denials("trainer"))
    return _least_refused(everywhere, tried, rules.cool_down_ms, now_ms)


def is_home_given_up(tried: Tried, rules: MoveRules, now_ms: int) -> bool:
    """Whether a trainer was looked for in vain for so long that rollout nodes need not wait for it any more."""
    out_since_ms = tried.out_since_ms
    return tried.trainer is None and out_since_ms is not None and now_ms >= out_since_ms + rules.trainer_wait_ms


def next_rollout(
    preferred: Option, nodes: int, tried: Tried, sites: Sequence[SiteOptions], rules: MoveRules, now_ms: int
) -> Move:
    """Where to ask for one of `nodes` rollout nodes. `preferred`: as planned, taken where it is to be had."""
    trainer = tried.trainer
    if trainer is None or (not trainer.was_up and tried.trainers_refused):
        return Wait(until_ms=None, why="the trainer comes first")
    here = next((site for site in sites if site.place == trainer.site), None)
    options = [option for option in here.rollout if not tried.is_denied(option)] if here is not None else []
    wanted = preferred.placement.market
    of_market = [option for option in options if option.placement.market is wanted]
    found = _cheapest_ready(preferred, nodes, of_market, tried, rules, now_ms)
    if isinstance(found, Option) or wanted is Market.ON_DEMAND or not rules.on_demand:
        return found
    firsts = (min((_end(attempt)[0] for attempt in tried.refused(option)), default=0) for option in of_market)
    if now_ms < max(firsts, default=0) + rules.on_demand_after_ms and of_market:
        return found
    steady = [option for option in options if option.placement.market is Market.ON_DEMAND]
    instead = _cheapest_ready(preferred, nodes, steady, tried, rules, now_ms)
    return instead if isinstance(instead, Option) else found


def back_to_spot(
    preferred: Option, nodes: int, tried: Tried, sites: Sequence[SiteOptions], rules: MoveRules, now_ms: int
) -> Move:
    """Return where to ask for the spot node that replaces a stand-in, which works until that node does.

    A place that lacked capacity is asked by one node at a time, until that node has stayed for `GIVE_BACK_AFTER_MS`.
    """
    here = next((site for site in sites if tried.trainer is not None and site.place == tried.trainer.site), None)
    options = [
        option
        for option in (here.rollout if here is not None else ())
        if option.placement.market is Market.SPOT
        and not tried.is_denied(option)
        and now_ms >= tried.taken_until_ms(option, rules.cool_down_ms)
        and not tried.is_on_trial(option, now_ms)
    ]
    if not options:
        return Wait(until_ms=None, why="spot capacity is not known to be back")
    return _cheapest_ready(preferred, nodes, options, tried, rules, now_ms)


def jitter(name: str) -> float:
    """In [0, 1), and the same for the same name, so that runs that lost together do not come back together."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest()) / 2**32


def gap_ms(refusals: int, first_ms: int, name: str, longest_ms: int = COOL_MOST_MS) -> int:
    """first (1 + jitter / 2) 2^(k - 1) after k refusals in a row. 10 minutes: 10 to 15, 20 to 30, 30, 30, ..."""
    return min(longest_ms, round(first_ms * (1 + jitter(name) / 2)) << min(refusals - 1, 20)) if refusals else 0


# --- how limits on the rate of launches work ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRate:
    """At most `per_minute` launches in the long run, and `burst` at once."""

    per_minute: int = 10
    burst: int = 5

    def next_ms(self, requested_ms: Iterable[int]) -> int:
        """From when on one more launch keeps the rate, after these. 10 a minute, burst 5: the sixth waits 6 s."""
        spacing_ms = -(-60_000 // self.per_minute)
        earned_ms = 0  # until when the launches so far use up the rate
        for at_ms in sorted(requested_ms):
            earned_ms = max(earned_ms, at_ms) + spacing_ms
        return earned_ms - self.burst * spacing_ms + spacing_ms if earned_ms else 0


# --- of attempts ----------------------------------------------------------------------------------------


def _end(attempt: Attempt) -> tuple[int, str]:
    return (attempt.requested_ms if attempt.ended_ms is None else attempt.ended_ms), attempt.name


def _quota(option: Option) -> tuple[str, ...]:
    cloud, region, _, instance_type, market = option.place
    return cloud, region, instance_type, market


def _is_full(denied: Attempt, known: Iterable[Attempt]) -> bool:
    """Return whether nodes of ours used up the quota that a denial names, or may have.

    Types of a family share a quota, so any node of the same region and market counts, until `QUOTA_LAG_MS` after its
    end. Over a quota of 0 there is no such node, and the denial is for good.
    """
    if not denied.is_quota_used_up:
        return False
    return any(
        held.site == denied.site
        and held.option.placement.market is denied.option.placement.market
        and held.requested_ms <= _end(denied)[0]
        and (held.ended_ms is None or held.ended_ms + QUOTA_LAG_MS > denied.requested_ms)
        for held in known
        if held.was_up
    )


def _cools_until_ms(refused: Sequence[Attempt], first_ms: int, longest_ms: int = COOL_MOST_MS) -> int:
    """The end of the newest refusal and a gap that grows with each burst of them."""
    if not refused:
        return 0
    at_ms, name = max(map(_end, refused))
    in_a_row = bursts(((attempt.requested_ms, _end(attempt)[0]) for attempt in refused), min(BURST_MS, first_ms))
    return at_ms + gap_ms(in_a_row, first_ms, name, longest_ms)


def _least_refused(
    options: Sequence[Option],
    tried: Tried,
    first_ms: int,
    now_ms: int,
    gives_up_ms: int | None = None,
    longest_ms: int = COOL_MOST_MS,
) -> Move:
    """The option that was refused least often, then the first; one that was refused just now waits its turn."""
    refused = [[attempt for attempt in tried.trainers_refused if attempt.place == option.place] for option in options]
    ready_ms = [_cools_until_ms(here, first_ms, longest_ms) for here in refused]
    ready = [number for number, at_ms in enumerate(ready_ms) if at_ms <= now_ms]
    if ready:
        return options[min(ready, key=lambda number: (len(refused[number]), number))]
    until_ms = min(ready_ms) if gives_up_ms is None else min([*ready_ms, gives_up_ms])
    return Wait(until_ms=until_ms, why=f"no capacity for a trainer in {_regions(options)}")


def _cheapest_ready(
    preferred: Option, nodes: int, options: Sequence[Option], tried: Tried, rules: MoveRules, now_ms: int
) -> Move:
    """The planned place, else the cheapest; at most half of the nodes in a zone where there are two."""
    if not options:
        return NothingLeft(why=tried.denials("rollout"))
    most = most_in_one_zone(nodes, len({option.placement.zone for option in options}))
    refused_until = [tried.cools_until_ms(option, rules.cool_down_ms) for option in options]
    ready = [number for number, until_ms in enumerate(refused_until) if until_ms <= now_ms]
    if not ready:
        market = options[0].placement.market.value.replace("_", " ")
        lacks = "quota" if all(map(tried.full, options)) else "capacity"
        return Wait(until_ms=min(refused_until), why=f"no {market} {lacks} in {_regions(options)}")

    def order(number: int) -> tuple[object, ...]:
        option = options[number]
        return (
            # Left alone for a while; if all are, the one that is soon to be asked again.
            max(0, tried.taken_until_ms(option, rules.cool_down_ms) - now_ms),
            tried.live_in(option.placement.zone) >= most,
            option.place != preferred.place,
            option.placement.micro_usd_per_hour,
            number,
        )

    return options[min(ready, key=order)]


def _regions(options: Iterable[Option]) -> str:
    names = list(dict.fromkeys(f"{option.placement.cloud} {option.placement.region}" for option in options))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more regions" if len(names) > 4 else "")


# --- prices of now ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a thing costs, who said so, and when."""

    micro_usd_per_hour: int
    source: str
    observed_at: str

    def is_newer_than(self, observed_at: str) -> bool:
        """A price without a date ("a snapshot of 2025") is older than any that has one."""
        return (time_ms(self.observed_at) or 0) > (time_ms(observed_at) or 0)


class PriceNow:
    """What clouds last said. An AWS spot price is a zone's; where a zone has none, its region's holds (zone "")."""

    def __init__(self, prices: Mapping[tuple[str, ...], Price] | None = None) -> None:
        self._prices = prices or {}

    def of(self, place: tuple[str, ...]) -> Price | None:
        """Of `Option.place`."""
        cloud, region, _, instance_type, market = place
        return self._prices.get(place) or self._prices.get((cloud, region, "", instance_type, market))


def repriced(site: SiteOptions, prices: PriceNow) -> SiteOptions:
    """The site at the prices of now; what nothing newer is known of keeps the plan's."""
    return replace(
        site,
        trainer=tuple(_repriced(option, prices) for option in site.trainer),
        rollout=tuple(_repriced(option, prices) for option in site.rollout),
    )


def _repriced(option: Option, prices: PriceNow) -> Option:
    now = prices.of(option.place)
    if now is None or not now.is_newer_than(option.placement.price_observed_at):
        return option
    return Option(
        placement=replace(
            option.placement,
            micro_usd_per_hour=now.micro_usd_per_hour,
            price_source=now.source,
            price_observed_at=now.observed_at,
        ),
        on_demand_micro_usd_per_hour=max(option.on_demand_micro_usd_per_hour, now.micro_usd_per_hour)
        if option.placement.market is Market.ON_DEMAND
        else option.on_demand_micro_usd_per_hour,
    )
