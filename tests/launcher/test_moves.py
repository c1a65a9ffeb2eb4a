"""Failover rules: where the next node is bought, by small cases, and invariants for random answers of the clouds."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import Market
from launcher.decide.current_prices import Price, PriceNow, repriced
from launcher.decide.failover import (
    LaunchRate,
    NothingLeft,
    StandIn,
    Wait,
    back_to_spot,
    home_of,
    is_home_given_up,
    next_rollout,
    next_trainer,
    site_of_run,
)
from launcher.decide.launch_history import AGAIN_MS, Attempt, MoveRules, Outcome, Tried, gap_ms
from launcher.placement.options import Option, SiteOptions
from launcher.placement.placement import Placement

NOW = 10_000_000
MINUTE = 60_000
RULES = MoveRules()


def option(cloud="gcp", region="r1", zone="a", market=Market.SPOT, price=300_000, kind="g2") -> Option:
    return Option(
        placement=Placement(
            cloud=cloud,
            region=region,
            zone=f"{region}{zone}" if zone else f"{region}, any zone",
            instance_type=kind,
            gpus=1,
            accelerator="L4",
            market=market,
            micro_usd_per_hour=price,
            price_source="catalogs/gcp.csv",
            price_observed_at="2026-01-01",
        ),
        on_demand_micro_usd_per_hour=1_000_000,
    )


def site(cloud="gcp", region="r1", zones="ab", trainers=("t",)) -> SiteOptions:
    steady = {"market": Market.ON_DEMAND, "price": 1_000_000, "zone": ""}
    spot = [option(cloud, region, zone, price=300_000 + number) for number, zone in enumerate(zones)]
    return SiteOptions(
        cloud=cloud,
        region=region,
        trainer=tuple(option(cloud, region, kind=kind, **steady) for kind in trainers),
        rollout=(*spot, option(cloud, region, **steady)),
    )


R1, R2, AWS = site(), site(region="r2"), site("aws", "e1")
SITES = (R1, R2, AWS)


class History:
    """A history of attempts; each is requested when the previous one ended."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []

    def trainer(self, where: Option, outcome: Outcome, at: int, ended: int | None = None, was_up=False, evidence=""):
        return self._add("trainer", where, outcome, at, ended, was_up, evidence)

    def spot(self, where: Option, outcome: Outcome, at: int, ended: int | None = None, was_up=False, evidence=""):
        return self._add("rollout", where, outcome, at, ended, was_up, evidence)

    def _add(self, role, where, outcome, at, ended, was_up, evidence):
        self.attempts.append(
            Attempt(
                name=f"{role}-g{len(self.attempts)}",
                role=role,
                option=where,
                requested_ms=at,
                outcome=outcome,
                ended_ms=None if outcome is Outcome.LIVE else (at if ended is None else ended),
                up_ms=at if was_up else None,
                evidence=evidence,
            )
        )
        return self


def with_trainer(where: Option = R1.trainer[0]) -> History:
    return History().trainer(where, Outcome.LIVE, at=0, was_up=True)


def rollout(history: History, now_ms=NOW, preferred=R1.rollout[0], nodes=2, sites=SITES, rules=RULES):
    move = next_rollout(preferred, nodes, Tried(history.attempts), sites, rules, now_ms)
    return move.option if isinstance(move, StandIn) else move


# --- the trainer --------------------------------------------------------------------------------------


def test_a_run_begins_at_the_first_site_of_its_plan():
    assert next_trainer(Tried(), SITES, RULES, NOW) == R1.trainer[0]
    assert site_of_run(Tried(), SITES) == R1


def test_a_refused_trainer_is_requested_again_at_home_with_growing_gaps():
    history = History().trainer(R1.trainer[0], Outcome.REFUSED, at=NOW)
    assert isinstance(next_trainer(Tried(history.attempts), SITES, RULES, NOW), Wait)
    wait = next_trainer(Tried(history.attempts), SITES, RULES, NOW)
    assert NOW + AGAIN_MS <= wait.until_ms <= NOW + AGAIN_MS * 3 // 2
    assert next_trainer(Tried(history.attempts), SITES, RULES, wait.until_ms) == R1.trainer[0]
    history.trainer(R1.trainer[0], Outcome.REFUSED, at=wait.until_ms)
    again = next_trainer(Tried(history.attempts), SITES, RULES, wait.until_ms)
    assert again.until_ms >= wait.until_ms + 2 * AGAIN_MS


