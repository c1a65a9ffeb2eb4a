"""Half an hour of a run on each fake cloud on which everything goes wrong at once, and its bill against the cloud's.

All the time one call in ten fails and the organisation forbids the cheaper region. Meanwhile, overlapping:

    two refusals in unknown words -> the keys expire during a launch, and this computer's address changes
    -> a node freezes, and cannot be ended for minutes -> preemptions -> the target is opened, and ends fail again

The fakes meter each VM as their clouds bill it, by their own clock. A preempted VM lives here as long as its cloud says
at most, because the clouds do not say when it ended, and the ledger books that time. The simulated day of
tests/reports/test_everything_at_once.py is longer and has more preemptions.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.ledger.accounting import run_costs, side_costs_of_run
from launcher.ledger.billing import interval_micro_usd
from launcher.ledger.models import SideCost
from launcher.ledger.store import find_run, nodes_of
from launcher.market.side_prices import MINIMUM_BILLED_MS
from launcher.money import HOUR_MS
from tests.clouds import demo_reward
from tests.clouds.billed import check_bill, instances_of
from tests.clouds.launched import BACK_SECONDS, Launched, job, node_of
from tests.clouds.story import StoryLog, left_in_the_clouds
from tests.fakes.clouds import addresses, prices
from tests.fakes.clouds.aws import RECLAIMED
from tests.fakes.clouds.world import World

MINUTES = 30.0
UP_SECONDS = 1200.0
FAILING_CALLS = 10
"""One call in so many fails."""
EXPIRED_SECONDS = 240.0
UNENDING_SECONDS = 300.0
"""Seconds for which ends fail after a node froze. The controller orders the end after 90 s of silence."""
PREEMPTED_SECONDS = {"aws": 120.0, "gcp": 120.0 + 30.0}
"""From the notice to the end: on Google Cloud the notice that the node asked for, and the time to shut down."""
FORBIDDEN = {"aws": "us-east-1", "gcp": "us-central1"}
UNKNOWN = {"aws": ("PhaseOfTheMoon", "Client.SomethingNew"), "gcp": ("PHASE_OF_THE_MOON", "SOMETHING_NEW_2027")}
ELSEWHERE = "192.0.2.2"
"""The address of this computer after it moved."""
LATE_MS = 10_000
"""Longest time between a VM's end and the one that the ledger assumes, if the cloud names no end."""

TARGET = """\
reward: demo_reward:score
target: {metric: after_story, value: 0.2, evaluations: 1}
"""


