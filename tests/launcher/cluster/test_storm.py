"""A thousand preemptions a minute, some reported late: spend stays within the bound of the plan.

Decisions and budget guard are the controller's own; cloud, ledger and clock are simulated. Every launch is billed from
the time of its order for at least a minute, and half of the cloud's reports arrive late.
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
from launcher.decide.run_budget import bound_micro_usd, bound_of_plan, describe_limits
from launcher.ledger.billing import interval_micro_usd
from launcher.market.side_prices import MINIMUM_BILLED_MS, side_micro_usd_per_hour
from launcher.money import dollars
from launcher.placement.plan import Plan
from tests.launcher.cluster.stage import cloud_site, cloud_slots

DOLLAR = 1_000_000
MINUTE = 60_000
PREEMPTIONS_A_MINUTE = 2000
"""Preemptions a minute of a fleet that is always complete; a fleet that must be replaced first has half as many."""
ALLOWANCE_MS = 300_000
LATE_MS = 2_000
VERY_LATE_MS = 120_000
"""Maximum delay of the late half of the cloud's reports."""


LATEST_PASS_MS = 5000


@dataclass
class Instance:
    """An instance as it really is: billed from its order to its end, for at least a minute."""

    record: NodeRecord
    rate: int
    since_ms: int
    reported_up_ms: int
    ended_ms: int | None = None
    reported_end_ms: int | None = None
    known_end: NodeRecord | None = None
    """The final record once the end is known. It is cached, because there are thousands."""

    def cost(self, now_ms: int) -> int:
        end_ms = now_ms if self.ended_ms is None else min(now_ms, self.ended_ms)
        return interval_micro_usd(self.since_ms, max(end_ms, self.since_ms + MINIMUM_BILLED_MS), self.rate)


@dataclass
class Storm:
    """A cloud that keeps preempting random spot nodes, and a run on it."""

    wanted: Wanted
    seed: int
    late_ms: int
    sites: tuple
    now_ms: int = 0
    instances: list[Instance] = field(default_factory=list)
    stage: Stage = Stage.PLANNED
    reason: str = ""
    stage_ms: int = 0
    preemptions: list[int] = field(default_factory=list)
    launches: int = 0
    last_launch_ms: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def late(self) -> int:
        """Return the time at which an event of now is reported."""
        return self.now_ms + (self.random.randint(0, self.late_ms) if self.random.random() < 0.5 else 0)

    def preempt(self, elapsed_ms: int) -> None:
        spot = [m for m in self.instances if m.ended_ms is None and m.record.market is Market.SPOT]
        self.random.shuffle(spot)
        for instance in spot[: round(PREEMPTIONS_A_MINUTE * elapsed_ms / MINUTE)]:
            self.end(instance)
            self.preemptions.append(self.now_ms)

    def end(self, instance: Instance) -> None:
        instance.ended_ms, instance.reported_end_ms = self.now_ms, max(self.late(), instance.reported_up_ms)

    def known(self, instance: Instance) -> NodeRecord:
        """Return the nodes as recorded in the ledger."""
        if instance.known_end is not None:
            return instance.known_end
        happened = {"requested": instance.since_ms}
        if instance.reported_up_ms <= self.now_ms:
            happened |= {"up": instance.since_ms, "ready": instance.since_ms}
        ended = instance.reported_end_ms is not None and instance.reported_end_ms <= self.now_ms
        if ended:
            happened["gone"] = instance.ended_ms
        known = replace(instance.record, happened=happened, reclaimed=ended)
        instance.known_end = known if ended else None
        return known

    def metered(self) -> int:
        """Return the spend as in the ledger: nodes without a known end are still billed."""
        total = 0
        for instance in self.instances:
            if instance.reported_up_ms > self.now_ms:
                continue
            is_reported = instance.reported_end_ms is not None and instance.reported_end_ms <= self.now_ms
            end_ms = instance.ended_ms if is_reported else self.now_ms
            total += interval_micro_usd(
                instance.since_ms, max(end_ms, instance.since_ms + MINIMUM_BILLED_MS), instance.rate
            )
        return total

    def spent(self) -> int:
        return sum(instance.cost(self.now_ms) for instance in self.instances)

    def one_pass(self) -> None:
        facts = Facts(
            now_ms=self.now_ms,
            stage=self.stage,
            reason=self.reason,
            stage_ms=self.stage_ms,
            planned_ms=0,
            nodes=[self.known(instance) for instance in self.instances],
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
                    if self.now_ms >= self.stage_ms + ALLOWANCE_MS - LATEST_PASS_MS:  # the last moment of the run
                        for instance in self.instances:
                            if instance.record.name in action.nodes and instance.ended_ms is None:
                                self.end(instance)

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
        self.instances.append(Instance(record=record, rate=rate, since_ms=self.now_ms, reported_up_ms=self.late()))
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
    limits = storm.wanted.limits  # prices do not change here
    bound = limits.max_total + limits.max_hourly * ALLOWANCE_MS // 3_600_000
    assert bound <= bound_micro_usd(storm.wanted, storm.sites)
    while storm.stage not in OVER:
        # Some passes are late. Once the budget allows no further node, only time advances.
        idles = storm.now_ms - storm.last_launch_ms > MINUTE
        elapsed_ms = LATEST_PASS_MS if idles else storm.random.choice([*[250] * 10, *[1000] * 5, LATEST_PASS_MS])
        storm.now_ms += elapsed_ms
        storm.preempt(elapsed_ms)
        storm.one_pass()
        assert storm.spent() <= bound, f"{dollars(storm.spent())} at {storm.now_ms} ms"
        assert storm.now_ms < 24 * 60 * MINUTE
    return storm


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_preemptions_a_minute_without_launch_limit_stay_in_bound(seed, monkeypatch):
    monkeypatch.setattr(replacing, "FIRST_WAIT_MS", 0)  # only the budget limits the launches
    storm = carried_out(a_storm(seed, None, LATE_MS, spot=64, max_total=9 * DOLLAR))
    assert storm.reason == "budget"
    assert len([at_ms for at_ms in storm.preemptions if at_ms <= MINUTE]) >= 1000


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_reports_that_arrive_minutes_late_keep_the_bound(seed, monkeypatch):
    monkeypatch.setattr(replacing, "FIRST_WAIT_MS", 0)
    storm = carried_out(a_storm(seed, None, VERY_LATE_MS, spot=16, max_total=2 * DOLLAR))
    assert storm.reason == "budget"


@pytest.mark.slow
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
    assert f"never more than {dollars(bound)}" in describe_limits(storm.wanted, storm.sites)