def test_another_type_of_the_region_is_tried_before_the_first_is_tried_again():
    two = site(trainers=("t", "u"))
    history = History().trainer(two.trainer[0], Outcome.REFUSED, at=NOW)
    assert next_trainer(Tried(history.attempts), (two, R2), RULES, NOW) == two.trainer[1]


def test_a_region_without_trainer_capacity_fails_over_within_its_cloud_first():
    history = History().trainer(R1.trainer[0], Outcome.REFUSED, at=NOW)
    late = NOW + RULES.trainer_wait_ms
    assert not is_home_given_up(Tried(history.attempts), RULES, late - 1)
    assert is_home_given_up(Tried(history.attempts), RULES, late)
    assert next_trainer(Tried(history.attempts), SITES, RULES, late) == R2.trainer[0]
    history.trainer(R2.trainer[0], Outcome.REFUSED, at=late)
    assert next_trainer(Tried(history.attempts), SITES, RULES, late) == AWS.trainer[0]
    history.trainer(AWS.trainer[0], Outcome.LIVE, at=late)
    assert site_of_run(Tried(history.attempts), SITES) == AWS
    assert home_of(Tried(history.attempts), SITES) == R1  # until it comes up
    assert home_of(Tried(History().trainer(AWS.trainer[0], Outcome.LIVE, at=late, was_up=True).attempts), SITES) == AWS


def test_without_capacity_anywhere_the_least_refused_site_is_tried_first():
    history = History()
    for where in SITES:
        history.trainer(where.trainer[0], Outcome.REFUSED, at=NOW)
    history.trainer(R1.trainer[0], Outcome.REFUSED, at=NOW)
    late = NOW + RULES.trainer_wait_ms
    assert isinstance(next_trainer(Tried(history.attempts), SITES, RULES, late), Wait)
    later = NOW + 20 * MINUTE
    assert next_trainer(Tried(history.attempts), SITES, RULES, later) == R2.trainer[0]


def test_a_quota_denial_fails_over_at_once_and_the_last_one_ends_the_run():
    history = History().trainer(R1.trainer[0], Outcome.DENIED, at=NOW, evidence="quota NVIDIA_L4_GPUS is 0 in r1")
    assert next_trainer(Tried(history.attempts), SITES, RULES, NOW) == R2.trainer[0]
    history.trainer(R2.trainer[0], Outcome.DENIED, at=NOW, evidence="quota NVIDIA_L4_GPUS is 0 in r2")
    history.trainer(AWS.trainer[0], Outcome.DENIED, at=NOW, evidence="quota L-DB2E81BA is 0")
    end = next_trainer(Tried(history.attempts), SITES, RULES, NOW)
    assert isinstance(end, NothingLeft)
    assert "NVIDIA_L4_GPUS is 0 in r1" in end.why
    assert "L-DB2E81BA" in end.why
    assert (
        next_trainer(Tried(history.attempts, NOW + 1), SITES, RULES, NOW) == R1.trainer[0]
    )  # a resumed run requests again


def test_a_lost_trainer_is_replaced_in_its_own_site_first():
    history = History().trainer(R2.trainer[0], Outcome.ENDED, at=0, ended=NOW, was_up=True)
    assert next_trainer(Tried(history.attempts), SITES, RULES, NOW) == R2.trainer[0]


# --- rollout nodes ------------------------------------------------------------------------------------


def test_rollout_nodes_are_bought_where_the_trainer_is():
    assert rollout(with_trainer()) == R1.rollout[0]
    assert rollout(with_trainer(AWS.trainer[0])) == AWS.rollout[0]
    assert isinstance(rollout(History()), Wait)


def test_no_rollout_node_is_bought_without_a_trainer():
    history = History().trainer(R1.trainer[0], Outcome.REFUSED, at=NOW).trainer(R2.trainer[0], Outcome.LIVE, at=NOW + 1)
    assert isinstance(rollout(history), Wait)
    first = History().trainer(R1.trainer[0], Outcome.LIVE, at=NOW)
    assert rollout(first) == R1.rollout[0]  # both at once, at the start


