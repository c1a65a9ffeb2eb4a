"""Failover and billing of a run on clouds that refuse, deny, preempt, answer late and change their prices.

The controller, its ledger and every decision are real; the clouds and the clock are simulated.
"""

import threading
import time
from dataclasses import replace

import pytest
from obstore.store import MemoryStore
from sqlalchemy import select

from engine.events import IterationDone, Judged, Market, Progress
from launcher.controller.controller import Controller
from launcher.decide.actions import Enter
from launcher.decide.facts import OVER
from launcher.decide.reconcile import decide
from launcher.ledger.accounting import run_costs, side_micro_usd
from launcher.ledger.billing import interval_micro_usd
from launcher.ledger.models import BillingInterval, Node, NodeEvent, NodePrice, PriceRow, Run, RunStatus, SideCost
from launcher.ledger.node_history import metered_micro_usd, node_records
from launcher.ledger.store import append_progress, append_status, current_status, find_run, writing
from launcher.market.side_prices import MINIMUM_BILLED_MS, side_micro_usd_per_hour
from launcher.runs.runs import request_stop
from launcher.storage.store_lease import LEASE_SECONDS, LeaseLost, StoreLease
from tests.launcher.cluster.stage import (
    CLOUD_SITES,
    SPOT_RATE,
    TRAINER_RATE,
    HandClock,
    SimulatedCloud,
    cloud_run,
    dead_pid,
    ledger,
    made_run,
    wait_until,
)

MINUTE = 60_000


class Stage:
    """A run with its controller on simulated clouds."""

    def __init__(self, sessions, **run_fields) -> None:
        self.sessions = sessions
        self.run: Run = cloud_run(sessions, **run_fields)
        self.clock = HandClock(factor=1.0)
        self.clock.at_ms = self.run.created_ms
        self.cloud = SimulatedCloud(self.clock)
        self.carried: list[tuple[str, str]] = []
        self.controller = self.another()

    def another(self, carry=None) -> Controller:
        def copied(source: str, target: str) -> None:
            self.carried.append((source, target))

        return Controller(
            self.sessions, self.run, self.cloud, self.clock, f"test-{time.monotonic_ns()}", dead_pid(), carry or copied
        )

    def passes(self, minutes: float, step_ms: int = 20_000) -> None:
        until = self.clock.now_ms() + round(minutes * MINUTE)
        while self.clock.now_ms() < until:
            self.clock.pass_ms(step_ms)
            self.controller.one_pass()

    def records(self):
        with self.sessions() as session:
            return {record.name: record for record in node_records(session, self.run)}

    def live(self) -> dict[str, tuple[str, str]]:
        """Return the (cloud, region) of each live node."""
        places = {name: record.wanted.placement for name, record in self.records().items() if record.is_live}
        return {name: (place.cloud, place.region) for name, place in places.items()}

    def reason(self) -> tuple[str, str]:
        with self.sessions() as session:
            status = current_status(session, self.run)
            assert status is not None
            return status.status, status.reason

    def spent(self) -> int:
        with self.sessions() as session:
            now_ms = self.clock.now_ms()
            total = metered_micro_usd(session, self.run, now_ms)
            assert total == run_costs(session, self.run, now_ms).total
            return total


@pytest.fixture
def sessions(home):
    return ledger(home)


def test_a_run_buys_its_plan_in_the_home_region_and_stays_there(sessions):
    stage = Stage(sessions)
    stage.passes(5)
    assert stage.live() == {
        "demo-trainer-g0": ("gcp", "g1"),
        "demo-spot-0-g0": ("gcp", "g1"),
        "demo-spot-1-g0": ("gcp", "g1"),
    }
    spec = stage.cloud.requested["demo-trainer-g0"][1]
    assert (spec.cloud, spec.store, spec.clock.factor) == ("gcp", "gs://bucket/spotrl/demo", 1.0)


def test_purchases_and_releases_are_in_the_ledger_before_the_cloud_is_called(sessions, monkeypatch):
    """Without the record, a controller killed in between would forget a node, or take its own release for a loss."""
    stage, known = Stage(sessions), {"request": [], "release": []}

    def recorded_first(call, names_of, kind):
        def called(*arguments):
            for name in names_of(*arguments):
                record = stage.records().get(name)
                known[call].append(record is not None and (kind is None or kind in record.happened))
            return plain(*arguments)

        plain = getattr(stage.cloud, call)
        monkeypatch.setattr(stage.cloud, call, called)

    recorded_first("request", lambda want, spec: [spec.node], None)
    recorded_first("release", lambda names: names, "releasing")
    stage.passes(3)
    request_stop(sessions, "demo")
    stage.passes(5)
    assert known == {"request": [True] * 3, "release": [True] * 3}
    assert stage.live() == {}


