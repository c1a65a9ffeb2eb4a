"""Decide where a run buys its next node: first other zones, then other regions, then the other cloud.

attempts so far + options of every site -> buy this option | wait until then | no option left

Two aims decide the rules: a run must not hang on a pool without capacity, and must not scatter over the world.

- A run is in the region of its newest trainer. Rollout nodes are bought in the same region only.
- A pool that refused a request cools down. The cool-down doubles with each refusal, up to half an hour. Refusals of one
  burst count as one refusal. A pool that preempted a node is avoided for a while if another pool is ready. The cheapest
  ready pool comes first, with or without earlier attempts.
- A stand-in (an on-demand node in a spot slot) works until a spot node has replaced the stand-in. One node at a time
  tests whether a pool has spot capacity again. The remaining slots follow after the test node has stayed for ten
  minutes.
- The trainer is requested in the home region until the home region has had no capacity for `trainer_wait_ms`. After the
  wait, the trainer is requested everywhere, the least refused pool first, and every option gets its turn. The search
  for a trainer has no end of its own: the budget or the deadline ends the run.
- Rollout nodes of a region that the run gave up or left are released, because a node without a trainer costs money and
  does no work.
- A denial (a quota, a permission) removes the option for the rest of the run. A run fails when no option for the
  trainer is left. A quota used up by the run's own nodes is no denial: a node will end soon and free the quota, and the
  run asks again.

Pure: no clock, no I/O. The result does not depend on the order of the attempts.
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
"""First retry delay in milliseconds; the delay doubles: 10 s, 20 s, 40 s, ... Used for a trainer refused in the home
region, because the run still pays for its spot nodes. Also used for a node without quota, because the quota is free
as soon as another node of the run has ended."""

GIVE_BACK_AFTER_MS = 600_000
"""Spot capacity that came back ten minutes ago is expected to stay. Milliseconds."""

GIVE_BACK_GAP_MS = 1_800_000
"""Minimum time between two give-backs of a slot, in milliseconds. Half an hour keeps the slot from going back and
forth."""

QUOTA_LAG_MS = 300_000
"""Time after a node's end during which the cloud may still count the node against a quota, in milliseconds."""


# --- options ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An offer that a role may buy, and the on-demand price of the same instance type (the worst case)."""

    placement: Placement
    on_demand_micro_usd_per_hour: int

    @property
    def place(self) -> tuple[str, ...]:
        """Return the key of the pool that has or lacks capacity.

        A pool is an instance type in a zone (or in a whole region), spot or on-demand.
        """
        bought = self.placement
        return bought.cloud, bought.region, bought.zone, bought.instance_type, bought.market


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteOptions:
    """A region of a cloud and every offer that a run could buy in the region, in order of preference."""

    cloud: str
    region: str
    trainer: tuple[Option, ...]
    rollout: tuple[Option, ...]
    """Spot offers of every zone and instance type, and the on-demand offers."""

    @property
    def place(self) -> tuple[str, str]:
        return self.cloud, self.region


# --- attempts -----------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """Result of a request for a node."""

    LIVE = "live"
    REFUSED = "refused"
    """The cloud had no capacity."""
    DENIED = "denied"
    """The cloud will refuse again: a quota, a permission."""
    FULL = "full"
    """The run's own nodes used up the quota. The cloud may accept after the end of a node."""
    RECLAIMED = "reclaimed"
    ENDED = "ended"
    """The node ended in any way but a preemption."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A request for a node.

    `up_ms`: time at which the cloud reported the node as running; None if the node never ran.
    """

    name: str
    role: str
    option: Option
    requested_ms: int
    outcome: Outcome
    ended_ms: int | None = None
    up_ms: int | None = None
    evidence: str = ""
    is_quota_used_up: bool = False
    """True of a denial if the cloud's message names a quota that is used up. A quota of 0 is False."""
    holds_in_its_zone_alone: bool = False
    """True of a denial if the zone lacks something, such as a subnet, that another zone of the region may have."""

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
    """Waiting times of a run's failover (`recovery:` of the job file), in milliseconds of the run's clock."""

    trainer_wait_ms: int = 600_000
    """A run leaves a region that has had no trainer capacity for this long."""
    on_demand: bool = True
    """True if rollout nodes may be bought on demand after a long outage of spot in every zone of the region."""

    @property
    def cool_down_ms(self) -> int:
        """Return the first cool-down of a pool that refused; later cool-downs double.

        A shorter `trainer_wait_ms` also shortens the cool-down.
        """
        return min(COOL_MS, self.trainer_wait_ms)

    @property
    def on_demand_after_ms(self) -> int:
        """Return the wait before buying stand-ins: the first two cool-downs together.

        Every zone has refused again by then, so the first refusals were no accident.
        """
        return 3 * self.cool_down_ms


