"""The earlier launches of a run as evidence on zones and quotas: refusals, cool-downs, quotas used up."""

from bisect import insort
from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Self

from engine.events import Market
from launcher.job.schema import Job
from launcher.market.hazard import BURST_MS, bursts
from launcher.money import HOUR_MS
from launcher.placement.options import Option
from launcher.placement.value import COOL_MOST_MS, COOL_MS

AGAIN_MS = 10_000
"""First retry delay in milliseconds; the delay doubles: 10 s, 20 s, 40 s, ... Used for a trainer refused in the home
region, because the run still pays for its spot nodes. Also used for a node without quota, because the quota is free
as soon as another node of the run has ended."""

GIVE_BACK_AFTER_MS = 600_000
"""Time in ms for which spot capacity must be back before the capacity is expected to stay."""

MOST_IN_A_ROW = 21
"""Bursts of refusals after which a cool-down doubles no more. The longest cool-down is reached long before."""

PRIOR_HAZARD, PRIOR_HAZARD_HOURS = 0.3, 6.0
"""Preemptions per node-hour before a run has seen any, and the node-hours that the prior weighs."""

PRIOR_OUT_HOURS, PRIOR_OUTAGES = 1.1, 2.0
"""Mean length of an outage before a run has seen any, and the outages that it weighs (tests/benchmarks/calibration.py:
H100 zones)."""

LOOK_MS = COOL_MOST_MS
"""Requests within half an hour, in milliseconds, are one look at a pool."""

ANSWERS, ANSWER_CHARACTERS = 3, 300
"""Most answers of clouds in the reason of a run that waits, and most characters of a line of each."""

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
    promoted_ms: int | None = None
    """Time at which the node took the role of the trainer. None: the node was bought for its role."""
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
    """True if rollout nodes may be bought on demand while no zone of the region has spot (waiting.py)."""

    promotes: bool = True
    """False: a lost trainer on spot is replaced by a new node, for a comparison (launcher/replay/baselines.py)."""

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return a job's rules: the wait for a trainer, and whether on-demand nodes may replace missing spot."""
        return cls(trainer_wait_ms=job.recovery.trainer_wait, on_demand=job.spot == "auto")

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """Time for which a pool's nodes were up, and their preemptions."""

    ms: int = 0
    preemptions: int = 0

    def more(self, ms: int, is_preempted: bool = False) -> "Watched":
        return Watched(ms=self.ms + ms, preemptions=self.preemptions + is_preempted)