def test_a_zone_without_capacity_fails_over_to_the_next_zone(sessions):
    stage = Stage(sessions)
    stage.cloud.answers["gcp/g1/g1-a"] = "refuse"
    stage.passes(3)
    zones = {name: stage.cloud.requested[name][0].zone for name in stage.live() if "spot" in name}
    assert set(zones.values()) == {"g1-b"}
    with sessions() as session:
        [event] = session.scalars(select(NodeEvent).where(NodeEvent.kind == "no_capacity"))
        assert event.evidence == "there is no capacity; tried gcp/g1/g1-a"


def test_a_region_without_a_trainer_fails_over_with_all_nodes(sessions):
    stage = Stage(sessions)
    stage.passes(5)
    stage.cloud.end("demo-trainer-g0", "the machine is gone")
    stage.cloud.answers["gcp/g1/"] = "refuse"
    stage.passes(9)
    assert all("g1" in where for where in stage.live().values())  # waited for
    stage.passes(5)
    assert set(stage.live().values()) == {("gcp", "g2")}
    assert len(stage.live()) == 3
    assert {"demo-spot-0-g0", "demo-spot-1-g0"} <= set(stage.cloud.released)


def test_a_cloud_without_a_trainer_fails_over_after_copying_the_checkpoint(sessions):
    stage = Stage(sessions)
    stage.passes(5)
    gate = threading.Event()

    def slow(source: str, target: str) -> None:
        assert gate.wait(120)
        stage.carried.append((source, target))

    stage.controller = stage.another(slow)
    stage.cloud.end("demo-trainer-g0", "the machine is gone")
    stage.cloud.answers["gcp/"] = "refuse"
    stage.passes(12)
    [intent] = [record for record in stage.records().values() if record.role == "trainer" and record.is_live]
    assert intent.wanted.placement.cloud == "aws"
    assert "requested" not in intent.happened  # no node is bought before the checkpoint has been copied
    gate.set()
    wait_until(lambda: stage.carried)
    for _ in range(100):
        stage.passes(0.2)
        if len(stage.live()) == 3 and set(stage.live().values()) == {("aws", "e1")}:
            break
        time.sleep(0.01)
    assert set(stage.live().values()) == {("aws", "e1")}
    assert stage.carried == [("gs://bucket/spotrl/demo", "s3://bucket/spotrl/demo")]
    assert stage.cloud.requested[intent.name][1].store == "s3://bucket/spotrl/demo"


def test_a_checkpoint_copy_that_fails_is_retried_later(sessions, monkeypatch):
    monkeypatch.setattr("launcher.controller.checkpoint_transfer.CARRY_SECONDS", 0.0)
    stage, tries = Stage(sessions, spot=0, sites=(CLOUD_SITES[0], CLOUD_SITES[2])), []

    def unreachable_twice(source: str, target: str) -> None:
        tries.append(source)
        if len(tries) < 3:
            raise OSError("the bucket does not answer")
        assert "the bucket does not answer" in stage.reason()[1]

    stage.controller = stage.another(unreachable_twice)
    stage.passes(3)
    stage.cloud.end("demo-trainer-g0", "the machine is gone")
    stage.cloud.answers["gcp/"] = "refuse"
    for _ in range(200):
        stage.passes(0.2)
        if set(stage.live().values()) == {("aws", "e1")} and len(tries) == 3:
            return
        time.sleep(0.01)
    pytest.fail(f"the run did not move: {stage.live()}, {len(tries)} tries")