def test_a_zone_that_refused_cools_down_for_every_slot():
    history = with_trainer().spot(R1.rollout[0], Outcome.REFUSED, at=NOW)
    assert rollout(history) == R1.rollout[1]
    assert rollout(history, now_ms=NOW + 9 * MINUTE) == R1.rollout[1]
    assert rollout(history, now_ms=NOW + 15 * MINUTE) == R1.rollout[0]


def test_a_burst_of_refusals_cools_a_zone_down_like_one_refusal():
    here = site(zones="a")
    history = with_trainer(here.trainer[0])
    for seconds in range(5):  # five nodes requested at once, refused within a minute
        history.spot(here.rollout[0], Outcome.REFUSED, at=NOW + seconds * 1000, ended=NOW + seconds * 12_000)
    until = rollout(history, sites=(here,), preferred=here.rollout[0], rules=MoveRules(on_demand=False)).until_ms
    assert 10 * MINUTE <= until - (NOW + 48_000) < 15 * MINUTE


def test_no_zone_cools_down_for_longer_than_half_an_hour():
    here = site(zones="a")
    history = with_trainer(here.trainer[0])
    for hour in range(9):
        history.spot(here.rollout[0], Outcome.REFUSED, at=NOW + hour * 60 * MINUTE)
    last = NOW + 8 * 60 * MINUTE
    wait = rollout(history, now_ms=last, sites=(here,), preferred=here.rollout[0], rules=MoveRules(on_demand=False))
    assert wait.until_ms == last + 30 * MINUTE


def test_a_zone_with_a_preemption_is_avoided_only_if_there_is_another():
    history = with_trainer().spot(R1.rollout[0], Outcome.RECLAIMED, at=NOW, was_up=True)
    assert rollout(history) == R1.rollout[1]
    only = site(zones="a")
    history = with_trainer(only.trainer[0]).spot(only.rollout[0], Outcome.RECLAIMED, at=NOW, was_up=True)
    assert rollout(history, sites=(only,), preferred=only.rollout[0]) == only.rollout[0]


def test_at_most_half_of_the_nodes_are_in_one_zone():
    history = with_trainer().spot(R1.rollout[0], Outcome.LIVE, at=1).spot(R1.rollout[0], Outcome.LIVE, at=2)
    assert rollout(history, nodes=4) == R1.rollout[1]
    assert rollout(history, nodes=5) == R1.rollout[0]


def test_a_dearer_type_is_not_preferred_to_a_cheaper_zone_that_was_never_tried():
    dear = option(zone="a", kind="g2-dear", price=900_000)
    here = SiteOptions(cloud="gcp", region="r1", trainer=R1.trainer, rollout=(dear, *R1.rollout))
    history = with_trainer().spot(R1.rollout[0], Outcome.REFUSED, at=NOW)
    assert rollout(history, sites=(here,)) == R1.rollout[1]


def test_a_long_lack_of_spot_is_bridged_on_demand_if_the_job_allows_it():
    history = with_trainer()
    for zone in R1.rollout[:2]:
        history.spot(zone, Outcome.REFUSED, at=NOW)
    for zone in R1.rollout[:2]:
        history.spot(zone, Outcome.REFUSED, at=NOW + 15 * MINUTE)
    assert isinstance(rollout(history, now_ms=NOW + 16 * MINUTE), Wait)
    assert rollout(history, now_ms=NOW + 30 * MINUTE) == R1.rollout[2]
    only_spot = MoveRules(on_demand=False)
    assert isinstance(rollout(history, now_ms=NOW + 30 * MINUTE, rules=only_spot), Wait)


def test_denied_spot_is_bought_on_demand_at_once_or_not_at_all():
    history = with_trainer().spot(
        R1.rollout[0], Outcome.DENIED, at=NOW, evidence="quota PREEMPTIBLE_NVIDIA_L4_GPUS is 0"
    )
    assert rollout(history) == R1.rollout[2]  # the quota is the region's, so zone b is out too
    refused = rollout(history, rules=MoveRules(on_demand=False))
    assert isinstance(refused, NothingLeft)
    assert "PREEMPTIBLE_NVIDIA_L4_GPUS" in refused.why


# --- stand-ins -----------------------------------------------------------------------------------------


