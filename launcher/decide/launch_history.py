"""The earlier launches of a run as evidence on zones and quotas: refusals, cool-downs, quotas used up."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

from launcher.market.hazard import BURST_MS, bursts
from launcher.placement.options import Option
from launcher.placement.value import COOL_MOST_MS, COOL_MS

AGAIN_MS = 10_000
"""First retry delay in milliseconds; the delay doubles: 10 s, 20 s, 40 s, ... Used for a trainer refused in the home
region, because the run still pays for its spot nodes. Also used for a node without quota, because the quota is free
as soon as another node of the run has ended."""

GIVE_BACK_AFTER_MS = 600_000
"""Time in ms for which spot capacity must be back before the capacity is expected to stay."""

QUOTA_LAG_MS = 300_000
"""Time after a node's end during which the cloud may still count the node against a quota, in milliseconds."""


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
                self._taken[attempt.place] = max(last, attempt, key=end_text)
            case Outcome.DENIED:
                held = attempt.place if attempt.holds_in_its_zone_alone else _quota(attempt.option)
                self._denied.setdefault(held, attempt)

    def _lacked(self, attempt: Attempt) -> None:
        self._lacked_ms[attempt.place] = max(end_text(attempt)[0], self._lacked_ms.get(attempt.place, 0))

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

    def cools_until_ms(self, option: Option, cool_down_ms: int, longest_ms: int = COOL_MOST_MS) -> int:
        """Return the end of the pool's cool-down after refusals, or after the run's own nodes used up the quota."""
        lacking = cooled_until_ms(self._refused.get(option.place, []), cool_down_ms, longest_ms)
        return max(lacking, cooled_until_ms(self.full(option), AGAIN_MS))

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
        is_requested = any(not attempt.was_up for attempt in self._live[option.place])
        return is_requested or self.there_since_ms(option) is not None

    def taken_until_ms(self, option: Option, cool_down_ms: int) -> int:
        """Return the time until which a pool that preempted a node is avoided, if another pool is ready."""
        last = self._taken.get(option.place)
        return 0 if last is None else end_text(last)[0] + gap_ms(1, cool_down_ms, last.name)

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


def jitter(name: str) -> float:
    """Return a number in [0, 1) computed from the name: the same name always gives the same number.

    The number spreads retries: runs that lost their nodes together do not all retry at the same time.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest()) / 2**32


def gap_ms(refusals: int, first_ms: int, name: str, longest_ms: int = COOL_MOST_MS) -> int:
    """Return first (1 + jitter / 2) 2^(k - 1), the wait after k refusals in a row.

    With a first wait of 10 minutes: 10 to 15, 20 to 30, 30, 30, ...
    """
    return min(longest_ms, round(first_ms * (1 + jitter(name) / 2)) << min(refusals - 1, 20)) if refusals else 0


def end_text(attempt: Attempt) -> tuple[int, str]:
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
        and held.requested_ms <= end_text(denied)[0]
        and (held.ended_ms is None or held.ended_ms + QUOTA_LAG_MS > denied.requested_ms)
        for held in known
        if held.was_up
    )


def cooled_until_ms(refused: Sequence[Attempt], first_ms: int, longest_ms: int = COOL_MOST_MS) -> int:
    """Return the end of the newest refusal plus a gap that grows with each burst of refusals; 0 without refusals."""
    if not refused:
        return 0
    at_ms, name = max(map(end_text, refused))
    in_a_row = bursts(((attempt.requested_ms, end_text(attempt)[0]) for attempt in refused), min(BURST_MS, first_ms))
    return at_ms + gap_ms(in_a_row, first_ms, name, longest_ms)