def test_a_run_without_capacity_anywhere_waits_at_no_cost_and_resumes(sessions):
    stage = Stage(sessions)
    stage.passes(5)
    stage.cloud.end("demo-trainer-g0", "the machine is gone")
    stage.cloud.answers |= {"gcp/": "refuse", "aws/": "refuse"}
    stage.passes(20, step_ms=30_000)
    assert stage.live() == {}
    spent, launches = stage.spent(), len(stage.cloud.requested)
    stage.passes(120, step_ms=180_000)
    assert stage.spent() == spent
    assert len(stage.cloud.requested) - launches < 30
    assert stage.reason()[0] == "running"
    with sessions() as session:
        reasons = session.scalars(select(RunStatus.reason)).all()
    assert any("no capacity for a trainer in gcp g1, gcp g2, aws e1" in reason for reason in reasons)
    stage.cloud.answers.clear()
    stage.passes(40, step_ms=60_000)
    assert len(stage.live()) == 3
    assert len(set(stage.live().values())) == 1


def test_quota_0_everywhere_ends_the_run_and_names_the_regions(sessions):
    stage = Stage(sessions)
    stage.cloud.answers |= {"gcp/": "deny", "aws/": "deny"}
    stage.passes(15)
    status, reason = stage.reason()
    assert status == "failed"
    for place in ("gcp g1", "gcp g2", "aws e1"):
        assert f"quota GPUS is 0 in {place}" in reason
    assert stage.live() == {}


def test_quota_0_in_one_region_fails_over_to_another(sessions):
    stage = Stage(sessions)
    stage.cloud.answers["gcp/g1/"] = "deny"
    stage.passes(5)
    assert set(stage.live().values()) == {("gcp", "g2")}


def test_a_successor_is_bought_at_the_notice_in_another_zone(sessions):
    stage = Stage(sessions, spot=1)
    stage.passes(5)
    stage.cloud.notices["demo-spot-0-g0"] = stage.clock.now_ms() + 2 * MINUTE
    stage.passes(0.2)
    assert set(stage.live()) == {"demo-trainer-g0", "demo-spot-0-g0", "demo-spot-0-g1"}
    assert stage.cloud.requested["demo-spot-0-g1"][0].zone == "g1-b"
    stage.cloud.preempt("demo-spot-0-g0")
    stage.passes(0.2)
    assert set(stage.live()) == {"demo-trainer-g0", "demo-spot-0-g1"}


def test_an_unreachable_cloud_api_changes_nothing(sessions):
    stage = Stage(sessions)
    stage.passes(5)
    before = stage.live()
    stage.cloud.is_down = True
    stage.passes(30, step_ms=120_000)
    assert stage.live() == before
    assert stage.cloud.released == []


def test_a_controller_silent_for_longer_than_its_lease_catches_up(sessions):
    stage = Stage(sessions)
    stage.passes(5)
    stage.cloud.preempt("demo-spot-0-g0")
    stage.clock.pass_ms(10 * MINUTE)  # SIGSTOP, SIGCONT
    stage.controller.one_pass()
    assert "demo-spot-0-g1" in stage.live()


def test_another_controller_continues_from_the_ledger_alone(sessions):
    stage = Stage(sessions)
    stage.cloud.answers["gcp/g1/"] = "refuse"
    for _ in range(30):
        stage.passes(0.5)
        stage.controller = stage.another()
    assert set(stage.live().values()) == {("gcp", "g2")}
    assert len(stage.live()) == 3


# --- billing and limits -------------------------------------------------------------------------------


def test_a_node_that_was_up_for_a_moment_is_billed_a_minute(sessions):
    stage = Stage(sessions, spot=1)
    stage.passes(1.2)
    stage.cloud.preempt("demo-spot-0-g0", "compute.instances.preempted")
    stage.controller.one_pass()
    with sessions() as session:
        [interval] = session.scalars(select(BillingInterval))
    assert interval.end_ms - interval.start_ms < MINIMUM_BILLED_MS
    assert interval.micro_usd == interval_micro_usd(0, MINIMUM_BILLED_MS, SPOT_RATE)
    stage.spent()


@pytest.mark.parametrize(
    ("site", "evidence", "is_free"),
    [
        (CLOUD_SITES[2], "Server.SpotInstanceTermination: Spot instance termination", True),
        (CLOUD_SITES[2], "it stopped answering", False),
        (CLOUD_SITES[0], "Server.SpotInstanceTermination", False),
    ],
)
def test_aws_bills_no_first_hour_if_it_reports_the_preemption_itself(sessions, site, evidence, is_free):
    stage = Stage(sessions, spot=1, sites=(site,))
    stage.passes(30, step_ms=60_000)
    stage.cloud.preempt("demo-spot-0-g0", evidence)
    stage.passes(0.2)
    with sessions() as session:
        [interval] = session.scalars(select(BillingInterval))
    assert (interval.micro_usd == 0) is is_free
    assert ("first hour" in interval.basis) is is_free
    assert evidence in interval.basis or not is_free


