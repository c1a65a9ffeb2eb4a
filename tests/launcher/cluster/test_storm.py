"""A thousand preemptions a minute: whatever the clouds take back and however late they say so, the plan's bound holds.

The decisions and brakes are the controller's own; cloud, ledger and clock are simulated here. Every launch is billed a
minute at least, from the moment that the cloud took the order, and half of what the cloud says arrives late.
"""

import random
from dataclasses import dataclass, field, replace

import pytest

from engine.events import Market
from launcher.decide import replacing
from launcher.decide.actions import Buy, Enter, Release
from launcher.decide.budget_guard import Limits
from launcher.decide.facts import OVER, Facts, NodeRecord, Stage, Wanted
from launcher.decide.failover import LaunchRate
from launcher.decide.reconcile import decide
from launcher.decide.run_budget import bound_micro_usd, bound_of_plan, describe_brakes
from launcher.ledger.billing import interval_micro_usd
from launcher.market.side_prices import MINIMUM_BILLED_MS, side_micro_usd_per_hour
from launcher.money import dollars
from launcher.placement.plan import Plan
from tests.launcher.cluster.stage import cloud_site, cloud_slots

DOLLAR = 1_000_000
MINUTE = 60_000
TAKEN_A_MINUTE = 2000
"""What the storm would take of a fleet that is always there; of one that must come back first it takes half of that."""
ALLOWANCE_MS = 300_000
LATE_MS = 2_000
VERY_LATE_MS = 120_000
"""How late the late half of the cloud's words is, at most."""


LATEST_PASS_MS = 5000


@dataclass
class Machine:
    """What really is: billed from the order on, until its end, a minute at least."""

    record: NodeRecord
    rate: int
    since_ms: int
    heard_up_ms: int
    ended_ms: int | None = None
    heard_end_ms: int | None = None
    known_end: NodeRecord | None = None
    """As the ledger has it once its end was heard of: it changes no more, and there are thousands."""

    def cost(self, now_ms: int) -> int:
        end_ms = now_ms if self.ended_ms is None else min(now_ms, self.ended_ms)
        return interval_micro_usd(self.since_ms, max(end_ms, self.since_ms + MINIMUM_BILLED_MS), self.rate)


@dataclass
class Storm:
    """A cloud that takes back a random spot node all the time, and the run that it happens to."""

    wanted: Wanted
    seed: int
    late_ms: int
    sites: tuple
    now_ms: int = 0
    machines: list[Machine] = field(default_factory=list)
    stage: Stage = Stage.PLANNED
    reason: str = ""
    stage_ms: int = 0
    preemptions: list[int] = field(default_factory=list)
    launches: int = 0
    last_launch_ms: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def late(self) -> int:
        """When what happens now is heard of."""
        return self.now_ms + (self.random.randint(0, self.late_ms) if self.random.random() < 0.5 else 0)

    def reclaim(self, elapsed_ms: int) -> None:
        spot = [m for m in self.machines if m.ended_ms is None and m.record.market is Market.SPOT]
        self.random.shuffle(spot)
        for machine in spot[: round(TAKEN_A_MINUTE * elapsed_ms / MINUTE)]:
            self.end(machine)
            self.preemptions.append(self.now_ms)

    def end(self, machine: Machine) -> None:
        machine.ended_ms, machine.heard_end_ms = self.now_ms, max(self.late(), machine.heard_up_ms)

    def known(self, machine: Machine) -> NodeRecord:
        """As the ledger has it."""
        if machine.known_end is not None:
            return machine.known_end
        happened = {"requested": machine.since_ms}
        if machine.heard_up_ms <= self.now_ms:
            happened |= {"up": machine.since_ms, "ready": machine.since_ms}
        ended = machine.heard_end_ms is not None and machine.heard_end_ms <= self.now_ms
        if ended:
            happened["gone"] = machine.ended_ms
        known = replace(machine.record, happened=happened, reclaimed=ended)
        machine.known_end = known if ended else None
        return known

    def metered(self) -> int:
        """What the ledger would say by now: what is not known to have ended goes on."""
        total = 0
        for machine in self.machines:
            if machine.heard_up_ms > self.now_ms:
                continue
            heard = machine.heard_end_ms is not None and machine.heard_end_ms <= self.now_ms
            end_ms = machine.ended_ms if heard else self.now_ms
            total += interval_micro_usd(
                machine.since_ms, max(end_ms, machine.since_ms + MINIMUM_BILLED_MS), machine.rate
            )
        return total

    def spent(self) -> int:
        return sum(machine.cost(self.now_ms) for machine in self.machines)

    def one_pass(self) -> None:
        facts = Facts(
            now_ms=self.now_ms,
            stage=self.stage,
            reason=self.reason,
            stage_ms=self.stage_ms,
            planned_ms=0,
            nodes=[self.known(machine) for machine in self.machines],
            metered=self.metered(),
            sites=self.sites,
        )
        for action in decide(facts, self.wanted):
            match action:
                case Enter():
                    if action.stage is not self.stage:
                        self.stage_ms = self.now_ms
                    self.stage, self.reason = action.stage, action.reason
                case Buy():
                    self.buy(action)
                case Release():
                    if self.now_ms >= self.stage_ms + ALLOWANCE_MS - LATEST_PASS_MS:  # the last moment there is
                        for machine in self.machines:
                            if machine.record.name in action.nodes and machine.ended_ms is None:
                                self.end(machine)

    def buy(self, action: Buy) -> None:
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
        rate = placement.micro_usd_per_hour + side_micro_usd_per_hour(placement.cloud, placement.market)
        self.machines.append(Machine(record=record, rate=rate, since_ms=self.now_ms, heard_up_ms=self.late()))
        self.launches += 1
        self.last_launch_ms = self.now_ms


