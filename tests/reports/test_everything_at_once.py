"""A day on two clouds on which everything goes wrong at once, with the ledger against the clouds' own meters.

The controller, its decisions, the ledger and the provisioner are real; SkyPilot, the clouds, the nodes and the clock
are simulated. A cloud meters each VM from its start to its end, a minute at least, with its disk and its address, and
does not bill what EC2 takes back in its first hour, unless the node had been told to end.
"""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from sqlalchemy.exc import SQLAlchemyError

from engine.events import EngineFinished, EngineStarted, IterationDone, Market, Progress
from launcher.clouds.base import CloudRefused, CloudUnreachable, Instance, InstanceState, LoginNeeded, RegionSetup
from launcher.controller.controller import Controller
from launcher.exit_codes import Failure
from launcher.job.company import NOTHING_NAMED
from launcher.ledger.accounting import run_costs, spent_micro_usd
from launcher.ledger.billing import interval_micro_usd
from launcher.ledger.node_history import node_records
from launcher.ledger.store import append_progress, current_status, nodes_of, writing
from launcher.market.side_prices import side_rates
from launcher.money import HOUR_MS
from launcher.provision.sky.bundle import Bundle
from launcher.provision.sky.outcome import Failed, Outcome, outcome_of
from launcher.provision.sky.set_up import SetUp
from launcher.provision.sky.sky import SkyUnreachable
from launcher.provision.sky.sky_provisioner import SkyProvisioner
from launcher.provision.sky.surroundings import Purchases
from tests.launcher.cluster.stage import cloud_site, dead_pid
from tests.launcher.cluster.test_sky_provisioner import AtOnce, FakeSky
from tests.reports.test_money_ends import Link, MoneyCloud, MoneyStage

MINUTE = 60_000
PASS_S = 60.0
BOOT_MS = 90_000
FAILING_CALLS = 0.1
FORBIDDEN = "eu-central-1"
PLACES = (("aws", FORBIDDEN), ("gcp", "us-central1"), ("aws", "us-east-1"))
"""The plan's first region is the one that the organisation forbids."""

SPOT_SLOTS = 3
PREEMPTED_BY = "Server.SpotInstanceTermination: Spot instance termination"

MISHAPS = {  # hours from the launch
    "expired keys": (2.0, 2.7),
    "ends that fail": (5.0, 6.0),
    "unknown refusals": (8.0, 8.5),
    "another address": (11.0, 99.0),
    "address service away": (11.0, 11.1),
    "no room on Google Cloud": (12.5, 13.5),
    "silent API": (14.0, 14.5),
    "ends that are ignored": (17.0, 17.8),
    "a dead controller": (19.0, 19.4),
}


@dataclass
class StormyCloud(MoneyCloud):
    """A cloud of several regions that loses a share of the calls, and everything else that the day has in store."""

    day: "Day | None" = None
    rules: dict[str, str] = field(default_factory=dict)
    """From where each region lets SSH in."""
    calls: int = 0
    lost: int = 0

    def _answer(self) -> None:
        assert self.day is not None
        self.calls += 1
        if self.day.has("expired keys"):
            raise LoginNeeded("the login has expired; log in again: aws sso login")
        if self.day.has("silent API") or self.day.dice.random() < FAILING_CALLS:
            self.lost += 1
            raise CloudUnreachable(f"{self.cloud}: 503 ServiceUnavailable")

    def end(self, instances: list[Instance]) -> None:
        self._answer()
        assert self.day is not None
        if self.day.has("ends that fail"):
            raise CloudUnreachable("TerminateInstances: 500 InternalError")
        if self.day.has("ends that are ignored"):
            return
        for instance in instances:
            self.finish(instance.name)

    def prepare(self, region, *, run, owner, ssh_from, buckets, models=(), named=NOTHING_NAMED):
        self._answer()
        if region == FORBIDDEN:
            words = "UnauthorizedOperation: not authorized to perform ec2:CreateSecurityGroup with an explicit deny"
            raise CloudRefused(f"{words} in a service control policy")
        self.rules[region] = ssh_from
        return RegionSetup(
            cloud=self.cloud, region=region, group="spotrl-run", identity="spotrl-run", ssh_from=ssh_from
        )

    def preempt(self, instance: Instance) -> None:
        """Take a VM back, as EC2 and Google Cloud report it."""
        self.finish(instance.name)
        words = {"reclaimed": True, "reason": PREEMPTED_BY}
        if instance.id in self.end_words:
            self.end_words[instance.id] |= words
        self.there = [replace(one, **words) if one.id == instance.id else one for one in self.there]