def test_aws_bills_a_node_preempted_after_its_first_hour(sessions):
    stage = Stage(sessions, spot=1, sites=(CLOUD_SITES[2],))
    stage.passes(62, step_ms=30_000)
    stage.cloud.preempt("demo-spot-0-g0")
    stage.passes(0.2)
    with sessions() as session:
        [interval] = session.scalars(select(BillingInterval))
    assert interval.micro_usd > SPOT_RATE


def price(stage: Stage, site, zone: str, micro_usd: int, instance_type: str = "g6.xlarge") -> None:
    """Record a new price of the cloud."""
    now_ms = stage.clock.now_ms()
    row = PriceRow(
        cloud=site.cloud,
        region=site.region,
        zone=zone,
        zone_id=zone,
        instance_type=instance_type,
        market="spot",
        micro_usd_per_hour=micro_usd,
        currency="USD",
        source="aws spot",
        source_id="1",
        effective_ms=now_ms,
        observed_ms=now_ms,
        last_seen_ms=now_ms,
    )
    with writing(stage.sessions) as session:
        session.add(row)


@pytest.fixture
def prices_at_once(monkeypatch):
    monkeypatch.setattr("launcher.controller.facts_reader.PRICE_SECONDS", 0.0)


@pytest.mark.usefixtures("prices_at_once")
def test_a_doubled_price_is_billed_from_then_on(sessions):
    stage = Stage(sessions, spot=1, sites=(CLOUD_SITES[2],))
    stage.passes(11, step_ms=30_000)  # up at 1 minute
    price(stage, CLOUD_SITES[2], "e1-a", 2 * SPOT_RATE)
    stage.passes(10)
    record = stage.records()["demo-spot-0-g0"]
    assert record.micro_usd_per_hour == 2 * SPOT_RATE
    with sessions() as session:
        costs = {node.node: node for node in run_costs(session, stage.run, stage.clock.now_ms()).nodes}
    charges = costs["demo-spot-0-g0"].charges
    assert [charge.micro_usd_per_hour for charge in charges] == [SPOT_RATE, 2 * SPOT_RATE]
    request_stop(sessions, "demo")
    stage.passes(3)
    with sessions() as session:
        spot = session.scalars(select(Node.id).where(Node.slot == "spot-0")).one()
        rates = session.scalars(select(BillingInterval.micro_usd_per_hour).where(BillingInterval.node_id == spot)).all()
    assert rates == [SPOT_RATE, 2 * SPOT_RATE]
    stage.spent()


@pytest.mark.usefixtures("prices_at_once")
def test_a_price_over_the_hourly_limit_releases_the_dearest_spot_node(sessions):
    beside = sum(side_micro_usd_per_hour("aws", market) for market in (Market.ON_DEMAND, Market.SPOT, Market.SPOT))
    limit = TRAINER_RATE + 3 * SPOT_RATE + beside
    stage = Stage(sessions, spot=2, sites=(CLOUD_SITES[2],), max_hourly=limit)
    stage.passes(5)
    price(stage, CLOUD_SITES[2], "e1-b", 3 * SPOT_RATE)
    stage.passes(1)
    assert stage.cloud.released == ["demo-spot-1-g0"]
    stage.passes(1)
    assert "demo-trainer-g0" in stage.live()
    assert stage.cloud.requested["demo-spot-1-g1"][0].zone == "e1-a"  # the cheaper zone, within the limit


def test_the_bill_follows_the_instance_that_was_really_bought(sessions):
    stage = Stage(sessions, spot=1, sites=(CLOUD_SITES[0],))
    stage.cloud.really["demo-spot-0-g0"] = ("g1-c", "g6.2xlarge")
    stage.passes(5)
    record = stage.records()["demo-spot-0-g0"]
    assert (record.zone, record.instance_type) == ("g1-c", "g6.2xlarge")
    assert record.micro_usd_per_hour == TRAINER_RATE  # its price is unknown, so the on-demand price counts
    with sessions() as session:
        row = session.scalars(select(NodePrice).where(NodePrice.instance_type == "g6.2xlarge")).one()
    assert "counted as on demand" in row.price_source