def a_storm(seed: int, limiter: LaunchRate | None, late_ms: int, spot: int, max_total: int) -> Storm:
    sites = (cloud_site("gcp", "g1", "abcd"),)
    wanted = Wanted(
        run="demo",
        slots=cloud_slots(spot, sites),
        limits=Limits(max_total=max_total, max_hourly=30 * DOLLAR),
        deadline_ms=None,
        allowance_ms=ALLOWANCE_MS,
        settle_ms=60_000,
        launch_rate=limiter,
    )
    return Storm(wanted=wanted, seed=seed, late_ms=late_ms, sites=sites)


def carried_out(storm: Storm) -> Storm:
    limits = storm.wanted.limits  # prices stand still here
    bound = limits.max_total + limits.max_hourly * ALLOWANCE_MS // 3_600_000
    assert bound <= bound_micro_usd(storm.wanted, storm.sites)
    while storm.stage not in OVER:
        # Passes come late at times; when no money is left for another node, only time goes on.
        idles = storm.now_ms - storm.last_launch_ms > MINUTE
        elapsed_ms = LATEST_PASS_MS if idles else storm.random.choice([*[250] * 10, *[1000] * 5, LATEST_PASS_MS])
        storm.now_ms += elapsed_ms
        storm.reclaim(elapsed_ms)
        storm.one_pass()
        assert storm.spent() <= bound, f"{dollars(storm.spent())} at {storm.now_ms} ms"
        assert storm.now_ms < 24 * 60 * MINUTE
    return storm


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_thousand_preemptions_a_minute_without_launch_limit_stay_in_bound(seed, monkeypatch):
    monkeypatch.setattr(replacing, "FIRST_WAIT_MS", 0)  # nothing holds it back but the money
    storm = carried_out(a_storm(seed, None, LATE_MS, spot=64, max_total=9 * DOLLAR))
    assert storm.reason == "budget"
    assert len([at_ms for at_ms in storm.preemptions if at_ms <= MINUTE]) >= 1000


@pytest.mark.parametrize("seed", [1])
def test_reports_that_arrive_minutes_late_keep_the_bound(seed, monkeypatch):
    monkeypatch.setattr(replacing, "FIRST_WAIT_MS", 0)
    storm = carried_out(a_storm(seed, None, VERY_LATE_MS, spot=16, max_total=2 * DOLLAR))
    assert storm.reason == "budget"


@pytest.mark.parametrize("seed", [1])
def test_the_launch_limit_keeps_the_bound_with_few_launches(seed):
    rate = LaunchRate(per_minute=10, burst=5)
    storm = carried_out(a_storm(seed, rate, LATE_MS, spot=32, max_total=DOLLAR))
    assert storm.reason == "budget"
    assert storm.launches <= 5 + 10 * (storm.last_launch_ms / MINUTE + 1)


def test_the_bound_equals_the_one_that_the_plan_prints():
    storm = a_storm(1, None, LATE_MS, spot=64, max_total=9 * DOLLAR)
    bound = bound_micro_usd(storm.wanted, storm.sites)
    rise = (1 * DOLLAR + side_micro_usd_per_hour("gcp", Market.ON_DEMAND)) / (0.3 * DOLLAR)
    assert bound == pytest.approx(9 * DOLLAR + rise * 30 * DOLLAR * ALLOWANCE_MS / 3_600_000, abs=2)
    plan = Plan(
        region="g1",
        slots=tuple(storm.wanted.slots),
        max_total_micro_usd=storm.wanted.limits.max_total,
        max_hourly_micro_usd=storm.wanted.limits.max_hourly,
        sites=storm.sites,
    )
    assert bound_of_plan(plan) == bound
    assert f"never more than {dollars(bound)}" in describe_brakes(storm.wanted, storm.sites)
