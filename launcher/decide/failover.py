"""Decide where a run buys its next node: first other zones, then other regions, then the other cloud.

attempts so far + options of every site -> buy this option | wait until then | no option left

A pool is an instance type in one zone (or in a whole region), spot or on-demand. Two aims decide the rules: a run must
not hang on a pool without capacity, and must not scatter over the world.

- A run is in the region of its newest trainer. Rollout nodes are bought in the same region only.
- A pool that refused a request cools down. The cool-down doubles with each refusal, up to half an hour. Refusals of one
  burst count as one refusal. A pool that preempted a node is avoided for a while if another pool is ready. The planned
  pool comes first, unless it has lost more hours than another. Then comes the pool with the cheapest hour at work: by
  its price, and the preemptions and the outages seen in it.
- A slot without spot waits, or gets a stand-in, by the price of waiting (waiting.py): on demand, or spot that costs
  much more than planned. A plan without predicted times buys a stand-in after `MoveRules.on_demand_after_ms`.
- A stand-in (an on-demand node, or dear spot, in a spot slot) works until a spot node has replaced the stand-in. One
  node at a time tests whether a pool has spot capacity again. The remaining slots follow after the test node has stayed
  for ten minutes.
- The trainer is requested in the home region until the home region has had no capacity for `trainer_wait_ms`. After the
  wait, the trainer is requested everywhere, the least refused pool first, and every option gets its turn. The search
  for a trainer has no end of its own: the budget or the deadline ends the run.
- A trainer on spot is bought by the rules of a rollout slot, and all slots are asked for at once: a node that is up
  takes the role of a lost trainer (promotion.py), so it waits for none.
- A run with its trainer on spot goes to another region that has spot where that pays (moving.py).
- Rollout nodes of a region that the run gave up or left are released, because a node without a trainer costs money and
  does no work. So are those of a run that has had no trainer in sight for five minutes.
- A denial (a quota, a permission) removes the option for the rest of the run. A run fails when no option for the
  trainer is left. A quota used up by the run's own nodes is no denial: a node will end soon and free the quota, and the
  run asks again.

Pure: no clock, no I/O. The result does not depend on the order of the attempts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.events import Market
from launcher.decide.launch_history import AGAIN_MS, MoveRules, Tried, cooled_until_ms, end_text
from launcher.market.pools import SAME_REGION
from launcher.money import duration
from launcher.placement.options import Option, SiteOptions
from launcher.placement.value import COOL_MOST_MS, DEAR, most_in_one_zone

ASK_MS, ASK_MOST_MS = 240_000, 480_000
"""First and longest cool-down of a pool that refused while the trainer waits for the node, in milliseconds. A request
costs nothing and an idle trainer does. Fitted: replays of tests/benchmarks/replay.py."""

IDLE_MS = 300_000
"""Time for which a run keeps rollout nodes without a trainer in sight, in milliseconds. A trainer that a cloud gives is
up within two or three minutes, and a spot node that is given back may be hard to get again. Assumed."""

GIVE_BACK_GAP_MS = 1_800_000
"""Minimum time between two give-backs of a slot, in milliseconds. Half an hour keeps the slot from going back and
forth."""


LAST_LOOK_MS = 120_000
"""Age of the newest refusal at home, in milliseconds, after which a run asks there once more before it moves."""

LOST_HOURS = 0.2
"""Node-hours that a preemption loses: the answer to a launch, and the cold start."""

ALL_OUT = SAME_REGION.mean
"""Chance that the slots of a zone wait for the end of its outage, because no other zone has capacity: zones of a region
are alike to this degree."""

GIVES_WAY = 1.1
"""The planned pool comes after others if its hour at work takes this many times as long as in the best pool, with what
preemptions and outages lose. One refused look alone does not reach it; four do. Assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """Buy a node for a slot without spot, on demand or dear spot, and why."""

    option: Option
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Make no request before `until_ms`. None: wait for another event."""

    until_ms: int | None
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NothingLeft:
    """Every option was denied. `why` names each quota or permission."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """Buy the trainer in another region, to which the run moves, and why."""

    option: Option
    why: str


Move = Option | StandIn | Elsewhere | Wait | NothingLeft

WhyStandIn = Callable[[Option, Sequence[Option], int], str | None]
"""(stand-in, spot options that lack capacity, time since which all of them do): why to buy the stand-in now, or None to
wait."""


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


def next_spot_trainer(
    preferred: Option,
    nodes: int,
    tried: Tried,
    sites: Sequence[SiteOptions],
    rules: MoveRules,
    now_ms: int,
    why_stand_in: WhyStandIn | None = None,
) -> Move:
    """Return the option for the next trainer of a plan with its trainer on spot.

    As for a rollout node, in the home region until that is given up, then in every region. A `preferred` option on
    demand asks for no spot.
    """
    if tried.trainer is not None:
        return Wait(until_ms=None, why="there is a trainer")
    here = sites if is_home_given_up(tried, rules, now_ms) else [home_of(tried, sites)]
    options = [option for site in here for option in site.trainer if not tried.is_denied(option)]
    if not any(not tried.is_denied(option) for site in sites for option in site.trainer):
        return NothingLeft(why=tried.denials("trainer"))
    return _of_market(preferred, nodes, options, tried, rules, now_ms, why_stand_in)


def is_home_given_up(tried: Tried, rules: MoveRules, now_ms: int) -> bool:
    """Return whether the home region has had no trainer for `trainer_wait_ms`.

    The home region's rollout nodes are then released, because they have no trainer to work for. A refusal of spot does
    not count where a trainer may be bought on demand: on demand was not asked for yet.
    """
    out_since_ms = tried.out_of_on_demand_since_ms if rules.on_demand else tried.out_since_ms
    return tried.trainer is None and out_since_ms is not None and now_ms >= out_since_ms + rules.trainer_wait_ms


def no_trainer_since_ms(tried: Tried, now_ms: int) -> int | None:
    """Return the time since which no node that is up or asked for can take the trainer's role; None: one can.

    A trainer that was asked for counts until its request, or one before it, has failed, and for `IDLE_MS` at most: a
    launch may hang without an answer. Without a trainer in sight no rollout node is bought, and after `IDLE_MS` none is
    kept.
    """
    if tried.trainer is not None and tried.trainer.was_up:
        return None
    if tried.trainers_failed:
        return end_text(tried.trainers_failed[0])[0]
    if tried.trainer is not None:
        asked_ms = tried.trainer.requested_ms
        return asked_ms if now_ms >= asked_ms + IDLE_MS else None
    return tried.trainer_ended_ms


def why_idle(tried: Tried, now_ms: int) -> str | None:
    """Return why the rollout nodes are given back: no trainer has been in sight for `IDLE_MS`. None: they stay."""
    since_ms = no_trainer_since_ms(tried, now_ms)
    if since_ms is None or now_ms < since_ms + IDLE_MS:
        return None
    answers = tried.trainer_refusals()
    return f"no trainer for {duration(IDLE_MS)}, and nodes without one do no work{f': {answers}' if answers else ''}"


def next_rollout(
    preferred: Option,
    nodes: int,
    tried: Tried,
    sites: Sequence[SiteOptions],
    rules: MoveRules,
    now_ms: int,
    why_stand_in: WhyStandIn | None = None,
    *,
    may_train: bool = False,
) -> Move:
    """Return the option for the next rollout node of a plan with `nodes` rollout nodes.

    The planned option `preferred` is taken if the pool is ready. `why_stand_in`: the price of waiting (waiting.py).
    None: the plan predicts no iteration times, and stand-ins come after a fixed wait. `may_train`: the node can take
    the role of a lost trainer, so it waits for none.
    """
    trainer = tried.trainer
    if not may_train and (trainer is None or no_trainer_since_ms(tried, now_ms) is not None):
        answers = tried.trainer_refusals()
        return Wait(until_ms=None, why=f"the trainer comes first{f': {answers}' if answers else ''}")
    place = tried.home if trainer is None else trainer.site
    here = next((site for site in sites if site.place == place), sites[0] if may_train else None)
    if here is not None and not here.rollout:
        return NothingLeft(why=f"{here.cloud} {here.region}, where the trainer is, offers no such node")
    options = [option for option in here.rollout if not tried.is_denied(option)] if here is not None else []
    return _of_market(preferred, nodes, options, tried, rules, now_ms, why_stand_in)


def _of_market(
    preferred: Option,
    nodes: int,
    options: Sequence[Option],
    tried: Tried,
    rules: MoveRules,
    now_ms: int,
    why_stand_in: WhyStandIn | None,
) -> Move:
    """Return an option of the preferred market, a stand-in where that pays, or a wait."""
    wanted = preferred.placement.market
    of_market = [option for option in options if option.placement.market is wanted]
    often = why_stand_in is not None and wanted is Market.SPOT
    dear: list[Option] = []
    if why_stand_in is not None and wanted is Market.SPOT:
        of_market, dear = _by_price(preferred, of_market)
    found = _cheapest_ready(preferred, nodes, of_market, tried, rules, now_ms, asks_often=often)
    if isinstance(found, Option) or wanted is Market.ON_DEMAND or not (rules.on_demand or dear):
        return found
    firsts = [min((end_text(attempt)[0] for attempt in tried.refused(option)), default=0) for option in of_market]
    out_since_ms = max(firsts, default=0)
    steady = [option for option in options if option.placement.market is Market.ON_DEMAND and rules.on_demand]
    reasons: dict[tuple[str, ...], str] = {}
    for one in steady if why_stand_in is None else [*dear, *steady]:
        why = _why(one, of_market, out_since_ms, rules, now_ms, why_stand_in)
        if why is not None:
            reasons[one.place] = why
    pays = [one for one in [*dear, *steady] if one.place in reasons]
    stand_in = _cheapest_ready(preferred, nodes, pays, tried, rules, now_ms)
    return StandIn(option=stand_in, why=reasons[stand_in.place]) if isinstance(stand_in, Option) else found


def _why(
    stand_in: Option,
    lacking: Sequence[Option],
    out_since_ms: int,
    rules: MoveRules,
    now_ms: int,
    why_stand_in: WhyStandIn | None,
) -> str | None:
    if not lacking:
        return "no spot is offered in the region"
    if why_stand_in is not None:
        return why_stand_in(stand_in, lacking, out_since_ms)
    out_ms = now_ms - out_since_ms
    return f"no spot for {duration(out_ms)}" if out_ms >= rules.on_demand_after_ms else None


def _by_price(preferred: Option, spot: Sequence[Option]) -> tuple[list[Option], list[Option]]:
    """Return the spot options at about the plan's price or the present lowest, and the dear ones."""
    lowest = min((option.placement.micro_usd_per_hour for option in spot), default=0)
    most = DEAR * max(lowest, preferred.placement.micro_usd_per_hour)
    cheap = [option for option in spot if option.placement.micro_usd_per_hour <= most]
    return cheap, [option for option in spot if option.placement.micro_usd_per_hour > most]