def test_disks_and_addresses_are_counted_and_traffic_is_not_priced(sessions):
    stage = Stage(sessions, spot=1, sites=(CLOUD_SITES[0],))
    stage.passes(61, step_ms=60_000)
    rate = side_micro_usd_per_hour("gcp", Market.SPOT) + side_micro_usd_per_hour("gcp", Market.ON_DEMAND)
    with sessions() as session:
        assert side_micro_usd(session, stage.run, stage.clock.now_ms()) == pytest.approx(rate, rel=0.02)
    request_stop(sessions, "demo")
    stage.passes(3)
    with sessions() as session:
        rows = session.scalars(select(SideCost)).all()
        assert sorted(row.kind for row in rows) == ["address", "address", "disk", "disk", "egress"]
        assert [row.micro_usd for row in rows if row.kind == "egress"] == [None]
        total = side_micro_usd(session, stage.run, stage.clock.now_ms())
    assert total == sum(row.micro_usd or 0 for row in rows)


def test_the_disk_of_the_plan_is_bought_reserved_and_billed(sessions):
    def larger(option):
        return replace(option, placement=replace(option.placement, disk_gib=730))

    site = CLOUD_SITES[0]
    site = replace(site, trainer=tuple(map(larger, site.trainer)), rollout=tuple(map(larger, site.rollout)))
    stage = Stage(sessions, spot=1, sites=(site,))
    stage.passes(61, step_ms=60_000)
    assert {want.disk_gib for want, _, _ in stage.cloud.requested.values()} == {730}
    rates = [side_micro_usd_per_hour("gcp", market, disk_gib=730) for market in (Market.SPOT, Market.ON_DEMAND)]
    assert min(rates) > 100_000  # a dime an hour each, for the disk alone
    assert sum(record.beside_micro_usd_per_hour for record in stage.records().values()) == sum(rates)
    with sessions() as session:
        assert side_micro_usd(session, stage.run, stage.clock.now_ms()) == pytest.approx(sum(rates), rel=0.02)
    [trainer] = [spec for _, spec, _ in stage.cloud.requested.values() if spec.role == "trainer"]
    assert trainer.money_longest_ms == pytest.approx(100 * 60 * MINUTE * 10**6 / (TRAINER_RATE + max(rates)), rel=0.02)


def test_the_budget_ends_a_run_during_its_launch(sessions):
    stage = Stage(sessions, spot=2, max_total=150_000)
    stage.passes(30, step_ms=30_000)
    assert stage.reason() == ("stopped", "budget")
    assert stage.live() == {}
    assert stage.spent() <= 150_000


def deadline_ms(stage) -> int:
    controller = stage.controller
    return controller.deadlines.deadline_ms(controller.facts(), controller.wanted, stage.clock.now_ms())


def test_limits_of_all_runs_hold_even_if_two_decide_at_the_same_moment(sessions):
    limit = "$1.5/h"  # one trainer, not two
    first = Stage(sessions, name="one", spot=0, all_runs={"max_hourly": limit})
    second = Stage(sessions, name="two", spot=0, all_runs={"max_hourly": limit})
    second.clock.at_ms = first.clock.at_ms
    decided = second.controller.facts  # the view of the second run before the first has bought
    seen = decided()
    first.passes(0.2)
    second.controller.facts = lambda: seen
    second.controller.one_pass()
    assert second.cloud.requested == {}
    second.controller.facts = decided
    second.passes(0.2)
    assert "all_runs.max_hourly" in second.reason()[1]
    request_stop(sessions, "one")
    first.passes(3)
    second.passes(1)
    assert list(second.cloud.requested) == ["two-trainer-g0"]


def test_launches_are_rate_limited(sessions):
    stage = Stage(sessions, spot=9, recovery={"launches_per_minute": 10})
    stage.clock.pass_ms(1000)
    stage.controller.one_pass()
    assert len(stage.cloud.requested) == 5
    stage.passes(0.5, step_ms=3000)
    assert len(stage.cloud.requested) == 10


# --- the end ------------------------------------------------------------------------------------------


def test_a_controller_is_finished_when_no_resource_of_its_run_is_left(sessions):
    stage = Stage(sessions, spot=1)
    stage.passes(5)
    stage.cloud.stays_untidy = True
    request_stop(sessions, "demo")
    stage.passes(3)
    assert stage.reason()[0] in OVER
    assert not stage.controller.one_pass()
    stage.cloud.stays_untidy = False
    assert stage.controller.one_pass()