def back(history: History, now_ms: int, here: SiteOptions = R1):
    return back_to_spot(here.rollout[0], 4, Tried(history.attempts), (here, R2), RULES, now_ms)


def test_one_node_at_a_time_tests_whether_spot_is_back():
    here = site(zones="a")
    [spot, _] = here.rollout
    history = with_trainer(here.trainer[0]).spot(spot, Outcome.REFUSED, at=NOW)
    assert isinstance(back(history, NOW + 9 * MINUTE, here), Wait)
    assert back(history, NOW + 15 * MINUTE, here) == spot
    history.spot(spot, Outcome.LIVE, at=NOW + 15 * MINUTE)
    assert isinstance(back(history, NOW + 16 * MINUTE, here), Wait)  # another slot has a pending request
    history.attempts[-1] = replace(history.attempts[-1], up_ms=NOW + 17 * MINUTE)
    assert isinstance(back(history, NOW + 26 * MINUTE, here), Wait)
    assert back(history, NOW + 27 * MINUTE, here) == spot


def test_a_node_bought_before_a_refusal_does_not_prove_capacity():
    history = with_trainer().spot(R1.rollout[0], Outcome.LIVE, at=0, was_up=True)
    assert Tried(history.attempts).has_stayed(R1.rollout[0], NOW)
    history.spot(R1.rollout[0], Outcome.REFUSED, at=NOW)
    assert not Tried(history.attempts).has_stayed(R1.rollout[0], NOW + 20 * MINUTE)


# --- quotas --------------------------------------------------------------------------------------------

USED_UP = "(MaxSpotInstanceCountExceeded) Max spot instance count exceeded"


def denied_by_quota(history: History, where: Option, at: int) -> History:
    history.spot(where, Outcome.DENIED, at=at, evidence=USED_UP)
    history.attempts[-1] = replace(history.attempts[-1], is_quota_used_up=True)
    return history


def test_a_quota_used_by_the_ending_predecessor_is_retried_soon():
    history = with_trainer().spot(R1.rollout[0], Outcome.RECLAIMED, at=0, ended=NOW - MINUTE, was_up=True)
    wait = rollout(denied_by_quota(history, R1.rollout[1], NOW), now_ms=NOW)
    assert isinstance(wait, Wait)
    assert AGAIN_MS <= wait.until_ms - NOW <= AGAIN_MS * 3 // 2
    assert "no spot quota in gcp r1" in wait.why
    assert rollout(history, now_ms=wait.until_ms) == R1.rollout[1]  # zone a preempted the last one
    assert (
        wait.until_ms + 2 * AGAIN_MS
        <= rollout(denied_by_quota(history, R1.rollout[1], wait.until_ms), wait.until_ms).until_ms
    )


def test_a_quota_used_up_by_other_slots_is_never_a_denial():
    history = with_trainer().spot(R1.rollout[0], Outcome.LIVE, at=0, was_up=True)
    for minute in range(0, 300, 40):
        denied_by_quota(history, R1.rollout[1], NOW + minute * MINUTE)
    only_spot = MoveRules(on_demand=False)
    assert isinstance(rollout(history, now_ms=NOW + 280 * MINUTE, rules=only_spot), Wait)
    assert isinstance(rollout(history, now_ms=NOW + 310 * MINUTE, rules=only_spot), Option)


def test_a_quota_without_a_node_of_ours_is_a_denial():
    long_gone = with_trainer().spot(R1.rollout[0], Outcome.ENDED, at=0, ended=NOW - 10 * MINUTE, was_up=True)
    for history in (with_trainer(), long_gone):
        refused = rollout(denied_by_quota(history, R1.rollout[1], NOW), rules=MoveRules(on_demand=False))
        assert isinstance(refused, NothingLeft)


def test_a_region_that_sells_no_rollout_node_says_so():
    """A run may move its trainer there, for lack of a trainer elsewhere."""
    sites = (replace(R1, rollout=()), R2)
    move = next_rollout(R1.rollout[0], 1, Tried(with_trainer().attempts), sites, RULES, NOW)
    assert move == NothingLeft(why="gcp r1, where the trainer is, offers no such node")