class StormySky(FakeSky):
    """SkyPilot before two clouds. A launch takes `BOOT_MS`, and a share of the calls is lost."""

    def __init__(self, day: "Day") -> None:
        super().__init__(cloud=day.clouds["aws"])
        self.day = day

    def _answer(self) -> None:
        if self.day.dice.random() < FAILING_CALLS:
            raise SkyUnreachable("the API server of SkyPilot does not answer")

    def login(self, name):
        self.cloud = next(cloud for cloud in self.day.clouds.values() if any(one.name == name for one in cloud.there))
        return super().login(name)

    def work(self) -> None:
        for launch in list(self.launches):
            request = self.names[launch.name]
            if (
                self.requests[request] is None
                and self.day.time.ms >= self.day.asked_ms.setdefault(request, self.day.time.ms) + BOOT_MS
            ):
                self.requests[request] = self.launched(launch)

    def launched(self, launch) -> Outcome:
        place, cloud = (launch.want.cloud, launch.want.region), self.day.clouds[launch.want.cloud]
        if self.day.has("expired keys"):
            return Outcome(failed=Failed.LOGIN, text="ExpiredToken: the security token is expired")
        if place[1] == FORBIDDEN:
            return outcome_of("ResourcesUnavailableError", "An explicit deny in a service control policy")
        if place[0] == "gcp" and self.day.has("no room on Google Cloud"):
            return outcome_of("ResourcesUnavailableError", "ZONE_RESOURCE_POOL_EXHAUSTED")
        if self.day.has("unknown refusals"):
            return outcome_of("ResourcesUnavailableError", "SomethingNew2027: the moon is in the wrong phase")
        self.known[launch.name] = "UP"
        if not any(one.name == launch.name and one.state is InstanceState.RUNNING for one in cloud.there):
            cloud.start(launch.name, launch.want, place[1])
        return Outcome()