@dataclass
class HalfAnHour:
    """The faults of one run, in order. Each step waits for its own evidence, whatever the speed of the computer."""

    run: Launched
    cloud: str
    log: StoryLog
    opened: set[str] = field(default_factory=set)

    @property
    def world(self) -> World:
        return self.run.world

    def play(self) -> None:
        world, cloud, run = self.world, self.cloud, self.run
        for kind in ("down", "store_down"):
            world.fault(kind, cloud, every=FAILING_CALLS)
        world.fault("forbidden", f"{cloud}/{FORBIDDEN[cloud]}")
        for code in UNKNOWN[cloud]:
            world.fault("capacity", cloud, code=code, times=1)
        run.launch(job(run.name, cloud, deadline="14h", ssh_from="", evaluate_every="3", also=TARGET))
        self.until("both its nodes work", lambda: len(run.ready()) == 2, UP_SECONDS)
        run.trains_on()
        self.expire_and_move()
        self.freeze_unendingly()
        self.preempt()
        while time.monotonic() < self.log.began + MINUTES * 60:
            self.preempt()
        assert self.met("capacity") == len(UNKNOWN[cloud])
        assert self.met("forbidden") > 0
        assert min(self.met("down"), self.met("store_down")) > 10
        self.finish()

    def expire_and_move(self) -> None:
        """The keys expire while a successor is launched. This computer moves before they are renewed."""
        world, run = self.world, self.run
        (trainer,), (lost,) = run.ready("trainer"), run.ready("rollout")
        known = set(run.records())
        world.reclaim(lost.name, seconds=PREEMPTED_SECONDS[self.cloud], notice=True)
        self.until("a successor is asked for", lambda: set(run.records()) - known, 300)
        world.fault("expired", self.cloud, seconds=EXPIRED_SECONDS)
        began = time.monotonic()
        self.until("the run waits for a login", lambda: "log in again" in self.told(), EXPIRED_SECONDS)
        world.move(ELSEWHERE)
        self.log("this computer has moved")
        reached = run.trained()
        time.sleep(max(0.0, began + EXPIRED_SECONDS - time.monotonic()))
        assert run.trained() > reached, "the nodes work without this computer"
        self.until("a spot node works", lambda: run.ready("rollout"), BACK_SECONDS)
        assert [node.name for node in run.ready("trainer")] == [trainer.name], "the trainer was kept"
        run.trains_on()

    def freeze_unendingly(self) -> None:
        """A node hangs, and the orders to end it fail for minutes. It is paid until its end."""
        world, run = self.world, self.run
        (frozen,) = run.ready("rollout")
        world.fault("ends_fail", self.cloud, seconds=UNENDING_SECONDS)
        instance = run.instances_by_node()[frozen.name]
        world.freeze(frozen.name)
        self.log("a node is frozen", frozen.name)
        self.until("an end has failed", lambda: self.met("ends_fail") > 0, UNENDING_SECONDS)
        assert instance in world.hosts(), "it is still there"
        self.until("the frozen node has ended", lambda: instance not in world.hosts(), UNENDING_SECONDS + 300)
        self.until("another spot node works", lambda: self.others(frozen.name), BACK_SECONDS)

    def preempt(self) -> None:
        self.until("a preempted node is gone", lambda: len(self.run.ready("rollout")) == 1, BACK_SECONDS)
        (lost,) = self.run.ready("rollout")
        self.world.reclaim(lost.name, seconds=PREEMPTED_SECONDS[self.cloud], notice=True)
        self.until(f"another spot node works after {lost.name}", lambda: self.others(lost.name), BACK_SECONDS)
        self.run.trains_on()

    def finish(self) -> None:
        """Open the target while ends fail again; the run ends by itself.

        Every preempted node has ended by then. EC2 may call an instance preempted that spotrl ordered to end at the
        same time, and may bill it: the ledger bills each that was ordered to end, and the fake cloud would not.
        """
        self.until("no preempted node is left", self.is_whole, BACK_SECONDS)
        self.world.fault("ends_fail", self.cloud, seconds=60)

        def finished() -> bool:
            for node in self.run.ready():
                if node.name not in self.opened:
                    with suppress(LookupError):  # its VM has ended, and the ledger does not know that yet
                        self.world.on(node.name, ["touch", str(demo_reward.GATE)])
                        self.opened.add(node.name)
            return self.run.view().status != "running"

        self.wait("the target is reached", finished, 900)
        self.wait("the run is over", lambda: self.run.view().status in ("finished", "failed", "stopped"), 900)

    def is_whole(self) -> bool:
        return sum(node.is_live for node in self.run.records().values()) == len(self.run.ready()) == 2

    def others(self, lost: str) -> bool:
        return any(node.name != lost for node in self.run.ready("rollout"))

    def told(self) -> str:
        return self.run.spotrl("status", self.run.name, check=False).stdout

    def met(self, kind: str) -> int:
        return sum(fault["met"] for fault in self.world.ask("told_faults") if fault["kind"] == kind)

    def until(self, what: str, holds: Callable[[], object], seconds: float) -> None:
        self.log.waits(what)
        self.run.until(what, holds, seconds)
        self.log(what, f"iteration {self.run.view().iteration}")

    def wait(self, what: str, holds: Callable[[], object], seconds: float) -> None:
        """Wait for a condition; the run may end meanwhile."""
        self.log.waits(what)
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, f"not within {seconds:.0f} s: {what}"
            time.sleep(1)
        self.log(what)