# --- moves --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Make no request before `until_ms`. None: wait for another event."""

    until_ms: int | None
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingLeft:
    """Every option was denied. `why` names each quota or permission."""

    why: str


Move = Option | Wait | NothingLeft


class Tried:
    """Index of all attempts, built once for every question at one moment. The order of the attempts does not matter.

    Attempts that ended before `since_ms`, when the run was resumed, do not count as refusals, preemptions or denials.
    """

    def __init__(self, attempts: Iterable[Attempt] = (), since_ms: int = 0) -> None:
        self.trainer: Attempt | None = None
        """The newest trainer that is running or requested."""
        self.home: tuple[str, str] | None = None
        """Cloud and region of the last trainer that came up; None before the first trainer."""
        self.trainers_refused: list[Attempt] = []
        """Trainer requests that were refused since the last trainer came up."""
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
        """Add an attempt. The attempt must be the newest so far."""
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
        """Return the start of the current trainer outage: the time of the first refused request.

        None if no request was refused.
        """
        return min((attempt.requested_ms for attempt in self.trainers_refused), default=None)

    def refused(self, option: Option) -> list[Attempt]:
        """Return the refusals of a pool since the pool last gave a node, for lack of capacity or of quota."""
        return [*self._refused.get(option.place, []), *self.full(option)]

    def full(self, option: Option) -> list[Attempt]:
        """Return the refusals for lack of quota only."""
        return self._full.get(_quota(option), [])

    def cools_until_ms(self, option: Option, cool_down_ms: int) -> int:
        """Return the end of the pool's cool-down after refusals, or after the run's own nodes used up the quota."""
        lacking = _cools_until_ms(self._refused.get(option.place, []), cool_down_ms)
        return max(lacking, _cools_until_ms(self.full(option), AGAIN_MS))

    def there_since_ms(self, option: Option) -> int | None:
        """Return the time since which the pool has had capacity, or None if unknown.

        The evidence is the live nodes that came up after the last refusal or preemption in the pool.
        """
        lacked_ms = self._lacked_ms.get(option.place, -1)
        ups = [attempt.up_ms for attempt in self._live[option.place] if attempt.up_ms is not None]
        return min((up_ms for up_ms in ups if up_ms > lacked_ms), default=None)

    def has_stayed(self, option: Option, now_ms: int) -> bool:
        """Return whether a pool has had capacity for `GIVE_BACK_AFTER_MS`."""
        since_ms = self.there_since_ms(option)
        return since_ms is not None and now_ms >= since_ms + GIVE_BACK_AFTER_MS

    def is_on_trial(self, option: Option, now_ms: int) -> bool:
        """Return whether one of the run's nodes is testing if a pool has capacity again."""
        if self.has_stayed(option, now_ms):
            return False
        is_asked = any(not attempt.was_up for attempt in self._live[option.place])
        return is_asked or self.there_since_ms(option) is not None

    def taken_until_ms(self, option: Option, cool_down_ms: int) -> int:
        """Return the time until which a pool that preempted a node is avoided, if another pool is ready."""
        last = self._taken.get(option.place)
        return 0 if last is None else _end(last)[0] + gap_ms(1, cool_down_ms, last.name)

    def is_denied(self, option: Option) -> bool:
        """Return whether a denial covers the option.

        A quota covers an instance type in the whole region; a missing subnet covers the zone alone.
        """
        return _quota(option) in self._denied or option.place in self._denied

    def denials(self, role: str) -> str:
        """Return the cloud's message for each denied quota or permission, joined to one text."""
        words = (attempt.evidence for attempt in self._denied.values() if attempt.role == role)
        return "; ".join(dict.fromkeys(filter(None, words))) or "nothing on offer fits"

    def live_in(self, zone: str) -> int:
        """Return the number of rollout nodes in a zone that are running or requested."""
        return self._live_in[zone]


def home_of(tried: Tried, sites: Sequence[SiteOptions]) -> SiteOptions:
    """Return the home site of the run: the site of the last trainer that came up, or the first site of the plan."""
    return next((site for site in sites if site.place == tried.home), sites[0])


def site_of_run(tried: Tried, sites: Sequence[SiteOptions]) -> SiteOptions:
    """Return the current site of the run: the site of the live trainer, or the home site."""
    here = tried.trainer.site if tried.trainer is not None else None
    return next((site for site in sites if site.place == here), home_of(tried, sites))