def test_nodes_without_a_controller_end_within_the_limit_of_all_runs(sessions):
    """The limit of all runs is $2. A node without a controller would have run for $100."""
    all_runs = {"max_total": "$2"}
    first = Stage(sessions, name="one", spot=0, max_total=100_000_000, all_runs=all_runs)
    second = Stage(sessions, name="two", spot=0, max_total=100_000_000, all_runs=all_runs)
    second.clock.at_ms = first.clock.at_ms
    first.passes(3)
    second.passes(3)
    rates, ends_ms = 0, []
    for stage in (first, second):
        [spec] = [request[1] for request in stage.cloud.requested.values()]
        [record] = stage.records().values()
        rates += record.micro_usd_per_hour + record.beside_micro_usd_per_hour
        ends_ms.append(deadline_ms(stage))
        assert spec.money_longest_ms < 2.2 * 3_600_000
    left = 2_000_000 - first.spent() - second.spent()
    for end_ms in ends_ms:
        assert (end_ms - first.clock.now_ms()) / 3_600_000 * rates <= left * 1.05


def test_reserves_of_other_runs_count_against_the_limit_of_all_runs(sessions):
    """No money is spent yet, but ending the first run's trainer may take 5 minutes, which cost 8 cents."""
    limit = {"max_total": "$0.15"}  # one trainer's reserve, not two
    first = Stage(sessions, name="one", spot=0, all_runs=limit)
    second = Stage(sessions, name="two", spot=0, all_runs=limit)
    second.clock.at_ms = first.clock.at_ms
    first.passes(0.2)
    assert list(first.cloud.requested) == ["one-trainer-g0"]
    second.passes(0.2)
    assert second.controller.facts().others.metered == 0
    assert second.cloud.requested == {}


JUDGED = {"name": "vlm", "vlm": {"url": "http://judge", "model": "m", "usd_per_million_input": 1.0, "max_usd": 4.0}}


def local_run(sessions, name, paid=0, status="running", **fields) -> Run:
    """A run on this machine, whose judge has cost `paid` micro-dollars."""
    run = made_run(sessions, name=name, **fields)
    judged = Judged(worker="w", calls=((1, 1, paid),))
    with writing(sessions) as session:
        append_progress(session, run, [Progress(run=name, source="c", lineage=1, seq=1, at_ms=0, event=judged)])
        append_status(session, session.get_one(Run, run.id), status, "", run.created_ms)
    return run


def test_judges_of_local_runs_count_against_the_limit_of_all_runs(sessions):
    """Nodes of a local run are not bought, and its paid judge is. A run that ended holds no money any more."""
    stage = Stage(sessions, spot=0, all_runs={"max_total": "$50"})
    local_run(sessions, "free")
    local_run(sessions, "over", paid=1_000_000, status="stopped", reward=JUDGED)
    local_run(sessions, "runs", paid=1_500_000, reward=JUDGED)
    local_run(sessions, "starts", status="planned", reward=JUDGED)
    others = stage.controller.facts().others
    assert (others.metered, others.reserved) == (2_500_000, 2_500_000)
    assert (others.hourly, others.planned_hourly) == (0, 0)
    assert stage.controller.facts().others == others


@pytest.mark.parametrize(("max_total", "stage"), [("$9", "running"), ("$8.99", "draining")])
def test_a_local_run_starts_only_if_its_judges_fit_beside_the_other_runs(sessions, max_total, stage):
    local_run(sessions, "one", paid=1_000_000, reward=JUDGED)
    local_run(sessions, "two", paid=1_000_000, status="failed", reward=JUDGED)
    run = made_run(sessions, reward=JUDGED, all_runs={"max_total": max_total})
    clock = HandClock(factor=1.0)
    clock.at_ms = run.created_ms
    controller = Controller(sessions, run, SimulatedCloud(clock), clock, "test", dead_pid())
    actions = decide(controller.facts(), controller.wanted)
    [entered] = [action for action in actions if isinstance(action, Enter)]
    assert entered.stage == stage
    assert ("all_runs.max_total does not bear the judges" in entered.reason) == (stage == "draining")