def next_elsewhere(
    options: Sequence[Elsewhere], home: SiteOptions, tried: Tried, rules: MoveRules, now_ms: int
) -> Elsewhere | Option | None:
    """Return the first of these options whose pool is ready to be asked. None: all have refused lately.

    The home region is asked once more first, if its newest refusal is older than `LAST_LOOK_MS`.
    """
    longest_ms, first_ms = ASK_MOST_MS, min(rules.cool_down_ms, ASK_MS)
    ready = [e for e in options if tried.cools_until_ms(e.option, first_ms, longest_ms) <= now_ms]
    if not ready:
        return None
    refused_ms = {
        option: max((end_text(attempt)[0] for attempt in tried.refused(option)), default=0)
        for option in home.trainer
        if option.placement.market is Market.SPOT and not tried.is_denied(option)
    }
    if refused_ms and now_ms > max(refused_ms.values()) + LAST_LOOK_MS:
        return min(refused_ms, key=lambda option: refused_ms[option])
    return ready[0]


def back_to_spot(
    preferred: Option,
    nodes: int,
    tried: Tried,
    sites: Sequence[SiteOptions],
    rules: MoveRules,
    now_ms: int,
    *,
    of_trainer: bool = False,
) -> Move:
    """Return the option for the spot node that replaces a stand-in. The stand-in works until the spot node does.

    `of_trainer`: the stand-in is the trainer.

    A pool that lacked capacity is tested by one node at a time, until the test node has stayed for
    `GIVE_BACK_AFTER_MS`.
    """
    here = next((site for site in sites if tried.trainer is not None and site.place == tried.trainer.site), None)
    offered = () if here is None else here.trainer if of_trainer else here.rollout
    spot = [option for option in offered if option.placement.market is Market.SPOT]
    options = [
        option
        for option in _by_price(preferred, spot)[0]
        if not tried.is_denied(option)
        and now_ms >= tried.taken_until_ms(option, rules.cool_down_ms)
        and not tried.is_on_trial(option, now_ms)
    ]
    if not options:
        return Wait(until_ms=None, why="spot capacity is not known to be back")
    return _cheapest_ready(preferred, nodes, options, tried, rules, now_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRate:
    """Rate limit for launches: `per_minute` in the long run and `burst` at once."""

    per_minute: int = 10
    burst: int = 5

    @property
    def spacing_ms(self) -> int:
        return -(-60_000 // self.per_minute)

    def next_ms(self, requested_ms: Iterable[int]) -> int:
        """Return the earliest time at which one more launch keeps the rate.

        With 10 a minute and a burst of 5, the sixth launch waits 6 s.
        """
        spacing_ms = self.spacing_ms
        earned_ms = 0  # end of the time that the launches so far use up
        for at_ms in sorted(requested_ms):
            earned_ms = max(earned_ms, at_ms) + spacing_ms
        return earned_ms - self.burst * spacing_ms + spacing_ms if earned_ms else 0


def _least_refused(
    options: Sequence[Option],
    tried: Tried,
    first_ms: int,
    now_ms: int,
    gives_up_ms: int | None = None,
    longest_ms: int = COOL_MOST_MS,
) -> Move:
    """Return the ready option with the fewest refusals; the first in order wins a tie.

    A refused option is ready again after a gap, which grows with each refusal. If no option is ready, return a `Wait`
    until the first gap ends, or until `gives_up_ms` if earlier.
    """
    refused = [[attempt for attempt in tried.trainers_refused if attempt.place == option.place] for option in options]
    ready_ms = [cooled_until_ms(here, first_ms, longest_ms) for here in refused]
    ready = [number for number, at_ms in enumerate(ready_ms) if at_ms <= now_ms]
    if ready:
        return options[min(ready, key=lambda number: (len(refused[number]), number))]
    until_ms = min(ready_ms) if gives_up_ms is None else min([*ready_ms, gives_up_ms])
    answers = tried.trainer_refusals()
    why = f"no capacity for a trainer in {_regions(options)}{f': {answers}' if answers else ''}"
    return Wait(until_ms=until_ms, why=why)


def _cheapest_ready(
    preferred: Option,
    nodes: int,
    options: Sequence[Option],
    tried: Tried,
    rules: MoveRules,
    now_ms: int,
    *,
    asks_often: bool = False,
) -> Move:
    """Return the planned option if its pool is ready, else the ready option with the cheapest hour at work.

    The planned option also gives way (`GIVES_WAY`) if its pool has lost more hours than another. If no pool is ready,
    return a `Wait`.

    With two zones or more, at most half of the nodes go to one zone. `asks_often`: the slot is empty and the trainer
    waits for it, so a pool that refused is asked again soon.
    """
    if not options:
        return NothingLeft(why=tried.denials("rollout"))
    most = most_in_one_zone(nodes, len({option.placement.zone for option in options}))
    first_ms, longest_ms = rules.cool_down_ms, COOL_MOST_MS
    if asks_often:
        first_ms, longest_ms = min(first_ms, ASK_MS), ASK_MOST_MS
    refused_until = [tried.cools_until_ms(option, first_ms, longest_ms) for option in options]
    ready = [number for number, until_ms in enumerate(refused_until) if until_ms <= now_ms]
    if not ready:
        market = options[0].placement.market.value.replace("_", " ")
        lacks = "quota" if all(map(tried.full, options)) else "capacity"
        return Wait(until_ms=min(refused_until), why=f"no {market} {lacks} in {_regions(options)}")

    lost = {number: _lost_hours(options[number], tried, now_ms) for number in ready}
    most_lost = GIVES_WAY * (1 + min(lost.values())) - 1

    def order(number: int) -> tuple[object, ...]:
        option = options[number]
        return (
            # A pool that preempted a node is avoided for a while. If every pool is avoided, take the pool whose wait
            # ends first.
            max(0, tried.taken_until_ms(option, first_ms) - now_ms),
            tried.live_in(option.placement.zone) >= most,
            option.place != preferred.place or lost[number] > most_lost,
            option.placement.micro_usd_per_hour * (1 + lost[number]),
            number,
        )

    return options[min(ready, key=order)]


def _lost_hours(option: Option, tried: Tried, now_ms: int) -> float:
    """Return the node-hours that preemptions lose in an hour: `LOST_HOURS`, and the outage if no other zone is up.

    One preemption in 2 h, and outages of 1.1 h: .5 (.2 + .42 x 1.1) = .33.
    """
    return tried.hazard_per_hour(option, now_ms) * (LOST_HOURS + ALL_OUT * tried.outage_hours(option))


def _regions(options: Iterable[Option]) -> str:
    names = list(dict.fromkeys(f"{option.placement.cloud} {option.placement.region}" for option in options))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more regions" if len(names) > 4 else "")