class EndedAttempts:
    """Index of the ended attempts of a run. Attempts may be added in any order, each once; the index is the same.

    Attempts that ended before `since_ms`, when the run was resumed, do not count as refusals, preemptions or denials.
    """

    def __init__(self, since_ms: int = 0) -> None:
        self.since_ms = since_ms
        self.trainer_that_came: Attempt | None = None
        """The newest trainer that came up."""
        self.trainers_refused: list[Attempt] = []
        """Trainer requests that were refused since that trainer. All refusals are kept by their end, oldest first."""
        self.refused: defaultdict[tuple[str, ...], list[Attempt]] = defaultdict(list)
        """Refusals of a pool since the pool last gave a node."""
        self.full: defaultdict[tuple[str, ...], list[Attempt]] = defaultdict(list)
        """Refusals of a quota used up by nodes of the run, since the quota last allowed a node."""
        self.lacked_ms: dict[tuple[str, ...], int] = {}
        self.refused_looks: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
        """Numbers of the `LOOK_MS` in which a pool refused a node."""
        self.taken: dict[tuple[str, ...], Attempt] = {}
        self.watched: defaultdict[tuple[str, ...], Watched] = defaultdict(Watched)
        self.denied: dict[tuple[str, ...], Attempt] = {}
        """The first denial of each quota or zone."""
        self.undecided: list[Attempt] = []
        """Denials by a quota that no ended node held: final, unless a live node holds the quota."""
        self._came: dict[tuple[str, ...], tuple[int, str]] = {}
        self._held: defaultdict[tuple[str, ...], list[Attempt]] = defaultdict(list)

    def add(self, attempt: Attempt) -> None:
        """Add an attempt that has ended."""
        if attempt.was_up:
            self._came_up(attempt)
        if attempt.ended_ms is not None and attempt.ended_ms < self.since_ms:
            return
        if attempt.up_ms is not None and attempt.ended_ms is not None:
            self.watched[attempt.place] = self.watched[attempt.place].more(
                max(0, attempt.ended_ms - attempt.up_ms), attempt.outcome is Outcome.RECLAIMED
            )
        match attempt.outcome:
            case Outcome.REFUSED:
                self._lacked(attempt)
                self.refused_looks[attempt.place].add(end_text(attempt)[0] // LOOK_MS)
                self._keep(self.refused[attempt.place], attempt, attempt.place)
            case Outcome.FULL:
                self._keep(self.full[_quota(attempt.option)], attempt, _quota(attempt.option))
            case Outcome.RECLAIMED:
                self._lacked(attempt)
                last = self.taken.get(attempt.place, attempt)
                self.taken[attempt.place] = max(last, attempt, key=end_text)
            case Outcome.DENIED if not attempt.is_quota_used_up:
                deny(self.denied, attempt)
            case Outcome.DENIED:
                if any(_holds(held, attempt) for held in reversed(self._held[_account(attempt)])):
                    self.add(replace(attempt, outcome=Outcome.FULL))
                else:
                    self.undecided.append(attempt)

    def _came_up(self, attempt: Attempt) -> None:
        for key, refusals in ((attempt.place, self.refused), (_quota(attempt.option), self.full)):
            self._came[key] = max(order_of(attempt), self._came.get(key, order_of(attempt)))
            if key in refusals:
                refusals[key] = _since(refusals[key], self._came[key])
        last = self.trainer_that_came
        if attempt.role == "trainer" and (last is None or trainer_order(last) < trainer_order(attempt)):
            self.trainer_that_came = attempt
            self.trainers_refused = _since(self.trainers_refused, trainer_order(attempt))
        self._held[_account(attempt)].append(attempt)
        decided = [denied for denied in self.undecided if _holds(attempt, denied)]
        self.undecided = [denied for denied in self.undecided if not _holds(attempt, denied)]
        for denied in decided:
            self.add(replace(denied, outcome=Outcome.FULL))

    def _keep(self, refusals: list[Attempt], attempt: Attempt, key: tuple[str, ...]) -> None:
        if order_of(attempt) >= self._came.get(key, (-1, "")):
            insort(refusals, attempt, key=end_text)
        last = self.trainer_that_came
        if attempt.role == "trainer" and (last is None or order_of(attempt) >= trainer_order(last)):
            insort(self.trainers_refused, attempt, key=end_text)

    def _lacked(self, attempt: Attempt) -> None:
        self.lacked_ms[attempt.place] = max(end_text(attempt)[0], self.lacked_ms.get(attempt.place, 0))


class Tried:
    """All attempts of a run at one moment, for every question: the ended ones, and the live ones over them."""

    def __init__(self, attempts: Iterable[Attempt] = (), since_ms: int = 0) -> None:
        """Build the index from all attempts. The order of the attempts does not matter."""
        known = list(attempts)
        ended = EndedAttempts(since_ms)
        for attempt in known:
            if attempt.outcome is not Outcome.LIVE:
                ended.add(attempt)
        self._look(ended, [attempt for attempt in known if attempt.outcome is Outcome.LIVE])

    @classmethod
    def over(cls, ended: EndedAttempts, live: Iterable[Attempt]) -> Self:
        """Return the index of ended attempts that are known already, and of live ones. `ended` is not changed."""
        tried = cls.__new__(cls)
        tried._look(ended, live)
        return tried

    def _look(self, ended: EndedAttempts, live: Iterable[Attempt]) -> None:
        self._lacked_ms, self._taken, self._watched = ended.lacked_ms, ended.taken, ended.watched
        self._refused_looks = ended.refused_looks
        self._live: defaultdict[tuple[str, ...], list[Attempt]] = defaultdict(list)
        self._live_in: Counter[str] = Counter()
        self.trainer: Attempt | None = None
        """The newest trainer that is running or requested."""
        came = ended.trainer_that_came
        self.trainer_ended_ms = None if came is None else came.ended_ms
        """End of the newest trainer that came up and has ended."""
        up = []
        for attempt in sorted(live, key=order_of):
            self.add(attempt)
            if attempt.was_up:
                up.append(attempt)
                if attempt.role == "trainer" and (came is None or trainer_order(came) < trainer_order(attempt)):
                    came = attempt
        self.home: tuple[str, str] | None = None if came is None else came.site
        """Cloud and region of the last trainer that came up; None before the first trainer."""
        self._denied = dict(ended.denied)
        waits: list[Attempt] = []
        for denied in ended.undecided:
            if any(_holds(held, denied) for held in up):
                waits.append(replace(denied, outcome=Outcome.FULL))
            else:
                deny(self._denied, denied)
        refused_now: dict[tuple[str, ...], list[Attempt]] = {}
        full_now: dict[tuple[str, ...], list[Attempt]] = {}
        for attempt in waits:
            quota = _quota(attempt.option)
            full_now[quota] = sorted([*full_now.get(quota, ended.full.get(quota, [])), attempt], key=end_text)
        for attempt in up:
            quota = _quota(attempt.option)
            if attempt.place in ended.refused:
                refused_now[attempt.place] = _since(ended.refused[attempt.place], order_of(attempt))
            if quota in full_now or quota in ended.full:
                full_now[quota] = _since(full_now.get(quota, ended.full.get(quota, [])), order_of(attempt))
        # Live nodes change few of the lists; the others are those of the ended attempts.
        self._refused = ChainMap(refused_now, ended.refused)
        self._full = ChainMap(full_now, ended.full)
        full = [attempt for attempt in waits if attempt.role == "trainer"]
        refused = sorted(ended.trainers_refused + full, key=end_text) if full else ended.trainers_refused
        self.trainers_refused = refused if came is None else _since(refused, trainer_order(came))
        """Trainer requests that were refused since the last trainer came up."""
        never = [one for one in self._denied.values() if one.role == "trainer"]
        never = never if came is None else _since(never, trainer_order(came))
        self.trainers_failed = sorted([*self.trainers_refused, *never], key=end_text)
        """Trainer requests that were refused or denied since the last trainer came up, by their end."""

    def add(self, attempt: Attempt) -> None:
        """Add a live attempt. The attempt must be the newest so far."""
        if attempt.role == "trainer":
            self.trainer = attempt
        self._live_in[attempt.option.placement.zone] += attempt.role == "rollout"
        self._live[attempt.place].append(attempt)

    @property
    def out_since_ms(self) -> int | None:
        """Return the start of the current trainer outage: the time of the first refused request.

        None if no request was refused.
        """
        return min((attempt.requested_ms for attempt in self.trainers_refused), default=None)

    @property
    def out_of_on_demand_since_ms(self) -> int | None:
        """Return the time of the first refused request for a trainer on demand, in the current outage."""
        steady = (one for one in self.trainers_refused if one.option.placement.market is Market.ON_DEMAND)
        return min((attempt.requested_ms for attempt in steady), default=None)

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

    def hazard_per_hour(self, option: Option, now_ms: int) -> float:
        """Return the preemptions per node-hour of a pool, as this run has seen it, with a prior.

        Six hours without a preemption halve the prior of .3; one preemption at once makes .47 of it.
        """
        watched = self._watched.get(option.place, Watched())
        live_ms = sum(now_ms - attempt.up_ms for attempt in self._live[option.place] if attempt.up_ms is not None)
        hours = (watched.ms + live_ms) / HOUR_MS
        return (watched.preemptions + PRIOR_HAZARD * PRIOR_HAZARD_HOURS) / (hours + PRIOR_HAZARD_HOURS)

    def outage_hours(self, option: Option) -> float:
        """Return the mean length of a pool's outages, as this run has seen it, with a prior.

        Refusals within half an hour are one look, and say that the outage lasts half an hour. Four such half hours
        after one preemption: (2.2 + 2) / 3 = 1.4 h.
        """
        hours = PRIOR_OUT_HOURS * PRIOR_OUTAGES + len(self._refused_looks.get(option.place, ())) * LOOK_MS / HOUR_MS
        return hours / (PRIOR_OUTAGES + self._watched.get(option.place, Watched()).preemptions)

    def is_denied(self, option: Option) -> bool:
        """Return whether a denial covers the option.

        A quota covers an instance type in the whole region; a missing subnet covers the zone alone.
        """
        return _quota(option) in self._denied or option.place in self._denied

    def denials(self, role: str) -> str:
        """Return the cloud's message for each denied quota or permission, joined to one text.

        Further nodes of the trainer count as trainers.
        """
        denied = sorted(self._denied.values(), key=order_of)
        words = (one.evidence for one in denied if (one.role == "rollout") is (role == "rollout"))
        return "; ".join(dict.fromkeys(filter(None, words))) or "nothing on offer fits"

    def trainer_refusals(self) -> str:
        """Return the newest answers to requests for a trainer since the last trainer came up, as one text."""
        answers = (_brief(one.evidence) for one in reversed(self.trainers_failed) if one.evidence)
        return "; ".join(list(dict.fromkeys(answers))[:ANSWERS])

    def live_in(self, zone: str) -> int:
        """Return the number of rollout nodes in a zone that are running or requested."""
        return self._live_in[zone]


def _brief(evidence: str) -> str:
    """Return the first line of a cloud's answer, and the last one, which holds the advice."""
    lines = [line.strip()[:ANSWER_CHARACTERS] for line in evidence.splitlines() if line.strip()]
    return " ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))


def jitter(name: str) -> float:
    """Return a number in [0, 1) computed from the name: the same name always gives the same number.

    The number spreads retries: runs that lost their nodes together do not all retry at the same time.
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest()) / 2**32


def gap_ms(refusals: int, first_ms: int, name: str, longest_ms: int = COOL_MOST_MS) -> int:
    """Return first (1 + jitter / 2) 2^(k - 1), the wait after k refusals in a row.

    With a first wait of 10 minutes: 10 to 15, 20 to 30, 30, 30, ...
    """
    doubled = min(refusals, MOST_IN_A_ROW) - 1
    return min(longest_ms, round(first_ms * (1 + jitter(name) / 2)) << doubled) if refusals else 0


def end_text(attempt: Attempt) -> tuple[int, str]:
    return (attempt.requested_ms if attempt.ended_ms is None else attempt.ended_ms), attempt.name


def _quota(option: Option) -> tuple[str, ...]:
    cloud, region, _, instance_type, market = option.place
    return cloud, region, instance_type, market


def order_of(attempt: Attempt) -> tuple[int, str]:
    """Return the order of the requests."""
    return attempt.requested_ms, attempt.name


def trainer_order(attempt: Attempt) -> tuple[int, str]:
    """Return the order in which nodes became the trainer: by their request for it, or by their promotion."""
    return (attempt.requested_ms if attempt.promoted_ms is None else attempt.promoted_ms), attempt.name


def _since(refusals: Iterable[Attempt], came: tuple[int, str]) -> list[Attempt]:
    return [attempt for attempt in refusals if order_of(attempt) >= came]


def deny(denied: dict[tuple[str, ...], Attempt], attempt: Attempt) -> None:
    """Record a denial of its quota, or of its zone alone. The earliest denial of each is kept."""
    held = attempt.place if attempt.holds_in_its_zone_alone else _quota(attempt.option)
    denied[held] = min(denied.get(held, attempt), attempt, key=order_of)


def _account(attempt: Attempt) -> tuple[str, ...]:
    return (*attempt.site, attempt.option.placement.market)


def _holds(held: Attempt, denied: Attempt) -> bool:
    """Return whether a node of the run used up the quota named in a denial, or may have.

    Types of a family share a quota, so any node of the same region and market counts, until `QUOTA_LAG_MS` after the
    node's end. With a quota of 0 no node can hold the quota, and the denial is final.
    """
    return (
        denied.is_quota_used_up
        and _account(held) == _account(denied)
        and held.requested_ms <= end_text(denied)[0]
        and (held.ended_ms is None or held.ended_ms + QUOTA_LAG_MS > denied.requested_ms)
    )


def cooled_until_ms(refused: Sequence[Attempt], first_ms: int, longest_ms: int = COOL_MOST_MS) -> int:
    """Return the end of the newest refusal plus a gap that grows with each burst of refusals; 0 without refusals.

    `refused`: by their end, oldest first. After `MOST_IN_A_ROW` bursts the gap grows no more, so older refusals are not
    read.
    """
    if not refused:
        return 0
    at_ms, name = end_text(refused[-1])
    in_a_row, newest = 0, 2 * MOST_IN_A_ROW
    while in_a_row < MOST_IN_A_ROW and newest < 2 * len(refused) + 2 * MOST_IN_A_ROW:
        read = refused[-newest:]
        in_a_row = bursts(((attempt.requested_ms, end_text(attempt)[0]) for attempt in read), min(BURST_MS, first_ms))
        newest *= 2
    return at_ms + gap_ms(in_a_row, first_ms, name, longest_ms)