def test_a_zone_without_a_subnet_does_not_exclude_other_zones():
    history = with_trainer().spot(R1.rollout[0], Outcome.DENIED, at=NOW, evidence="No usable subnets")
    only_spot = MoveRules(on_demand=False)
    assert isinstance(rollout(history, rules=only_spot), NothingLeft)
    history.attempts[-1] = replace(history.attempts[-1], holds_in_its_zone_alone=True)
    assert rollout(history, rules=only_spot).place == R1.rollout[1].place


def test_a_trainer_blocked_by_its_predecessors_quota_is_requested_again():
    history = History().trainer(R1.trainer[0], Outcome.ENDED, at=0, ended=NOW - MINUTE, was_up=True)
    history.trainer(R1.trainer[0], Outcome.DENIED, at=NOW)
    assert isinstance(next_trainer(Tried(history.attempts), (R1,), RULES, NOW), NothingLeft)
    history.attempts[-1] = replace(history.attempts[-1], is_quota_used_up=True)
    assert next_trainer(Tried(history.attempts), (R1,), RULES, NOW + MINUTE) == R1.trainer[0]


# --- prices, gaps, rates --------------------------------------------------------------------------------


def test_the_cheapest_zone_at_current_prices_comes_first():
    newer = Price(micro_usd_per_hour=900_000, source="aws spot", observed_at="2026-02-01T00:00:00+00:00")
    now = repriced(R1, PriceNow({R1.rollout[0].place: newer}))
    assert now.rollout[0].placement.micro_usd_per_hour == 900_000
    history = with_trainer()
    assert rollout(history, sites=(now,), preferred=option(zone="z")).place == R1.rollout[1].place
    old = Price(micro_usd_per_hour=1, source="", observed_at="2025-01-01")
    assert repriced(R1, PriceNow({R1.rollout[0].place: old})) == R1


def test_gaps_double_and_differ_between_names():
    gaps = [gap_ms(n, 600_000, "a") for n in range(8)]
    assert gaps[0] == 0
    assert 600_000 <= gaps[1] < 900_000
    assert gaps[2] == 2 * gaps[1]
    assert gaps[3] == gaps[7] == 30 * MINUTE
    assert gap_ms(1, 600_000, "b") != gaps[1]


def test_launches_are_limited_to_ten_a_minute_and_five_at_once():
    rate = LaunchRate(per_minute=10, burst=5)
    assert rate.next_ms([]) == 0
    assert rate.next_ms([NOW] * 4) <= NOW
    assert rate.next_ms([NOW] * 5) == NOW + 6000
    assert rate.next_ms([NOW - 60_000] * 5) <= NOW


# --- random answers of the clouds -----------------------------------------------------------------------


class World:
    """Clouds with random answers, and a run that follows the failover rules; the trainer makes every second launch."""

    def __init__(self, seed: int, sites=SITES, spots: int = 3) -> None:
        self.random, self.sites, self.history, self.now_ms = random.Random(seed), sites, History(), NOW
        self.spots, self.requested = spots, set()

    def live(self, role: str) -> list[Attempt]:
        return [a for a in self.history.attempts if a.role == role and a.outcome is Outcome.LIVE]

    def step(self, kinds) -> None:
        self.now_ms += self.random.choice([1000, 30_000, 300_000, 900_000])
        self._answer(kinds)
        move = next_trainer(Tried(self.history.attempts), self.sites, RULES, self.now_ms)
        if isinstance(move, Option):
            self._request("trainer", move)
        trainer = Tried(self.history.attempts).trainer
        for _ in range(self.spots - len(self.live("rollout"))):
            move = next_rollout(R1.rollout[0], self.spots, Tried(self.history.attempts), self.sites, RULES, self.now_ms)
            move = move.option if isinstance(move, StandIn) else move
            if isinstance(move, Option):
                assert trainer is not None
                assert (move.placement.cloud, move.placement.region) == trainer.site
                self._request("rollout", move)
        assert len(self.live("trainer")) <= 1

    def _request(self, role: str, where: Option) -> None:
        self.requested.add((role, where.place))
        (self.history.trainer if role == "trainer" else self.history.spot)(where, Outcome.LIVE, at=self.now_ms)

    def _answer(self, kinds) -> None:
        for number, attempt in enumerate(self.history.attempts):
            if attempt.outcome is not Outcome.LIVE:
                continue
            kind = self.random.choice(kinds)
            if kind == "late":
                continue
            up_ms = attempt.up_ms if attempt.up_ms is not None else self.now_ms if kind == "up" else None
            outcome = {"up": Outcome.LIVE}.get(kind) or Outcome(kind)
            if outcome in (Outcome.REFUSED, Outcome.DENIED) and attempt.was_up:
                outcome = Outcome.RECLAIMED
            self.history.attempts[number] = Attempt(
                name=attempt.name,
                role=attempt.role,
                option=attempt.option,
                requested_ms=attempt.requested_ms,
                outcome=outcome,
                ended_ms=None if outcome is Outcome.LIVE else self.now_ms,
                up_ms=up_ms,
                evidence=str(outcome),
            )