def next_trainer(tried: Tried, sites: Sequence[SiteOptions], rules: MoveRules, now_ms: int) -> Move:
    """Return the option for the next trainer request, a wait, or `NothingLeft` if every option was denied."""
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
    """Return whether the home region has had no trainer for `trainer_wait_ms`.

    Rollout nodes then stop waiting for a trainer.
    """
    out_since_ms = tried.out_since_ms
    return tried.trainer is None and out_since_ms is not None and now_ms >= out_since_ms + rules.trainer_wait_ms


def next_rollout(
    preferred: Option, nodes: int, tried: Tried, sites: Sequence[SiteOptions], rules: MoveRules, now_ms: int
) -> Move:
    """Return the option for the next of `nodes` rollout nodes.

    The planned option `preferred` is taken if the pool is ready.
    """
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
    """Return the option for the spot node that replaces a stand-in. The stand-in works until the spot node does.

    A pool that lacked capacity is tested by one node at a time, until the test node has stayed for
    `GIVE_BACK_AFTER_MS`.
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
    """Return a number in [0, 1), equal for equal names.

    Runs that lost nodes at the same time then retry at different times.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest()) / 2**32


def gap_ms(refusals: int, first_ms: int, name: str, longest_ms: int = COOL_MOST_MS) -> int:
    """Return first (1 + jitter / 2) 2^(k - 1), the wait after k refusals in a row.

    With a first wait of 10 minutes: 10 to 15, 20 to 30, 30, 30, ...
    """
    return min(longest_ms, round(first_ms * (1 + jitter(name) / 2)) << min(refusals - 1, 20)) if refusals else 0


# --- launch rate ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRate:
    """Rate limit for launches: `per_minute` in the long run and `burst` at once."""

    per_minute: int = 10
    burst: int = 5

    def next_ms(self, requested_ms: Iterable[int]) -> int:
        """Return the earliest time at which one more launch keeps the rate.

        With 10 a minute and a burst of 5, the sixth launch waits 6 s.
        """
        spacing_ms = -(-60_000 // self.per_minute)
        earned_ms = 0  # end of the time that the launches so far use up
        for at_ms in sorted(requested_ms):
            earned_ms = max(earned_ms, at_ms) + spacing_ms
        return earned_ms - self.burst * spacing_ms + spacing_ms if earned_ms else 0


# --- helpers --------------------------------------------------------------------------------------------


def _end(attempt: Attempt) -> tuple[int, str]:
    return (attempt.requested_ms if attempt.ended_ms is None else attempt.ended_ms), attempt.name


def _quota(option: Option) -> tuple[str, ...]:
    cloud, region, _, instance_type, market = option.place
    return cloud, region, instance_type, market


def _is_full(denied: Attempt, known: Iterable[Attempt]) -> bool:
    """Return whether the run's own nodes used up the quota named in a denial, or may have.

    Types of a family share a quota, so any node of the same region and market counts, until `QUOTA_LAG_MS` after the
    node's end. With a quota of 0 no node can hold the quota, and the denial is final.
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
    """Return the end of the newest refusal plus a gap that grows with each burst of refusals; 0 without refusals."""
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
    """Return the ready option with the fewest refusals; the first in order wins a tie.

    An option refused just now waits for the end of its gap.
    """
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
    """Return the planned pool if ready, else the cheapest ready pool.

    With two zones or more, at most half of the nodes go to one zone.
    """
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
            # A pool that preempted a node is avoided for a while. If every pool is avoided, take the pool whose wait
            # ends first.
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


# --- current prices -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """A price with its source and its time."""

    micro_usd_per_hour: int
    source: str
    observed_at: str

    def is_newer_than(self, observed_at: str) -> bool:
        """Return whether this price is newer.

        A price without a date ("a snapshot of 2025") is older than any dated price.
        """
        return (time_ms(self.observed_at) or 0) > (time_ms(observed_at) or 0)


class PriceNow:
    """Latest prices from the clouds.

    AWS spot prices are per zone; if a zone has no price, the price of the region (zone "") holds.
    """

    def __init__(self, prices: Mapping[tuple[str, ...], Price] | None = None) -> None:
        self._prices = prices or {}

    def of(self, place: tuple[str, ...]) -> Price | None:
        """Return the latest price for an `Option.place`, or None."""
        cloud, region, _, instance_type, market = place
        return self._prices.get(place) or self._prices.get((cloud, region, "", instance_type, market))


def repriced(site: SiteOptions, prices: PriceNow) -> SiteOptions:
    """Return the site with the latest prices. An option without a newer price keeps the price of the plan."""
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