def test_judges_of_two_local_runs_that_start_at_the_same_moment_keep_the_limit(sessions):
    clock, cloud, controllers = HandClock(factor=1.0), {}, {}
    for name in ("one", "two"):
        run = made_run(sessions, name=name, factor=1.0, reward=JUDGED, all_runs={"max_total": "$7"})  # not two of $4
        clock.at_ms = max(clock.at_ms, run.created_ms)
        cloud[name] = SimulatedCloud(clock)
        controllers[name] = Controller(sessions, run, cloud[name], clock, name, dead_pid())
    first, second = controllers.values()
    decided = second.facts
    seen = decided()  # before the first has bought
    first.one_pass()
    second.facts = lambda: seen
    second.one_pass()
    assert cloud["one"].requested
    assert not cloud["two"].requested
    with sessions() as session:
        status = current_status(session, find_run(session, "two"))
        assert status.status == "draining"
        assert "all_runs.max_total does not bear the judges" in status.reason
    second.facts = decided
    second.one_pass()
    with sessions() as session:
        assert current_status(session, find_run(session, "two")).status == "stopped"
        assert current_status(session, find_run(session, "one")).status == "running"


def test_a_spend_deadline_comes_earlier_if_a_node_costs_more_than_planned(sessions):
    """The price is three times the planned one, so the budget lasts for a third of the time."""
    stage = Stage(sessions, spot=2, max_total=20_000_000, max_hourly=50_000_000)
    stage.passes(3)
    deadlines = {}
    stage.cloud.rearm = deadlines.__setitem__
    stage.controller.deadlines._armed.clear()
    stage.passes(1)
    before = dict(deadlines)
    with writing(sessions) as session:
        for node in session.scalars(select(Node).where(Node.role == "trainer")):
            session.add(
                NodePrice(
                    node_id=node.id,
                    at_ms=stage.clock.now_ms(),
                    zone=node.zone,
                    instance_type=node.instance_type,
                    micro_usd_per_hour=3 * node.micro_usd_per_hour,
                    price_source="test",
                    price_observed_at="2026-11-01T00:00:00Z",
                )
            )
    stage.passes(1)
    assert set(deadlines) == set(stage.live())
    hours = {name: (deadlines[name] - stage.clock.now_ms()) / 3_600_000 for name in deadlines}
    assert all(deadlines[name] < before[name] - 60 * MINUTE for name in deadlines), (before, deadlines)
    rates = sum(record.micro_usd_per_hour + record.beside_micro_usd_per_hour for record in stage.records().values())
    left = 20_000_000 - stage.spent()
    assert all(one * rates <= left * 1.01 for one in hours.values())


def test_limits_of_all_runs_come_from_the_current_configuration(sessions, home, monkeypatch):
    config = home / "config.yaml"
    monkeypatch.setenv("SPOTRL_CONFIG", str(config))
    judge = {"url": "http://judge", "model": "m", "usd_per_million_input": 1.0, "max_usd": 0.25}
    reward = {"name": "vlm", "vlm": judge}
    stage = Stage(sessions, spot=0, all_runs={"max_total": "$50"}, reward=reward)
    stage.passes(1)
    assert stage.controller.wanted.all_runs.max_total == 49_750_000, "the judge's money is set aside"
    config.write_text("all_runs: {max_total: $1}\n")
    monkeypatch.setattr("launcher.controller.controller.PRICE_SECONDS", 0.0)
    stage.passes(1)
    assert stage.controller.wanted.all_runs.max_total == 750_000
    config.write_text("all_runs: {max_total: none at all}\n")
    stage.passes(1)
    assert stage.controller.wanted.all_runs.max_total == 750_000, "what cannot be read changes nothing"
    monkeypatch.setattr("launcher.controller.controller.PRICE_SECONDS", 3600.0)
    stage.passes(90, step_ms=50_000)
    assert stage.reason()[0] in ("draining", "stopped")


def test_a_controller_whose_lease_another_computer_holds_does_nothing(sessions):
    """A bug let such a controller continue for 150 passes and buy a node."""
    bucket, wall = MemoryStore(), HandClock()
    ours, theirs = (StoreLease(lambda: bucket, "demo", who, wall.now_ms) for who in ("ours", "theirs"))
    stage = Stage(sessions)
    stage.controller.recorder.bucket_lease = ours
    ours.take()
    stage.passes(3)
    wall.pass_ms(round(LEASE_SECONDS * 1000) + 1)
    theirs.take()
    ours.renew()
    stage.cloud.preempt("demo-spot-0-g0")
    before, released = set(stage.records()), list(stage.cloud.released)
    for _ in range(150):
        with pytest.raises(LeaseLost):
            stage.passes(0.1)
    assert (set(stage.records()), stage.cloud.released) == (before, released)