KINDS = st.lists(st.sampled_from(["late", "up", "refused", "reclaimed", "ended", "denied"]), min_size=1, max_size=6)


@given(seed=st.integers(0, 10**6), kinds=KINDS)
@settings(max_examples=60, deadline=None)
def test_there_is_one_trainer_and_rollout_nodes_are_in_its_region(seed, kinds):
    world = World(seed)
    for _ in range(25):
        world.step(kinds)
    assert any(role == "trainer" for role, _ in world.requested)


@given(seed=st.integers(0, 10**6), kinds=KINDS)
@settings(max_examples=40, deadline=None)
def test_the_order_of_recorded_attempts_does_not_matter(seed, kinds):
    world = World(seed)
    for _ in range(12):
        world.step(kinds)
    shuffled = world.history.attempts[:]
    random.Random(seed).shuffle(shuffled)
    for now_ms in (world.now_ms, world.now_ms + MINUTE, world.now_ms + 40 * MINUTE):
        answers = [
            (
                next_trainer(tried, SITES, RULES, now_ms),
                next_rollout(R1.rollout[0], 3, tried, SITES, RULES, now_ms),
            )
            for tried in (Tried(world.history.attempts), Tried(shuffled))
        ]
        assert answers[0] == answers[1]


@given(regions=st.integers(1, 6), types=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_a_trainer_refused_everywhere_is_requested_at_every_site(regions, types):
    sites = tuple(site(region=f"r{n}", trainers=tuple(f"t{k}" for k in range(types))) for n in range(regions))
    history, now_ms, requested = History(), NOW, set()
    for _ in range(200):
        move = next_trainer(Tried(history.attempts), sites, RULES, now_ms)
        assert not isinstance(move, NothingLeft)
        if isinstance(move, Wait):
            assert move.until_ms is not None
            assert move.until_ms > now_ms  # the trainer neither polls without pause nor gives up
            now_ms = move.until_ms
            continue
        requested.add(move.place)
        history.trainer(move, Outcome.REFUSED, at=now_ms, ended=now_ms + 5000)
        now_ms += 5000
    assert requested == {where.place for here in sites for where in here.trainer}
    assert now_ms > NOW + 3_600_000  # the gaps grew


def test_of_equal_prices_the_zone_with_fewer_preemptions_is_taken():
    """The planned zone cools down. In the second, two nodes were preempted after half an hour; the third had none."""
    planned, second, third = (
        R1.rollout[0],
        *[
            replace(
                R1.rollout[0], placement=replace(R1.rollout[0].placement, zone=f"{R1.rollout[0].placement.zone}-{n}")
            )
            for n in (2, 3)
        ],
    )
    sites = (replace(R1, rollout=(planned, second, third)),)
    history = with_trainer().spot(planned, Outcome.REFUSED, at=NOW - MINUTE)
    assert rollout(history, sites=sites) == second
    for minutes in (120, 60):
        begun = NOW - minutes * MINUTE
        history.spot(second, Outcome.RECLAIMED, at=begun, ended=begun + 30 * MINUTE, was_up=True)
    tried = Tried(history.attempts)
    assert tried.hazard_per_hour(second, NOW) == pytest.approx((2 + 1.8) / (1 + 6))
    assert tried.hazard_per_hour(third, NOW) == pytest.approx(0.3)
    assert rollout(history, sites=sites) == third


def three_zones() -> tuple[Option, ...]:
    """Return the planned zone, and two more at its price."""
    planned = R1.rollout[0]
    zone = planned.placement.zone
    return planned, *(replace(planned, placement=replace(planned.placement, zone=f"{zone}-{n}")) for n in (2, 3))


def test_a_zone_that_was_out_for_long_comes_after_one_of_the_same_price():
    """Each had a preemption. Then the planned zone refused for two and a half hours, and the second never did."""
    planned, second, third = three_zones()
    sites = (replace(R1, rollout=(planned, second, third)),)
    begun = NOW
    history = with_trainer()
    for zone in (planned, second, third):
        history.spot(zone, Outcome.RECLAIMED, at=begun, ended=begun + 30 * MINUTE, was_up=True)
    assert rollout(history, now_ms=begun + 300 * MINUTE, sites=sites) == planned
    for minutes in range(30, 180, 6):
        history.spot(planned, Outcome.REFUSED, at=begun + minutes * MINUTE)
    tried = Tried(history.attempts)
    assert tried.outage_hours(planned) == pytest.approx((2.2 + 2.5) / 3, abs=0.2)
    assert tried.outage_hours(second) == pytest.approx(2.2 / 3)
    assert rollout(history, now_ms=begun + 300 * MINUTE, sites=sites) == second


@given(refused=st.lists(st.integers(0, 600), max_size=30), shuffled=st.randoms())
def test_outages_are_the_same_in_any_order_and_a_burst_is_one_look(refused, shuffled):
    planned = R1.rollout[0]

    def out_hours(minutes: list[int]) -> float:
        history = with_trainer()
        for at in minutes:
            history.spot(planned, Outcome.REFUSED, at=at * MINUTE)
        return Tried(history.attempts).outage_hours(planned)

    mixed = [*refused, *refused]
    shuffled.shuffle(mixed)
    assert out_hours(mixed) == out_hours(refused)
    assert out_hours(refused) == pytest.approx((2.2 + 0.5 * len({at // 30 for at in refused})) / 2)


def test_the_wait_for_spot_counts_from_the_moment_at_which_every_pool_had_refused():
    """The first pool has lacked capacity for 35 minutes and the second for 25: on demand comes after half an hour."""
    first, second = R1.rollout[:2]
    history = with_trainer()
    for where, minute in ((first, 0), (second, 10), (first, 16), (second, 26)):
        history.spot(where, Outcome.REFUSED, at=minute * MINUTE)
    assert isinstance(rollout(history, now_ms=35 * MINUTE), Wait)
    history.spot(first, Outcome.REFUSED, at=37 * MINUTE)
    assert rollout(history, now_ms=40 * MINUTE) == R1.rollout[2]


def test_a_stand_in_is_not_replaced_from_a_pool_that_has_just_preempted_a_node():
    history = with_trainer()
    for where in R1.rollout[:2]:
        history.spot(where, Outcome.RECLAIMED, at=0, ended=NOW - MINUTE, was_up=True)

    def back(now_ms):
        return back_to_spot(R1.rollout[0], 2, Tried(history.attempts), SITES, RULES, now_ms)

    assert back(NOW) == Wait(until_ms=None, why="spot capacity is not known to be back")
    assert back(NOW + 15 * MINUTE) == R1.rollout[0]


def test_capacity_is_known_since_the_last_lack_whatever_answer_came_first():
    where = R1.rollout[0]
    history = with_trainer().spot(where, Outcome.REFUSED, at=10 * MINUTE).spot(where, Outcome.REFUSED, at=0)
    history.spot(where, Outcome.LIVE, at=5 * MINUTE, was_up=True)
    assert Tried(history.attempts).there_since_ms(where) is None
    history.spot(where, Outcome.LIVE, at=11 * MINUTE, was_up=True)
    assert Tried(history.attempts).there_since_ms(where) == 11 * MINUTE


def test_a_node_that_was_bought_after_a_denial_did_not_hold_its_quota():
    where = R1.rollout[0]
    history = with_trainer().spot(where, Outcome.DENIED, at=MINUTE)
    denied = replace(history.attempts.pop(), is_quota_used_up=True)
    before, after = (
        Tried([*with_trainer().spot(where, Outcome.LIVE, at=at_ms, was_up=True).attempts, denied])
        for at_ms in (0, 2 * MINUTE)
    )
    assert not before.is_denied(where), "the quota is free once that node has ended"
    assert after.is_denied(where)
