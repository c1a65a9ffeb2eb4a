"""Simulated outages of spot capacity: the shipped `decide()` in passes of 10 s, over hours of the run's clock.

A launch is answered after one to two minutes, a node works eight minutes after it came up, a release takes 30 s. On
demand is always available. The promise: an hour after spot returned, every spot slot runs on spot and on nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from engine.events import Market
from launcher.decide.actions import Buy, Enter, Release
from launcher.decide.budget_guard import Limits
from launcher.decide.facts import Facts, NodeRecord, Stage, Wanted
from launcher.decide.failover import GIVE_BACK_GAP_MS, LaunchRate
from launcher.decide.launch_history import jitter
from launcher.decide.reconcile import decide
from launcher.market.side_prices import side_micro_usd_per_hour
from launcher.placement.options import SiteOptions
from tests.launcher.cluster.stage import SPOT_RATE, TRAINER_RATE, cloud_site, cloud_slots

MINUTE = 60_000
PASS_MS = 10_000
COLD_START_MS = 8 * MINUTE
RELEASE_MS = 30_000
COST = {
    Market.SPOT: SPOT_RATE + side_micro_usd_per_hour("gcp", Market.SPOT),
    Market.ON_DEMAND: TRAINER_RATE + side_micro_usd_per_hour("gcp", Market.ON_DEMAND),
}
SPOT_COST, STEADY_COST = COST[Market.SPOT], COST[Market.ON_DEMAND]

IsOut = Callable[[str, int, int], bool]
"""(zone, now, running nodes there): True if there is no spot capacity for one more. With 0 nodes: all are preempted."""


@dataclass
class Instance:
    record: NodeRecord
    answered_ms: int
    releasing_ms: int | None = None
    end: tuple[str, int] | None = None
    is_up: bool = False
    is_final: bool = False
    """Whether `record` is complete."""


@dataclass
class World:
    """Simulated clouds, and the run whose controller decides."""

    wanted: Wanted
    sites: tuple[SiteOptions, ...]
    is_out: IsOut
    now_ms: int = 0
    stage: Stage = Stage.PLANNED
    reason: str = ""
    instances: dict[str, Instance] = field(default_factory=dict)
    most_hourly: int = 0
    given_back: dict[str, list[int]] = field(default_factory=dict)
    """Times at which a stand-in was released, by slot."""

    def run_until(self, until_ms: int) -> "World":
        while self.now_ms < until_ms:
            self.now_ms += PASS_MS
            for instance in self.instances.values():
                self._live(instance)
            self._one_pass()
        return self

    def _live(self, instance: Instance) -> None:
        if instance.end is not None:
            return
        is_spot, zone = instance.record.market is Market.SPOT, instance.record.zone
        if instance.releasing_ms is not None and self.now_ms >= instance.releasing_ms + RELEASE_MS:
            instance.end = ("released", self.now_ms)
        elif instance.is_up and is_spot and self.is_out(zone, self.now_ms, 0):
            instance.end = ("gone", self.now_ms)
        elif not instance.is_up and self.now_ms >= instance.answered_ms:
            there = sum(m.is_up and m.end is None and m.record.zone == zone for m in self.instances.values())
            instance.is_up = not (is_spot and self.is_out(zone, self.now_ms, there))
            instance.end = None if instance.is_up else ("no_capacity", self.now_ms)

    def _known(self, instance: Instance) -> NodeRecord:
        happened = {"requested": instance.record.requested_ms}
        if instance.is_up:
            happened["up"] = instance.answered_ms
            if self.now_ms >= instance.answered_ms + COLD_START_MS:
                happened["ready"] = instance.answered_ms + COLD_START_MS
        if instance.releasing_ms is not None:
            happened["releasing"] = instance.releasing_ms
        if instance.end is not None:
            happened[instance.end[0]] = instance.end[1]
        return replace(instance.record, happened=happened, reclaimed="gone" in happened)

    def records(self) -> list[NodeRecord]:
        """Return the node records as in the ledger."""
        for instance in self.instances.values():
            if not instance.is_final:
                instance.record, instance.is_final = self._known(instance), instance.end is not None
        return [instance.record for instance in self.instances.values()]

    def _one_pass(self) -> None:
        facts = Facts(
            now_ms=self.now_ms,
            stage=self.stage,
            reason=self.reason,
            stage_ms=0,
            planned_ms=0,
            nodes=self.records(),
            metered=0,
            sites=self.sites,
        )
        for action in decide(facts, self.wanted):
            match action:
                case Enter():
                    self.stage, self.reason = action.stage, action.reason
                case Buy():
                    self._buy(action)
                case Release():
                    self._release(action.nodes)
        there = [instance.record for instance in self.instances.values() if instance.end is None]
        self.most_hourly = max(self.most_hourly, sum(COST[record.market] for record in there))
        assert [record.role for record in there].count("trainer") == 1, "nothing of this touches the trainer"

    def _buy(self, action: Buy) -> None:
        placement = action.option.placement
        record = NodeRecord(
            name=action.name,
            slot=action.slot.name,
            generation=action.generation,
            role=action.slot.role,
            market=placement.market,
            micro_usd_per_hour=placement.micro_usd_per_hour,
            requested_ms=self.now_ms,
            reserved_micro_usd=action.reserved_micro_usd,
            happened={},
            wanted=action.option,
            zone=placement.zone,
            instance_type=placement.instance_type,
        )
        assert action.name not in self.instances
        answered_ms = self.now_ms + MINUTE + round(jitter(action.name) * MINUTE)
        self.instances[action.name] = Instance(record=record, answered_ms=answered_ms)

    def _release(self, names: tuple[str, ...]) -> None:
        for name in names:
            instance = self.instances[name]
            if instance.releasing_ms is None:
                instance.releasing_ms = self.now_ms
                if instance.record.role == "rollout" and instance.record.market is Market.ON_DEMAND:
                    self.given_back.setdefault(instance.record.slot, []).append(self.now_ms)

    def works(self) -> dict[str, list[Market]]:
        """Return the capacity types of the working nodes, by spot slot."""
        slots: dict[str, list[Market]] = {slot.name: [] for slot in self.wanted.slots if slot.role == "rollout"}
        for record in self.records():
            if record.slot in slots and record.is_live and "ready" in record.happened:
                slots[record.slot].append(record.market)
        return slots

    def count(self, market: Market) -> int:
        return sum(markets.count(market) for markets in self.works().values())

    def bought(self, market: Market) -> int:
        return sum(instance.record.market is market for instance in self.instances.values())


def a_world(slots: int, zones: str, is_out: IsOut, max_hourly: int | None = None) -> World:
    sites = (cloud_site("gcp", "g1", zones),)
    wanted = Wanted(
        run="demo",
        slots=cloud_slots(slots, sites),
        limits=Limits(max_total=None, max_hourly=max_hourly),
        deadline_ms=None,
        allowance_ms=5 * MINUTE,
        settle_ms=MINUTE,
        launch_rate=LaunchRate(per_minute=10, burst=5),
    )
    return World(wanted=wanted, sites=sites, is_out=is_out)


OUTAGE_MINUTES, ZONES, SLOTS = (2, 5, 20, 30, 45), ("a", "ab", "abc"), (2, 4, 8)
"""Cases: lengths of the outage, zones of the region, spot slots of the run."""

START_MS = 12 * MINUTE
"""Start of the outages; every node works by then."""


def out_for(minutes: int) -> IsOut:
    return lambda zone, now_ms, there: START_MS <= now_ms < START_MS + minutes * MINUTE


def spot_again_ms(slots: int, zones: str, minutes: int) -> int | None:
    """Return the time from the end of an outage until all slots are on spot only, or None if over an hour."""
    world = a_world(slots, zones, out_for(minutes)).run_until(START_MS - PASS_MS)
    assert world.count(Market.SPOT) == slots
    end_ms = START_MS + minutes * MINUTE
    world.run_until(end_ms)
    while world.now_ms < end_ms + 60 * MINUTE:
        world.run_until(world.now_ms + PASS_MS)
        if all(markets == [Market.SPOT] for markets in world.works().values()):
            return world.now_ms - end_ms
    return None


@pytest.mark.parametrize("minutes", OUTAGE_MINUTES)
@pytest.mark.parametrize("zones", ZONES)
@pytest.mark.parametrize("slots", SLOTS)
def test_all_slots_are_on_spot_again_an_hour_after_an_outage_of_all_zones(slots, zones, minutes):
    assert spot_again_ms(slots, zones, minutes) is not None


def test_a_long_outage_is_bridged_by_stand_ins_with_rare_spot_requests():
    world = a_world(4, "ab", out_for(240)).run_until(START_MS + 60 * MINUTE)
    assert all(markets == [Market.ON_DEMAND] for markets in world.works().values())
    before = world.bought(Market.SPOT)
    world.run_until(START_MS + 180 * MINUTE)
    assert all(markets == [Market.ON_DEMAND] for markets in world.works().values())
    assert 6 <= world.bought(Market.SPOT) - before <= 10


def test_a_slot_does_not_flap_when_spot_capacity_comes_and_goes():
    world = a_world(4, "a", lambda zone, now_ms, there: now_ms >= START_MS and now_ms % (50 * MINUTE) < 30 * MINUTE)
    world.run_until(10 * 60 * MINUTE)
    assert max(map(len, world.given_back.values())) > 1
    for at_ms in world.given_back.values():
        assert all(later - earlier >= GIVE_BACK_GAP_MS for earlier, later in pairwise(at_ms))


def test_a_stand_in_stays_if_spot_has_capacity_for_only_one_node():
    outage = out_for(40)
    world = a_world(
        3, "a", lambda zone, now_ms, there: outage(zone, now_ms, there) or (now_ms >= START_MS and there >= 1)
    )
    world.run_until(START_MS + 150 * MINUTE)
    assert (world.count(Market.SPOT), world.count(Market.ON_DEMAND)) == (1, 2)


def test_with_budget_for_one_more_node_slots_return_to_spot_one_by_one():
    limit = STEADY_COST + 4 * STEADY_COST + SPOT_COST
    world = a_world(4, "ab", out_for(45), max_hourly=limit).run_until(START_MS + 45 * MINUTE)
    assert world.count(Market.ON_DEMAND) == 4
    world.run_until(START_MS + 105 * MINUTE)
    assert all(markets == [Market.SPOT] for markets in world.works().values())
    assert world.most_hourly <= limit


def test_with_budget_for_one_node_the_stand_in_is_released_before_spot_is_tried():
    limit = STEADY_COST + STEADY_COST + SPOT_COST // 2
    world = a_world(1, "a", out_for(80), max_hourly=limit).run_until(START_MS + 80 * MINUTE)
    assert world.bought(Market.ON_DEMAND) >= 3  # the trainer, a stand-in, and another one after a failed spot request
    world.run_until(START_MS + 140 * MINUTE)
    assert world.works() == {"spot-0": [Market.SPOT]}
    assert world.most_hourly <= limit