def test_a_lease_lost_in_the_middle_of_a_pass_stops_the_purchase(sessions):
    bucket, wall = MemoryStore(), HandClock()
    ours, theirs = (StoreLease(lambda: bucket, "demo", who, wall.now_ms) for who in ("ours", "theirs"))
    stage = Stage(sessions)
    stage.controller.recorder.bucket_lease = ours
    ours.take()

    def loses_it(*_):
        wall.pass_ms(round(LEASE_SECONDS * 1000) + 1)
        theirs.take()
        ours.renew()

    stage.controller.recorder.write_prices = loses_it
    with pytest.raises(LeaseLost):
        stage.passes(0.2)
    assert stage.cloud.requested == {}
    assert stage.records() == {}


def test_resources_that_cannot_be_deleted_are_reported_and_given_up(sessions):
    stage = Stage(sessions, spot=1)
    stage.passes(5)
    stage.cloud.stays_untidy = True
    request_stop(sessions, "demo")
    stage.passes(20)
    assert stage.controller.one_pass()
    assert "`spotrl reap` lists them" in stage.reason()[1]


def test_a_node_without_a_controller_ends_itself_after_the_runs_deadline(sessions):
    stage = Stage(sessions, spot=1, budget={"deadline": "30m"})
    stage.passes(1)
    deadlines = {
        name: spec.money_deadline_ms - stage.run.created_ms for name, (_, spec, _) in stage.cloud.requested.items()
    }
    assert set(deadlines.values()) == {35 * MINUTE}  # its budget would last for days
    stage.passes(31)
    assert stage.reason()[1] == "deadline"


# --- a stalled run ----------------------------------------------------------------------------------------


def expecting(sessions, iteration_minutes):
    """Start a run with this predicted time of an iteration of the trainer alone."""
    stage = Stage(sessions, max_total=1_000_000_000)
    predicted = replace(stage.controller.wanted, iteration_ms=iteration_minutes * MINUTE)
    stage.controller.wanted = predicted
    return stage


def iteration_done(stage, iteration, at_ms):
    event = IterationDone(
        iteration=iteration,
        reward_mean=0.0,
        reward_std=0.0,
        group_std_mean=0.0,
        explored=0,
        manifest_digest="",
        phase_ms={},
        wall_seconds=1.0,
        health={},
    )
    line = Progress(run="demo", source="trainer", lineage=1, seq=iteration, at_ms=at_ms, event=event)
    with writing(stage.sessions) as session:
        append_progress(session, stage.run, [line])


def test_a_run_whose_trainer_answers_without_progress_ends(sessions):
    stage = expecting(sessions, 15)
    stage.passes(145, step_ms=50_000)
    assert stage.reason()[0] == "running"
    stage.passes(15, step_ms=50_000)
    status, reason = stage.reason()
    assert status in ("draining", "failed")
    assert "no new iteration for 2h 30m although the trainer answers" in reason
    assert stage.live() == {}


def test_iterations_keep_a_run_alive_even_if_the_trainers_clock_is_wrong(sessions):
    stage = expecting(sessions, 15)
    for iteration in range(2):
        stage.passes(140, step_ms=50_000)
        iteration_done(stage, iteration, at_ms=stage.clock.now_ms() - 48 * 60 * MINUTE)
    assert stage.reason()[0] == "running"


def test_a_suspended_controller_does_not_take_its_gap_for_a_stall(sessions):
    stage = expecting(sessions, 15)
    stage.passes(10)
    stage.clock.pass_ms(5 * 60 * MINUTE)
    stage.passes(10)
    assert stage.reason()[0] == "running"


def test_a_run_that_waits_for_its_user_does_not_count_as_stalled(sessions):
    stage = expecting(sessions, 15)
    stage.passes(10)
    stage.controller.engine.trouble = "the coordinator's disk is full"
    stage.passes(180, step_ms=50_000)
    assert stage.reason()[0] == "running"
    stage.controller.engine.trouble = None
    stage.passes(60, step_ms=50_000)
    assert stage.reason()[0] == "running"