@pytest.fixture
def run(world: World, tmp_path_factory: pytest.TempPathFactory, cloud: str):
    launched = Launched(world=world, name=f"storm-{cloud}", home=world.folder / "home" / f"storm-{cloud}")
    (world.folder / "jobs").mkdir(exist_ok=True)
    shutil.copyfile(Path(demo_reward.__file__), world.folder / "jobs" / "demo_reward.py")
    launched.spotrl("catalog", "refresh")
    try:
        yield launched
    finally:
        world.clear()
        world.move(addresses.CLIENT)
        launched.spotrl("down", launched.name, check=False)
        (launched.home / "meter.json").write_text(json.dumps(instances_of(launched), indent=2))
        shutil.copytree(launched.home, tmp_path_factory.mktemp(launched.name), dirs_exist_ok=True)


@pytest.mark.clouds
@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_half_an_hour_of_mishaps_reaches_its_target_and_its_bill_is_the_clouds_own(world, run, cloud):
    HalfAnHour(run, cloud, StoryLog(out=sys.stdout)).play()
    view = run.view()
    assert (view.status, view.reason) == ("finished", "target")
    assert run.every_batch_is_whole()
    run.down()
    left = left_in_the_clouds(world)
    assert (left["instances"], left["disks"], left["processes"], left["namespaces"]) == (0, 0, 0, 0)
    metered = instances_of(run)
    assert {instance["region"] for instance in metered} == {"us-west-2" if cloud == "aws" else "us-east4"}
    bill = {name: sum(micro_usd_of(run, one) for one in metered if node_of(one) == name) for name in run.records()}
    costs = machine_costs(run)
    assert {name: (costs[name], bill[name]) for name in bill if costs[name] != bill[name]} == {}, "(ledger, meter)"
    assert costs.keys() == bill.keys()
    assert any(bill.values())
    for instance in metered:
        compare_side_costs(run, instance)
    check_bill(run, run.home / "bill")


# --- the bill -----------------------------------------------------------------------------------------


def micro_usd_of(run: Launched, instance: Mapping[str, Any]) -> int:
    """Return what the cloud bills for an instance: its seconds, a minute at least, at the list price of its market."""
    life_ms = instance["ended_ms"] - instance["launched_ms"]
    if instance["reason"] == RECLAIMED and life_ms < HOUR_MS:
        return 0
    rate = prices.micro_usd_per_hour(instance["zone"], instance["instance_type"], instance["market"])
    return interval_micro_usd(0, max(life_ms, MINIMUM_BILLED_MS), rate)


def machine_costs(run: Launched) -> dict[str, int]:
    """Return the ledger's cost of each node's VM."""
    with run.sessions() as session:
        row = find_run(session, run.name)
        costs = run_costs(session, row, row.clock.now_ms())
    return {node.node: sum(charge.micro_usd for charge in node.charges) for node in costs.nodes}


def compare_side_costs(run: Launched, instance: Mapping[str, Any]) -> None:
    """Compare disk and address with the time that the cloud metered.

    EC2 names no time at which it took an instance back: the ledger books these until the last look, or the announced
    time.
    """
    late_ms = LATE_MS if instance["reason"] == RECLAIMED else 0
    life_ms = instance["ended_ms"] - instance["launched_ms"]
    for cost in side_costs(run, node_of(instance)):
        assert abs(life_ms - (cost.end_ms - cost.start_ms)) <= late_ms, (cost.kind, instance)


def side_costs(run: Launched, node: str) -> list[SideCost]:
    with run.sessions() as session:
        row = find_run(session, run.name)
        ids = {one.name: one.id for one in nodes_of(session, row)}
        return [cost for cost in side_costs_of_run(session, row, row.clock.now_ms()) if cost.node_id == ids[node]]