class Day(MoneyStage):
    """A run on two clouds, with an engine that makes an iteration in ten minutes while its trainer answers."""

    def __init__(self, home: Path, seed: int, **run_fields) -> None:
        self.dice = random.Random(seed)
        random.seed(seed)  # the gaps between tries
        self.clouds: dict[str, StormyCloud] = {}
        self.asked_ms: dict[str, int] = {}
        self.address = "203.0.113.7/32"
        self.errors: list[Exception] = []
        self.iteration, self.worked_ms, self.trainer = 0, 0, ""
        self.lineage = self.seq = 0
        super().__init__(home, sites=tuple(cloud_site(*place) for place in PLACES), spot=SPOT_SLOTS, **run_fields)

    def process(self) -> Controller:
        if not self.clouds:
            self.clouds = {name: StormyCloud(self.time, cloud=name, day=self) for name in ("aws", "gcp")}
            self.sky = StormySky(self)
        self.links.clear()
        (Path(self.run.folder) / "nodes").mkdir(parents=True, exist_ok=True)
        self.provisioner = SkyProvisioner(
            Purchases(
                run="run",
                owners={"aws": "me", "gcp": "me"},
                folder=Path(self.run.folder),
                ssh_from="203.0.113.7/32",
                buckets=("s3://bucket/runs/run", "gs://bucket/runs/run"),
                bundle=Bundle(folder=Path(self.run.folder) / "bundle", digest="d1", setup="sh set_up.sh"),
                regions=list(PLACES),
            ),
            sky=self.sky,
            clouds=self.clouds,
            clock=self.time,
            link=self.link,
            pool=AtOnce(),
            ask_set_up=lambda login: SetUp(home="/home/ubuntu", digest="d1", exit_code=None, log=""),
            begin_set_up=lambda login, folder, command: None,
            monotonic=self.time.monotonic,
            find_ssh_from=self.find_ssh_from,
        )
        holder = f"test-{self.time.ms}"
        self.controller = Controller(
            self.sessions, self.run, self.provisioner, self.time, holder, dead_pid(), lambda a, b: None
        )
        return self.controller

    def link(self, login, mirror) -> Link:
        self.links[mirror.name] = Link(login, mirror)
        return self.links[mirror.name]

    def find_ssh_from(self) -> str:
        if self.has("address service away"):
            raise Failure("the address service did not answer")
        return "203.0.113.99/32" if self.has("another address") else "203.0.113.7/32"

    def has(self, mishap: str) -> bool:
        start, end = MISHAPS[mishap]
        return start <= (self.time.ms - self.run.created_ms) / HOUR_MS < end

    def machines(self) -> list[tuple[StormyCloud, Instance]]:
        return [
            (cloud, one) for cloud in self.clouds.values() for one in cloud.there if one.state is InstanceState.RUNNING
        ]

    def pass_hours(self, hours: float) -> None:
        until_ms = self.time.ms + round(hours * HOUR_MS)
        while self.time.ms < until_ms:
            self.one_step()

    def one_step(self) -> None:
        self.time.ms += round(PASS_S * 1000)
        for cloud, instance in self.machines():
            if cloud.cloud == "gcp" and self.has("no room on Google Cloud"):
                cloud.finish(instance.name)  # all of them at once, the trainer too
            elif instance.market is Market.SPOT and self.dice.random() < PASS_S / 3600 / 2:  # a life of two hours
                cloud.preempt(instance)
        self.sky.work()  # a new VM lives a step at least: one that no listing can show is not in the ledger
        self.nodes_work()
        if self.has("a dead controller"):
            return
        try:
            self.controller.one_pass()
        except (Failure, SQLAlchemyError, OSError) as error:  # what the controller's process survives
            self.errors.append(error)

    def nodes_work(self) -> None:
        address = "203.0.113.99/32" if self.has("another address") else "203.0.113.7/32"
        reachable = {one.name for cloud, one in self.machines() if cloud.rules.get(one.region) == address}
        for name, link in self.links.items():
            answers = name in reachable
            link.seconds_since_message = 0.0 if answers else (link.seconds_since_message or 0.0) + PASS_S
            link.messages += answers
            if answers and not (link.mirror / "ready.json").exists():
                link.shows("agent", pid=5)
                link.shows("ready", at_ms=self.time.ms, pid=5)
        trainers = [one.name for _, one in self.machines() if "trainer" in one.name and one.name in self.links]
        if not trainers:
            return
        if trainers[-1] != self.trainer:
            self.trainer, self.worked_ms, self.lineage, self.seq = trainers[-1], 0, self.lineage + 1, 0
            start = EngineStarted(iteration=self.iteration, config_digest="c", devices="1 L4", versions={})
            self.report(start)
        self.worked_ms += round(PASS_S * 1000)
        if self.worked_ms >= 10 * MINUTE:
            self.worked_ms = 0
            self.report(
                IterationDone(
                    iteration=self.iteration,
                    reward_mean=0.5,
                    reward_std=0.1,
                    group_std_mean=0.1,
                    explored=0,
                    manifest_digest="m",
                    phase_ms={},
                    wall_seconds=600.0,
                    health={},
                )
            )
            self.iteration += 1

    def reason(self) -> str:
        with self.sessions() as session:
            status = current_status(session, self.run)
            return f"hour {(self.time.ms - self.run.created_ms) / HOUR_MS:.1f}: {status and status.reason}"

    def report(self, event: EngineStarted | IterationDone | EngineFinished) -> None:
        self.seq += 1
        line = Progress(
            run="run", source="trainer", lineage=self.lineage, seq=self.seq, at_ms=self.time.ms, event=event
        )
        with writing(self.sessions) as session:
            append_progress(session, self.run, [line])

    def metered(self) -> dict[str, int]:
        """Return what the clouds' meters say of each node, in micro-dollars, and the rest under `beside`."""
        with self.sessions() as session:
            nodes = {node.name: node for node in nodes_of(session, self.run)}
            ordered = {record.name for record in node_records(session, self.run) if "releasing" in record.happened}
        bill: dict[str, int] = {"beside": 0}
        for cloud in self.clouds.values():
            for identity, instance in cloud.all.items():
                node, end_ms = nodes[instance.name], cloud.ends_ms[identity]
                words = next((one for one in cloud.there if one.id == identity), None)
                taken = (words is not None and words.reclaimed) or cloud.end_words.get(identity, {}).get("reclaimed")
                # An order that was lost counts too: the ledger does not know that, and takes the dearer reading.
                is_free = (
                    cloud.cloud == "aws"
                    and taken
                    and instance.name not in ordered
                    and end_ms - instance.launched_ms < HOUR_MS
                )
                paid_to_ms = max(end_ms, instance.launched_ms + MINUTE)
                amount = interval_micro_usd(instance.launched_ms, paid_to_ms, node.micro_usd_per_hour)
                bill[instance.name] = bill.get(instance.name, 0) + (0 if is_free else amount)
                for rate in side_rates(cloud.cloud, instance.market, node.disk_gib):
                    bill["beside"] += interval_micro_usd(instance.launched_ms, end_ms, rate.micro_usd_per_hour)
        return bill


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    return tmp_path


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_day_of_mishaps_reaches_its_target_and_its_bill_is_the_clouds_own(home, seed):
    day = Day(home, seed, max_total=80_000_000, max_hourly=None)
    for _ in range(24):
        day.pass_hours(1)
        assert day.stage() == "running", day.reason()
    day.report(EngineFinished(reason="target", iteration=day.iteration))
    day.pass_hours(1)
    assert day.stage() == "finished", day.reason()
    assert day.iteration > 100, "the run worked for most of the day"
    assert not day.machines(), "nothing is left"
    assert all(not cloud.disks for cloud in day.clouds.values())
    assert {cloud.cloud for cloud in day.clouds.values() if cloud.all} == {"aws", "gcp"}
    assert sum(cloud.lost for cloud in day.clouds.values()) > sum(cloud.calls for cloud in day.clouds.values()) / 20
    with day.sessions() as session:
        records = node_records(session, day.run)
        costs = {
            node.node: sum(charge.micro_usd for charge in node.charges)
            for node in run_costs(session, day.run, day.time.ms).nodes
        }
        spent = spent_micro_usd(session, day.run, day.time.ms)
    assert sum(record.reclaimed for record in records) > 10
    bill = day.metered()
    assert {name: micro_usd for name, micro_usd in costs.items() if name in bill} == {
        name: micro_usd for name, micro_usd in bill.items() if name != "beside"
    }
    assert spent == sum(bill.values())
    assert not [error for error in day.errors if isinstance(error, KeyError)]
