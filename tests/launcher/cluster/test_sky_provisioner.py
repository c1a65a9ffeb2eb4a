"""SkyProvisioner with a fake SkyPilot, cloud and node link: every rule, and a crash at every step.

A crash is a new SkyProvisioner over the same folder. The test moves the clock; the pool runs each task at once.
"""

import json
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.events import Market
from engine.node_spec import EXIT_UNFIT, ClockConfig, NodeSpec
from launcher.clouds.base import (
    CloudRefused,
    CloudUnreachable,
    Instance,
    InstanceState,
    RegionSetup,
    Resource,
)
from launcher.decide.node_facts import NodeStatus
from launcher.exit_codes import Failure
from launcher.job.company import NOTHING_NAMED, Named
from launcher.placement.placement import Placement
from launcher.provision.sky.bundle import Bundle
from launcher.provision.sky.outcome import Failed, Outcome
from launcher.provision.sky.set_up import InstanceUnreachable, SetUp
from launcher.provision.sky.sky import SkyLogin, SkyUnreachable
from launcher.provision.sky.sky_provisioner import SkyProvisioner
from launcher.provision.sky.surroundings import Purchases
from launcher.storage.store_lease import LeaseLost

START_MS = 1_800_000_000_000
REGION = "us-east-1"


@dataclass
class Time:
    """A clock that the test moves."""

    ms: int = START_MS
    suspended_ms: int = 0
    """Part of the time in which the machine was suspended, and its monotonic clock stood still."""

    def now_ms(self) -> int:
        return self.ms

    def wall_seconds(self, duration_ms: int) -> float:
        return duration_ms / 1000

    def monotonic(self) -> float:
        return (self.ms - self.suspended_ms) / 1000


class AtOnce(Executor):
    """An executor that runs each task before `submit` returns, or never if the process is to die in between."""

    def submit(self, fn, /, *args, **kwargs):
        fn(*args, **kwargs)
        return Future()


class Killed(BaseException):
    """The simulated death of the process."""


@dataclass
class FakeSky:
    """A SkyPilot whose launches finish when the test calls `finish`, on a fake cloud."""

    cloud: "FakeCloud"
    requests: dict[str, Outcome | None] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    launches: list = field(default_factory=list)
    downs: list = field(default_factory=list)
    rearmed: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)
    down_for_good: bool = False
    reply_lost: bool = False

    def _answer(self):
        if self.down_for_good:
            raise SkyUnreachable("no answer")

    def start(self, launch):
        self._answer()
        request = f"request-{len(self.launches)}"
        self.launches.append(launch)
        self.requests[request], self.names[launch.name] = None, request
        self.known.setdefault(launch.name, "INIT")
        if self.reply_lost:
            self.reply_lost = False
            raise Killed
        return request

    def finish(self, name, outcome=None):
        """Finish the launch: with an instance, unless it failed."""
        outcome = outcome or Outcome()
        self.requests[self.names[name]] = outcome
        if outcome.failed is None:
            self.known[name] = "UP"
            if not any(one.name == name and one.state is InstanceState.RUNNING for one in self.cloud.there):
                self.cloud.start(name, self.launches[-1].want)

    def poll(self, requests):
        self._answer()
        return {one: self.requests[one] for one in requests if one in self.requests}

    def pending(self, prefix):
        self._answer()
        return {name: one for name, one in self.names.items() if name.startswith(prefix) and self.requests[one] is None}

    def clusters(self, prefix):
        self._answer()
        return {name: status for name, status in self.known.items() if name.startswith(prefix)}

    def login(self, name):
        self._answer()
        instance = next(one for one in self.cloud.there if one.name == name and one.state is InstanceState.RUNNING)
        return SkyLogin(host=instance.public_address, user="ubuntu", private_key="KEY", address=instance.address)

    def cancel(self, request):
        self._answer()
        self.cancelled.append(request)
        if self.requests.get(request) is None:
            self.requests[request] = Outcome(failed=Failed.CANCELLED)

    def down(self, name):
        self._answer()
        self.downs.append(name)
        self.known.pop(name, None)

    def rearm(self, name, minutes):
        self._answer()
        self.rearmed.append((name, minutes))


@dataclass
class FakeCloud:
    """A cloud with one inventory; the test decides when its instances end."""

    time: Time
    cloud: str = "aws"
    home: str = REGION
    there: list[Instance] = field(default_factory=list)
    disks: list[Resource] = field(default_factory=list)
    groups: list[Resource] = field(default_factory=list)
    missing_rules: tuple[str, ...] = ()
    named: Named | None = None
    unreachable: bool = False
    refuses: str = ""
    ends_slowly: bool = False
    keeps_disks: bool = False
    """Disks outlive their instance, and cannot be removed."""
    granted_notice_ms: int | None = None
    end_words: dict[str, dict] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    let_in: list[str] = field(default_factory=list)
    """Where SSH came from at each preparation of a region."""

    def start(self, name, want, region=REGION):
        number = len(self.there) + 1
        instance = Instance(
            cloud=self.cloud,
            region=region,
            zone=want.zone_name or f"{region}a",
            id=f"i-{number}",
            name=name,
            run="run",
            owner="me",
            state=InstanceState.RUNNING,
            market=want.market,
            instance_type=want.instance_type,
            address=f"10.0.0.{number}",
            public_address=f"198.51.100.{number}",
            launched_ms=self.time.ms,
            notice_ms=self.granted_notice_ms,
        )
        self.there.append(instance)
        self.disks.append(
            Resource(cloud=self.cloud, region=region, kind="disk", id=f"vol-{number}", run="run", node=name)
        )
        return instance

    def change(self, name, **how):
        self.there = [replace(one, **how) if one.name == name else one for one in self.there]

    def vanish(self, name, **words):
        """Remove an instance from the list like Google Cloud; only operations show the reason."""
        for instance in [one for one in self.there if one.name == name]:
            self.there.remove(instance)
            self.end_words[instance.id] = words
        self.disks = [one for one in self.disks if one.node != name]

    def take_back(self, name):
        self.change(
            name,
            state=InstanceState.GONE,
            reclaimed=True,
            ended_ms=self.time.ms,
            reason="Server.SpotInstanceTermination",
        )
        self.disks = [one for one in self.disks if one.node != name]

    def _answer(self):
        if self.unreachable:
            raise CloudUnreachable("aws does not answer")

    def instances(self, region, *, owner=None, run=None):
        self._answer()
        return [one for one in self.there if one.region == region and run in (None, one.run)]

    def end_of(self, instance):
        self._answer()
        listed = [one for one in self.there if one.id == instance.id]
        known = listed[0] if listed else replace(instance, **self.end_words.get(instance.id, {}))
        return replace(known, state=InstanceState.GONE)

    def resources(self, region, *, owner=None, run=None):
        self._answer()
        return [one for one in self.disks + self.groups if one.region == region]

    def end(self, instances):
        self._answer()
        for instance in instances:
            self.ended.append(instance.id)
            state = InstanceState.STOPPING if self.ends_slowly else InstanceState.GONE
            self.there = [replace(one, state=state) if one.id == instance.id else one for one in self.there]
            if state is InstanceState.GONE and not self.keeps_disks:
                self.disks = [
                    one for one in self.disks if one.node != instance.name or one.owner not in ("", instance.owner)
                ]

    def remove(self, resources):
        self._answer()
        if self.keeps_disks:
            return [one for one in resources if one.kind == "disk"]
        self.disks = [one for one in self.disks if one not in resources]
        self.groups = [one for one in self.groups if one not in resources]
        return []

    def prepare(self, region, *, run, owner, ssh_from, buckets, models=(), named=NOTHING_NAMED):
        self._answer()
        self.named = named
        self.let_in.append(ssh_from)
        if self.refuses:
            raise CloudRefused(self.refuses)
        self.groups = [Resource(cloud=self.cloud, region=region, kind="group", id="sg-1", run=run)]
        return RegionSetup(
            cloud=self.cloud, region=region, group="spotrl-run", identity="spotrl-run", ssh_from=ssh_from
        )

    def open_rules(self, place):
        self._answer()
        return self.missing_rules


class FakeLink:
    """A node link whose other end is the test."""

    def __init__(self, login, mirror):
        self.login, self.mirror = login, mirror
        self.seconds_since_message, self.trouble, self.messages = 0.0, "", 0
        self.specs, self.rearmed_ms, self.notices, self.closed = [], [], [], False

    def run(self, spec):
        self.specs.append(spec)

    def rearm(self, left_ms):
        self.rearmed_ms.append(left_ms)

    def notice(self, deadline_ms):
        self.notices.append(deadline_ms)

    def tunnel(self, port):
        return ("127.0.0.1", port + 1)

    def close(self):
        self.closed = True

    def shows(self, what, **facts):
        (self.mirror / f"{what}.json").write_text(json.dumps(facts))


class Stage:
    """A run in one region with fakes around it."""

    def __init__(self, folder: Path):
        self.folder, self.time = folder, Time()
        self.cloud = FakeCloud(self.time)
        self.sky = FakeSky(self.cloud)
        self.links: dict[str, FakeLink] = {}
        self.digest = "d1"
        self.begun: list[str] = []
        self.exit_code: int | None = None
        self.set_up_log = ""
        self.images: dict[str, str] = {}
        self.keep_failed_ms = 0
        self.named = NOTHING_NAMED
        self.taken_over = False
        self.address = "203.0.113.7/32"
        self.regions = [("aws", REGION)]
        self.provisioner = self.process()

    def process(self) -> SkyProvisioner:
        """Start another process over the same folder."""

        def link(login, mirror):
            self.links[mirror.name] = FakeLink(login, mirror)
            return self.links[mirror.name]

        self.links.clear()
        self.provisioner = SkyProvisioner(
            Purchases(
                run="run",
                owners={"aws": "me", "gcp": "me"},
                folder=self.folder,
                ssh_from=self.address,
                buckets=("s3://bucket/runs/run",),
                bundle=Bundle(folder=self.folder / "bundle", digest="d1", setup="sh set_up.sh"),
                regions=self.regions,
                weights={"aws": "s3://bucket/runs/weights/w1"},
                images=self.images,
                named=lambda cloud, region: self.named,
                keep_failed_ms=self.keep_failed_ms,
            ),
            sky=self.sky,
            clouds={"aws": self.cloud},
            clock=self.time,
            link=link,
            pool=AtOnce(),
            ask_set_up=self.ask_set_up,
            begin_set_up=lambda login, folder, command: self.begun.append(command),
            monotonic=self.time.monotonic,
            check_lease=self.check_lease,
            find_ssh_from=self.find_ssh_from,
        )
        return self.provisioner

    def find_ssh_from(self):
        if not self.address:
            raise Failure("the address service did not answer")
        return self.address

    def check_lease(self):
        if self.taken_over:
            raise LeaseLost("another controller has the lease")

    def ask_set_up(self, login):
        """Return the setup found on the instance; raise while the instance is unreachable."""
        if self.digest is None:
            raise InstanceUnreachable("ssh: timed out")
        return SetUp(home="/home/ubuntu", digest=self.digest, exit_code=self.exit_code, log=self.set_up_log)

    def request(self, name="run-rollout-0-g0", zone="us-east-1a", money_deadline_ms=START_MS + 3_600_000):
        spec = NodeSpec(
            run="run",
            node=name,
            role="trainer" if "trainer" in name else "rollout",
            market=Market.ON_DEMAND if "trainer" in name else Market.SPOT,
            folder="/elsewhere",
            store="s3://bucket/runs/run",
            coordinator_port=7000,
            token="token",
            clock=ClockConfig(origin_ms=START_MS),
            engine=EngineConfig(),
            money_deadline_ms=money_deadline_ms,
        )
        self.provisioner.request(placement(zone, spec.market), spec)
        return name

    def passes(self, seconds=3.0, step=0.5):
        """Run this many observations of the controller, and return the last facts by name."""
        facts = ()
        for _ in range(max(1, round(seconds / step))):
            self.time.ms += round(step * 1000)
            facts = self.provisioner.observe()
        return {fact.name: fact for fact in facts}

    def launch(self):
        """Request `NODE`, and have its cloud list its VM while the launch is under way."""
        self.request()
        self.passes(1)
        self.cloud.start(NODE, placement())
        self.passes(4)

    def bring_up(self, name):
        """Bring a node up: request, launch, setup, first contact and ready."""
        self.request(name)
        self.passes(1)
        self.sky.finish(name)
        self.passes(5)
        role = "trainer" if "trainer" in name else "rollout"
        self.links[name].shows("agent", pid=5)
        self.links[name].shows("ready", at_ms=self.time.ms, pid=5, role=role, hardware="2 CPU cores (made up)")
        return self.passes(1)[name]

    def file(self, name, what):
        return json.loads((self.folder / "nodes" / name / f"{what}.json").read_text())


def placement(zone="us-east-1a", market=Market.SPOT):
    return Placement(
        cloud="aws",
        region=REGION,
        zone=zone,
        instance_type="g6.xlarge",
        gpus=1,
        accelerator="L4",
        market=market,
        micro_usd_per_hour=300_000,
        price_source="table",
        price_observed_at="2026-11-01T00:00:00Z",
    )


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


NODE = "run-rollout-0-g0"
TRAINER = "run-trainer-g0"


# --- starting -------------------------------------------------------------------------------------------


def test_a_node_is_launched_once_with_labels_a_group_and_a_timer(stage):
    stage.request()
    stage.request()
    stage.passes(5)
    (launch,) = stage.sky.launches
    assert launch.labels == {"spotrl-run": "run", "spotrl-node": NODE, "spotrl-owner": "me"}
    assert (launch.region_setup.group, launch.want.zone_name) == ("spotrl-run", "us-east-1a")
    assert launch.autostop_minutes == 60 + 30  # the budget lasts an hour
    assert stage.file(NODE, "launch")["request_id"] == "request-0"


def test_a_node_of_a_named_network_is_reached_through_the_jobs_proxy(stage):
    stage.named = Named(identity="node", network="vpc-1", public_addresses=False, ssh_proxy="ssh -W %h:%p bastion")
    stage.bring_up(TRAINER)
    assert stage.cloud.named == stage.named
    assert stage.links[TRAINER].login.proxy == "ssh -W %h:%p bastion"
    assert stage.file(TRAINER, "machine")["login"]["proxy"] == "ssh -W %h:%p bastion"
    stage.process()
    stage.passes(1)
    assert stage.links[TRAINER].login.proxy == "ssh -W %h:%p bastion"


@pytest.mark.parametrize(
    ("images", "image"),
    [
        ({f"aws/{REGION}": "ami-here", "aws": "ami-anywhere"}, "ami-here"),
        ({"aws/us-west-2": "ami-there", "aws": "ami-anywhere"}, "ami-anywhere"),
        ({"aws/us-west-2": "ami-there", "gcp": "projects/p/global/images/i"}, None),
    ],
)
def test_a_node_starts_from_the_image_of_its_region_where_there_is_one(stage, images, image):
    stage.images = images
    stage.process()
    stage.request()
    stage.passes(1)
    assert stage.sky.launches[0].image == image


def test_a_node_is_up_when_its_workers_called_in(stage):
    trainer = stage.bring_up(TRAINER)
    fact = stage.bring_up(NODE)
    assert (trainer.status, fact.status) == (NodeStatus.UP, NodeStatus.UP)
    assert (fact.zone, fact.instance_type) == ("us-east-1a", "g6.xlarge")
    assert fact.started_ms == stage.cloud.there[1].launched_ms
    assert fact.ready_ms is not None
    assert fact.hardware == "2 CPU cores (made up)"


def test_files_with_secrets_are_readable_only_by_the_owner(stage):
    stage.bring_up(TRAINER)
    folder = stage.folder / "nodes" / TRAINER
    assert oct((folder / "ssh.key").stat().st_mode & 0o777) == "0o600"
    assert oct((folder / "spec.json").stat().st_mode & 0o777) == "0o600"
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


def test_an_agent_gets_the_address_of_the_newest_trainer(stage):
    stage.request(NODE)
    stage.passes(1)
    stage.sky.finish(NODE)
    stage.passes(4)
    assert stage.links[NODE].specs == []  # no trainer exists yet
    stage.bring_up(TRAINER)
    (sent_spec,) = stage.links[NODE].specs
    assert (sent_spec.coordinator_host, sent_spec.cloud, sent_spec.digest) == ("10.0.0.2", "aws", "d1")
    assert sent_spec.folder == "/home/ubuntu/spotrl/node"
    assert sent_spec.weights == "s3://bucket/runs/weights/w1"
    assert (sent_spec.money_deadline_ms, sent_spec.money_left_ms) == (None, sent_spec.money_left_ms)
    assert 3_500_000 < sent_spec.money_left_ms < 3_600_000
    stage.provisioner.release([TRAINER])
    stage.passes(5)
    stage.bring_up("run-trainer-g1")
    assert [spec.coordinator_host for spec in stage.links[NODE].specs] == ["10.0.0.2", "10.0.0.3"]


def test_the_trainer_listens_on_its_own_private_address(stage):
    stage.bring_up(TRAINER)
    assert stage.links[TRAINER].specs[0].coordinator_host == "10.0.0.1"
    assert stage.provisioner.tunnel(TRAINER, 7000) == ("127.0.0.1", 7001)
    assert stage.provisioner.tunnel(NODE, 7000) is None


# --- refusals -------------------------------------------------------------------------------------------


def test_a_lack_of_capacity_names_the_zone_that_was_tried(stage):
    stage.request()
    stage.passes(1)
    stage.sky.finish(NODE, Outcome(failed=Failed.NO_CAPACITY, text="InsufficientInstanceCapacity"))
    fact = stage.passes(5)[NODE]
    assert (fact.status, fact.tried) == (NodeStatus.NO_CAPACITY, ("aws/us-east-1/us-east-1a",))
    assert fact.started_ms is None
    assert stage.sky.downs == [NODE]


def test_a_quota_error_is_a_denial_with_the_clouds_message(stage):
    stage.request()
    stage.passes(1)
    stage.sky.finish(NODE, Outcome(failed=Failed.DENIED, text="VcpuLimitExceeded: ask for more"))
    fact = stage.passes(5)[NODE]
    assert (fact.status, fact.evidence) == (NodeStatus.DENIED, "VcpuLimitExceeded: ask for more")


def test_a_permission_missing_before_the_launch_is_a_denial_too(stage):
    stage.cloud.refuses = "iam:CreateRole is not allowed"
    stage.request()
    fact = stage.passes(5)[NODE]
    assert (fact.status, fact.evidence) == (NodeStatus.DENIED, "iam:CreateRole is not allowed")
    assert stage.sky.launches == []


def test_an_instance_with_another_identity_is_refused(stage):
    """SkyPilot's own identity has all permissions. A foreign API server may give it to an instance."""
    stage.request()
    stage.passes(1)
    stage.cloud.start(NODE, placement())
    stage.cloud.change(NODE, identity="skypilot-v1")
    fact = stage.passes(6)[NODE]
    assert fact.status is NodeStatus.DENIED
    assert "it runs as skypilot-v1 and not as spotrl-run" in fact.evidence
    assert stage.cloud.ended == ["i-1"]


def test_a_failed_setup_ends_the_node_and_its_instance(stage):
    stage.request()
    stage.passes(1)
    stage.cloud.start(NODE, placement())
    stage.sky.finish(NODE, Outcome(failed=Failed.SETUP, text="exit 127: No such file"))
    fact = stage.passes(6)[NODE]
    assert fact.status is NodeStatus.GONE
    assert "No such file" in fact.evidence
    assert stage.cloud.ended == ["i-1"]
    assert fact.started_ms is not None  # the instance was billed


def test_an_agent_is_started_only_after_the_setup_has_finished(stage):
    """SkyPilot's launch ends before the setup begins."""
    stage.digest = ""
    stage.request(TRAINER)
    stage.passes(1)
    stage.sky.finish(TRAINER)
    stage.passes(30)
    assert stage.links == {}
    (command,) = stage.begun
    assert command.startswith("rm -rf ~/.aws/credentials ")
    assert command.endswith("; SPOTRL_STORE=s3://bucket/runs/run sh set_up.sh")
    stage.digest = "d1"
    stage.passes(3)
    assert len(stage.links[TRAINER].specs) == 1


def test_a_machine_that_cannot_be_a_node_counts_as_denied_with_its_own_words(stage):
    stage.bring_up(TRAINER)
    stage.links[TRAINER].shows("exit", code=EXIT_UNFIT, text="Fabric Manager is inactive; use another image")
    fact = stage.passes(10)[TRAINER]
    assert (fact.status, fact.evidence) == (NodeStatus.DENIED, "Fabric Manager is inactive; use another image")
    assert stage.cloud.ended == ["i-1"]


def test_the_setup_starts_before_skypilot_is_done_and_the_agent_does_not(stage):
    stage.digest = ""
    stage.request(TRAINER)
    stage.passes(1)
    stage.cloud.start(TRAINER, placement(market=Market.ON_DEMAND))
    stage.passes(10)
    assert len(stage.begun) == 1
    stage.digest = "d1"
    stage.passes(10)
    assert stage.links == {}
    stage.sky.finish(TRAINER)
    stage.passes(5)
    assert len(stage.links[TRAINER].specs) == 1
    assert len(stage.begun) == 1


def test_another_process_starts_the_setup_again_and_a_finished_one_is_not_started(stage):
    """A started setup waits for the one that runs already."""
    stage.digest = ""
    stage.request(TRAINER)
    stage.passes(1)
    stage.sky.finish(TRAINER)
    stage.passes(5)
    stage.process()
    stage.passes(5)
    assert len(stage.begun) == 2
    stage.digest = "d1"
    stage.process()
    stage.passes(5)
    assert len(stage.begun) == 2
    assert len(stage.links[TRAINER].specs) == 1


def test_a_setup_that_fails_after_the_launch_is_detected(stage):
    stage.digest = ""
    stage.request(TRAINER)
    stage.passes(1)
    stage.sky.finish(TRAINER)
    stage.exit_code, stage.set_up_log = 1, "spotrl set-up, 3 s: failed: no space left"
    fact = stage.passes(20)[TRAINER]
    assert fact.status is NodeStatus.GONE
    assert fact.evidence == "its set-up failed with exit code 1: spotrl set-up, 3 s: failed: no space left"
    assert stage.cloud.ended == ["i-1"]


def test_a_node_with_the_setup_of_another_bundle_is_refused(stage):
    stage.digest = "of yesterday"
    stage.request(TRAINER)
    stage.passes(1)
    stage.sky.finish(TRAINER)
    assert (
        stage.passes(20)[TRAINER].status is NodeStatus.PENDING
    )  # a machine image may contain an old digest; the setup replaces it
    stage.exit_code = 0
    fact = stage.passes(20)[TRAINER]
    assert (fact.status, stage.links) == (NodeStatus.GONE, {})
    assert "bundle of yesterday" in fact.evidence
    assert "d1" in fact.evidence


def test_an_unreachable_instance_is_given_up_and_the_missing_rule_named(stage):
    stage.digest = None
    stage.cloud.missing_rules = ("tcp 22 (SSH) is missing",)
    stage.request(TRAINER)
    stage.passes(1)
    stage.sky.finish(TRAINER)
    stage.passes(30)
    stage.time.ms += 1_800_000
    assert "tcp 22 (SSH) is missing" in stage.passes(10)[TRAINER].evidence


def test_a_launch_that_failed_without_a_reason_is_retried_a_few_times(stage):
    stage.request()
    for _ in range(5):
        stage.passes(1)
        stage.sky.finish(NODE, Outcome(failed=Failed.UNKNOWN, text="server restarted"))
        fact = stage.passes(150)[NODE]
    assert len(stage.sky.launches) == 5
    assert fact.status is NodeStatus.GONE
    assert "server restarted" in fact.evidence


def test_an_instance_that_stops_during_its_launch_is_noticed_early(stage):
    stage.launch()
    stage.cloud.change(NODE, state=InstanceState.STOPPING, reason="Client.InstanceInitiatedShutdown")
    fact = stage.passes(60)[NODE]
    assert (fact.status, fact.notice_deadline_ms) == (NodeStatus.PENDING, None)
    fact = stage.passes(90)[NODE]
    assert (fact.status, fact.evidence) == (NodeStatus.GONE, "Client.InstanceInitiatedShutdown")
    assert stage.sky.cancelled == ["request-0"]
    assert stage.cloud.ended == ["i-1"]


def test_a_launch_ended_by_skypilot_gives_its_own_reason(stage):
    stage.launch()
    stage.cloud.change(NODE, state=InstanceState.GONE, reason="Client.UserInitiatedShutdown")
    stage.passes(10)
    stage.sky.finish(NODE, Outcome(failed=Failed.NO_CAPACITY, text="InsufficientInstanceCapacity"))
    assert stage.passes(6)[NODE].status is NodeStatus.NO_CAPACITY


def test_an_instance_without_a_confirmed_creation_is_launched_again(stage):
    """The reply to its creation was lost. SkyPilot terminated it and gives no reason of the cloud."""
    stage.launch()
    stage.cloud.change(NODE, state=InstanceState.GONE, reason="delete")
    stage.sky.finish(NODE, Outcome(failed=Failed.UNKNOWN, text="Remote end closed connection"))
    assert stage.passes(30)[NODE].status is NodeStatus.PENDING
    stage.sky.finish(NODE)
    stage.passes(200)
    assert len(stage.sky.launches) == 2
    assert stage.file(NODE, "machine")["id"] == "i-2"
    assert stage.file(NODE, "login")["address"] == "10.0.0.2"


def test_a_node_that_never_comes_up_is_given_up(stage):
    stage.request()
    assert stage.passes(60, step=1)[NODE].status is NodeStatus.PENDING
    stage.time.ms += 1_800_000
    fact = stage.passes(5)[NODE]
    assert fact.status is NodeStatus.GONE
    assert "did not come up" in fact.evidence
    assert stage.sky.cancelled == ["request-0"]


# --- crashes --------------------------------------------------------------------------------------------


def test_a_crash_before_the_launch_loses_no_request(stage):
    stage.request()
    stage.process()
    stage.passes(2)
    assert len(stage.sky.launches) == 1


def test_a_request_whose_reply_was_lost_is_adopted(stage):
    stage.request()
    stage.sky.reply_lost = True
    with pytest.raises(Killed):
        stage.passes(1)
    stage.process()
    stage.passes(3)
    assert len(stage.sky.launches) == 1
    assert stage.file(NODE, "launch")["request_id"] == "request-0"


def test_a_cluster_that_came_up_during_a_crash_is_adopted(stage):
    stage.request()
    stage.sky.reply_lost = True
    with pytest.raises(Killed):
        stage.passes(1)
    stage.sky.finish(NODE)
    stage.process()
    stage.passes(5)
    assert len(stage.sky.launches) == 1
    assert stage.file(NODE, "login")["host"] == "198.51.100.1"


def test_an_instance_unknown_to_skypilot_is_adopted_and_an_extra_one_ended(stage):
    stage.request()
    stage.sky.reply_lost = True
    with pytest.raises(Killed):
        stage.passes(1)
    stage.cloud.start(NODE, placement())
    stage.sky.requests.clear()
    stage.sky.names.clear()
    stage.sky.known.clear()
    stage.process()
    stage.passes(3)
    assert len(stage.sky.launches) == 2
    stage.cloud.there.insert(0, replace(stage.cloud.there[0], id="i-9", public_address="198.51.100.9"))
    stage.sky.finish(NODE)
    stage.passes(4)
    alive = [one.id for one in stage.cloud.there if one.state is InstanceState.RUNNING]
    assert len(alive) == 1


def test_a_controller_without_its_lease_ends_no_extra_instance(stage):
    """Another controller took over, and only that one knows which of two instances of a name is in use."""
    stage.bring_up(NODE)
    stage.taken_over = True
    stage.cloud.there.insert(0, replace(stage.cloud.there[0], id="i-9", public_address="198.51.100.9"))
    stage.passes(4)
    alive = [one.id for one in stage.cloud.there if one.state is InstanceState.RUNNING]
    assert len(alive) == 2
    assert any("double" in trouble for trouble in stage.provisioner.troubles())
    stage.taken_over = False
    stage.passes(60, step=1)
    alive = [one.id for one in stage.cloud.there if one.state is InstanceState.RUNNING]
    assert len(alive) == 1


def test_after_a_crash_only_its_vms_in_other_regions_are_ended(stage):
    stage.regions.append(("aws", "us-west-2"))
    stage.process()
    stage.request()
    stage.sky.reply_lost = True
    with pytest.raises(Killed):
        stage.passes(1)
    own = stage.cloud.start(NODE, placement())
    lost, gone, other = (stage.cloud.start(name, placement(), "us-west-2") for name in (NODE, NODE, TRAINER))
    stage.cloud.there = [replace(one, state=InstanceState.GONE) if one == gone else one for one in stage.cloud.there]
    for known in (stage.sky.requests, stage.sky.names, stage.sky.known):
        known.clear()
    stage.process()
    stage.passes(3)
    assert stage.cloud.ended == [lost.id]
    assert {one.id for one in stage.cloud.there if one.state is InstanceState.RUNNING} == {own.id, other.id}
    assert len(stage.sky.launches) == 2, "the next launch finds the VM in its own region"


def test_a_controller_without_its_lease_buys_and_ends_nothing_after_a_crash(stage):
    stage.regions.append(("aws", "us-west-2"))
    stage.process()
    stage.request()
    stage.taken_over = True
    stage.passes(3)
    assert stage.sky.launches == []
    stage.cloud.start(NODE, placement(), "us-west-2")
    stage.process()
    stage.passes(3)
    assert (stage.cloud.ended, stage.sky.launches) == ([], [])


@pytest.mark.parametrize("which", ["public", "private", "neither"])
def test_of_two_vms_only_the_one_without_the_login_is_ended(stage, which):
    """A login may name the private address. If it names neither, nobody knows which VM is the right one."""
    stage.bring_up(NODE)
    (first,) = stage.cloud.there
    login = {"public": first.public_address, "private": first.address, "neither": "192.0.2.1"}[which]
    written = stage.file(NODE, "login")
    (stage.folder / "nodes" / NODE / "login.json").write_text(json.dumps({**written, "host": login}))
    second = stage.cloud.start(NODE, placement())
    other = stage.cloud.start(TRAINER, placement())
    stage.passes(8)
    assert stage.cloud.ended == ([] if which == "neither" else [second.id])
    assert other.id in {one.id for one in stage.cloud.there if one.state is InstanceState.RUNNING}


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.0, 4.0, 8.0])
def test_a_launch_survives_a_crash_at_any_time(stage, seconds):
    stage.request(TRAINER)
    stage.passes(seconds)
    stage.process()
    if stage.sky.launches:
        stage.sky.finish(TRAINER)
    stage.passes(seconds)
    stage.process()
    stage.passes(2)
    stage.sky.finish(TRAINER)
    stage.passes(5)
    assert len(stage.sky.launches) == 1
    assert len(stage.cloud.there) == 1
    assert len(stage.links[TRAINER].specs) == 1


def test_a_release_survives_a_crash(stage):
    stage.bring_up(TRAINER)
    stage.provisioner.release([TRAINER])
    stage.process()
    fact = stage.passes(4)[TRAINER]
    assert (fact.status, fact.evidence) == (NodeStatus.GONE, "released")
    assert stage.cloud.ended == ["i-1"]


# --- ends -----------------------------------------------------------------------------------------------


def test_a_preemption_counts_only_if_the_cloud_reports_it(stage):
    stage.bring_up(NODE)
    stage.time.ms += 60_000
    stage.cloud.take_back(NODE)
    taken_ms = stage.time.ms
    fact = stage.passes(5)[NODE]
    assert (fact.status, fact.reclaimed, fact.with_notice) == (NodeStatus.GONE, True, False)
    assert (fact.ended_ms, fact.evidence) == (taken_ms, "Server.SpotInstanceTermination")
    assert stage.cloud.ended == []
    assert stage.sky.downs == [NODE]


def test_a_preemption_is_known_within_a_few_seconds(stage):
    stage.bring_up(NODE)
    stage.cloud.take_back(NODE)
    assert stage.passes(4, step=0.25)[NODE].status is NodeStatus.GONE


@pytest.mark.parametrize(("reclaimed", "late_ms"), [(True, 120_000), (False, 0)])
def test_a_preemption_without_a_named_end_is_paid_to_its_announced_time(stage, reclaimed, late_ms):
    """The login expires after the notice, so nobody sees the VM any more."""
    stage.bring_up(NODE)
    stage.links[NODE].shows("notice", deadline_ms=stage.time.ms + 120_000, source="imds")
    stage.passes(2)
    seen_ms = stage.time.ms
    stage.cloud.unreachable = True
    stage.passes(600, step=60)
    stage.cloud.unreachable = False
    stage.cloud.vanish(NODE, reclaimed=reclaimed, reason="it has ended")
    fact = stage.passes(10, step=1)[NODE]
    assert fact.status is NodeStatus.GONE
    assert abs(fact.ended_ms - seen_ms - late_ms) <= 5_000


def test_an_instance_missing_from_two_lists_is_gone_for_its_operations_reason(stage):
    stage.bring_up(NODE)
    stage.cloud.vanish(NODE, reclaimed=True, reason="compute.instances.preempted", ended_ms=START_MS + 9000)
    fact = stage.passes(6)[NODE]
    assert (fact.status, fact.reclaimed, fact.ended_ms) == (NodeStatus.GONE, True, START_MS + 9000)


def test_one_empty_list_does_not_end_a_node(stage):
    stage.bring_up(NODE)
    (instance,), stage.cloud.there = stage.cloud.there, []
    stage.passes(2, step=1)
    stage.cloud.there = [instance]
    assert stage.passes(6)[NODE].status is NodeStatus.UP


def test_an_instance_under_notice_is_left_to_the_cloud_after_its_drain(stage):
    """AWS bills a spot instance of less than an hour only if we terminate it."""
    stage.bring_up(NODE)
    stage.links[NODE].shows("notice", deadline_ms=stage.time.ms + 120_000, source="imds")
    stage.links[NODE].shows("exit", code=0, at_ms=stage.time.ms)
    fact = stage.passes(60, step=1)[NODE]
    assert fact.notice_deadline_ms is not None
    assert stage.cloud.ended == []
    stage.cloud.take_back(NODE)
    fact = stage.passes(5)[NODE]
    assert (fact.reclaimed, fact.with_notice) == (True, True)
    assert stage.cloud.ended == []


def test_a_notice_that_the_cloud_does_not_carry_out_expires(stage):
    stage.bring_up(NODE)
    stage.links[NODE].shows("notice", deadline_ms=stage.time.ms + 120_000, source="imds")
    stage.links[NODE].shows("exit", code=0, at_ms=stage.time.ms)
    stage.passes(5)
    stage.time.ms += 800_000
    assert stage.passes(6)[NODE].status is NodeStatus.GONE
    assert stage.cloud.ended == ["i-1"]


@pytest.mark.parametrize("name", ["run-trainer-g0", "run-rollout-0-g0"])
def test_a_machine_that_its_cloud_stopped_and_started_again_is_replaced_at_once(stage, name):
    stage.bring_up(name)
    (instance,) = stage.cloud.there
    stage.cloud.there = [replace(instance, state=InstanceState.STOPPING, reason="maintenance")]
    assert stage.passes(30)[name].notice_deadline_ms is not None
    stage.cloud.there = [instance]
    fact = stage.passes(30)[name]
    assert fact.status is NodeStatus.GONE
    assert "started it again" in fact.evidence
    assert stage.cloud.ended == [instance.id]


def test_a_stopping_instance_counts_as_a_notice(stage):
    stage.bring_up(NODE)
    stage.cloud.change(NODE, state=InstanceState.STOPPING, reason="STOPPING")
    fact = stage.passes(4)[NODE]
    assert fact.notice_deadline_ms is not None
    assert len(stage.links[NODE].notices) == 1
    stage.cloud.vanish(NODE, reclaimed=True, reason="compute.instances.preempted")
    fact = stage.passes(6)[NODE]
    assert (fact.status, fact.reclaimed, fact.with_notice) == (NodeStatus.GONE, True, False)


def test_a_node_is_told_the_notice_that_the_cloud_granted(stage):
    stage.cloud.granted_notice_ms = 120_000
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    assert stage.links[NODE].specs[-1].notice_ms == 120_000
    stage.cloud.change(NODE, state=InstanceState.STOPPING, reason="STOPPING")
    fact = stage.passes(4)[NODE]
    assert 110_000 < fact.notice_deadline_ms - stage.time.ms <= 120_000


def test_an_agent_that_exits_ends_its_node(stage):
    stage.bring_up(TRAINER)
    stage.links[TRAINER].shows("exit", code=0, text="finished", at_ms=stage.time.ms)
    fact = stage.passes(8)[TRAINER]
    assert (fact.status, fact.evidence) == (NodeStatus.GONE, "its agent exited with code 0: finished")
    assert stage.cloud.ended == ["i-1"]


@pytest.fixture
def keeping(stage):
    """Return a run whose failed nodes are kept for half an hour."""
    stage.keep_failed_ms = 1_800_000
    stage.process()
    return stage


FAILURE = "its agent exited with code 1: no such model"


def test_a_failed_node_is_kept_for_a_look_and_then_ended(keeping):
    keeping.bring_up(TRAINER)
    keeping.bring_up(NODE)
    keeping.links[NODE].shows("exit", code=1, text="no such model", at_ms=keeping.time.ms)
    fact = keeping.passes(8)[NODE]
    assert (fact.status, fact.evidence) == (NodeStatus.UP, FAILURE)
    assert 1_790_000 < fact.kept_until_ms - keeping.time.ms <= 1_800_000
    keeping.process()
    assert keeping.passes(1200, step=1)[NODE].kept_until_ms == fact.kept_until_ms
    assert keeping.links[NODE].specs == [], "its agent is not started again"
    assert keeping.cloud.ended == []
    fact = keeping.passes(620, step=1)[NODE]
    assert (fact.status, fact.evidence) == (NodeStatus.GONE, FAILURE)
    assert keeping.cloud.ended == ["i-2"]


def test_one_failed_node_is_kept_at_a_time(keeping):
    for name in (NODE, "run-rollout-1-g0"):
        keeping.bring_up(name)
        keeping.links[name].shows("exit", code=1, text="no such model", at_ms=keeping.time.ms)
        facts = keeping.passes(8)
    assert facts[NODE].kept_until_ms is not None
    assert facts["run-rollout-1-g0"].status is NodeStatus.GONE
    assert keeping.cloud.ended == ["i-2"]


def test_a_kept_node_ends_when_it_is_released(keeping):
    keeping.bring_up(NODE)
    keeping.links[NODE].shows("exit", code=1, text="no such model", at_ms=keeping.time.ms)
    keeping.passes(8)
    keeping.provisioner.rearm(NODE, keeping.time.ms + 60_000)
    assert keeping.links[NODE].rearmed_ms == [60_000], "its guard hears of the money that is left"
    keeping.provisioner.release([NODE])
    assert keeping.passes(8)[NODE].status is NodeStatus.GONE
    assert keeping.cloud.ended == ["i-1"]


def test_a_kept_trainer_is_no_address_for_the_other_nodes(keeping):
    keeping.bring_up(TRAINER)
    keeping.links[TRAINER].shows("exit", code=1, text="no such model", at_ms=keeping.time.ms)
    keeping.passes(8)
    keeping.request()
    keeping.passes(1)
    keeping.sky.finish(NODE)
    keeping.passes(5)
    assert keeping.links[NODE].specs == []


def test_a_node_whose_work_is_done_is_not_kept(keeping):
    keeping.bring_up(NODE)
    keeping.links[NODE].shows("exit", code=0, text="finished", at_ms=keeping.time.ms)
    assert keeping.passes(8)[NODE].status is NodeStatus.GONE


def test_a_released_name_is_never_launched(stage):
    stage.provisioner.release([NODE])
    stage.request()
    fact = stage.passes(5)[NODE]
    assert (fact.status, fact.evidence) == (NodeStatus.GONE, "released before it was started")
    assert stage.sky.launches == []


def test_a_release_terminates_the_instance_and_waits_for_confirmation(stage):
    stage.bring_up(NODE)
    stage.cloud.ends_slowly = True
    stage.provisioner.release([NODE])
    assert stage.passes(5)[NODE].status is NodeStatus.PENDING
    assert stage.file(NODE, "ending")["evidence"] == "released"
    assert not (stage.folder / "nodes" / NODE / "ended.json").exists()
    stage.cloud.change(NODE, state=InstanceState.GONE)
    fact = stage.passes(90, step=1)[NODE]
    assert fact.status is NodeStatus.GONE
    assert stage.cloud.disks == []  # found by its label and deleted


def test_a_release_is_recorded_once_and_only_while_the_node_is_there(stage):
    stage.bring_up(NODE)
    stage.cloud.ends_slowly = True
    released_ms = stage.time.ms
    for _ in range(3):
        stage.provisioner.release([NODE])
        stage.passes(2)
    assert stage.file(NODE, "release")["at_ms"] == released_ms
    stage.bring_up(TRAINER)
    stage.cloud.take_back(TRAINER)
    stage.passes(5)
    stage.provisioner.release([TRAINER])
    assert not (stage.folder / "nodes" / TRAINER / "release.json").exists(), "its end came first"


def test_a_node_has_not_ended_while_a_disk_of_it_cannot_be_removed(stage):
    stage.bring_up(NODE)
    stage.cloud.keeps_disks = True
    stage.provisioner.release([NODE])
    assert stage.passes(20)[NODE].status is NodeStatus.PENDING
    assert [one.state for one in stage.cloud.there] == [InstanceState.GONE]
    assert not (stage.folder / "nodes" / NODE / "ended.json").exists()
    stage.cloud.keeps_disks = False
    assert stage.passes(90, step=1)[NODE].status is NodeStatus.GONE
    assert stage.cloud.disks == []


def test_a_release_during_the_launch_cancels_it(stage):
    stage.request()
    stage.passes(1)
    stage.provisioner.release([NODE])
    fact = stage.passes(4)[NODE]
    assert (fact.status, fact.evidence) == (NodeStatus.GONE, "released")
    assert stage.sky.cancelled == ["request-0"]


def test_an_instance_that_comes_up_after_its_release_is_terminated(stage):
    """A launch may be cancelled in the middle of a purchase."""
    stage.request()
    stage.passes(1)
    stage.provisioner.release([NODE])
    stage.passes(4)
    stage.cloud.start(NODE, placement())
    stage.passes(130)
    assert stage.cloud.ended == ["i-1"]


def test_an_unknown_instance_with_our_label_is_reported_and_can_be_released(stage):
    stage.cloud.start("run-rollout-7-g3", placement())
    assert stage.passes(2)["run-rollout-7-g3"].status is NodeStatus.PENDING
    stage.provisioner.release(["run-rollout-7-g3"])
    assert stage.passes(5)["run-rollout-7-g3"].status is NodeStatus.GONE
    assert stage.cloud.ended == ["i-1"]


def test_another_owners_run_of_the_same_name_is_ignored(stage):
    stage.bring_up(NODE)
    for name in (NODE, "run-rollout-7-g3"):
        stage.cloud.start(name, placement())
        stage.cloud.there[-1] = replace(stage.cloud.there[-1], owner="you")
        stage.cloud.disks[-1] = replace(stage.cloud.disks[-1], owner="you")
    assert stage.passes(3).keys() == {NODE}
    stage.provisioner.release([NODE])
    assert stage.passes(10)[NODE].status is NodeStatus.GONE
    assert stage.provisioner.tidy() or stage.provisioner.tidy()
    assert stage.cloud.ended == ["i-1"]
    assert [one.owner for one in stage.cloud.disks] == ["you", "you"]


# --- silence --------------------------------------------------------------------------------------------


def test_an_unreachable_cloud_api_ends_no_node(stage):
    stage.bring_up(NODE)
    stage.cloud.unreachable = stage.sky.down_for_good = True
    assert stage.passes(300, step=1)[NODE].status is NodeStatus.UP  # its connection works
    stage.links[NODE].seconds_since_message = 400.0
    fact = stage.passes(900, step=1)[NODE]
    assert (fact.status, fact.evidence) == (NodeStatus.UNKNOWN, "aws does not answer")
    stage.cloud.unreachable, stage.links[NODE].seconds_since_message = False, 0.0
    assert stage.passes(10)[NODE].status is NodeStatus.UP


def test_a_silent_node_that_the_cloud_reports_running_is_ended_after_a_while(stage):
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    stage.links[NODE].seconds_since_message, stage.links[NODE].trouble = 30.0, "ssh: timed out"
    assert stage.passes(60)[NODE].status is NodeStatus.UP
    fact = stage.passes(60)[NODE]
    assert fact.status is NodeStatus.GONE
    assert "stopped answering" in fact.evidence
    assert "ssh: timed out" in fact.evidence


def test_a_firewall_rule_that_was_removed_is_named(stage):
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    stage.cloud.missing_rules = ("security group spotrl-run lacks the rule: tcp 22 (SSH) from 203.0.113.7/32",)
    stage.links[NODE].seconds_since_message = 30.0
    assert "tcp 22 (SSH) from 203.0.113.7/32" in stage.passes(120)[NODE].evidence


def test_an_agent_that_cannot_reach_its_trainer_names_the_missing_rule(stage):
    stage.bring_up(TRAINER)
    stage.request(NODE)
    stage.passes(1)
    stage.sky.finish(NODE)
    stage.cloud.missing_rules = ("security group spotrl-run lacks the rule: all traffic from itself",)
    assert "all traffic from itself" in stage.passes(80)[NODE].evidence


def test_silence_of_all_nodes_is_tolerated_longer(stage):
    stage.bring_up(TRAINER)
    stage.links[TRAINER].seconds_since_message = 30.0
    assert stage.passes(200)[TRAINER].status is NodeStatus.UP
    assert stage.passes(250)[TRAINER].status is NodeStatus.GONE


def test_the_rules_follow_this_machines_address_before_a_node_is_ended(stage):
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    stage.address = "198.51.100.9/32"
    for link in stage.links.values():
        link.seconds_since_message = 400.0
    assert stage.passes(300, step=1)[NODE].status is NodeStatus.UP
    assert stage.cloud.let_in[-1] == "198.51.100.9/32"
    for link in stage.links.values():
        link.seconds_since_message = 0.0
    assert stage.passes(5)[NODE].status is NodeStatus.UP
    stage.request("run-rollout-1-g0")
    stage.passes(5)
    assert stage.cloud.let_in[-1] == "198.51.100.9/32"


@pytest.mark.parametrize("silent_s", [80, 300, 359])
def test_an_address_that_changes_late_in_a_silence_ends_no_node(stage, silent_s):
    stage.bring_up(TRAINER)
    stage.links[TRAINER].seconds_since_message = 400.0
    stage.passes(silent_s, step=1)
    stage.address = "198.51.100.9/32"
    assert stage.passes(340, step=1)[TRAINER].status is NodeStatus.UP
    assert stage.cloud.let_in[-1] == "198.51.100.9/32"
    assert stage.passes(90, step=1)[TRAINER].status is NodeStatus.GONE


def test_the_role_of_a_run_goes_after_the_machines_of_all_regions(stage):
    stage.cloud.home = "global"
    stage.bring_up(TRAINER)
    stage.cloud.groups.append(Resource(cloud="aws", region="global", kind="role", id="spotrl-run", run="run"))
    stage.provisioner.release([TRAINER])
    stage.passes(150, step=1)
    stage.cloud.ends_slowly = True
    stage.cloud.start("run-rollout-9-g0", placement())
    for _ in range(3):
        assert not stage.provisioner.tidy()
        assert {one.kind for one in stage.cloud.groups} == {"role", "group"}, "a VM ends itself with them"
        assert stage.cloud.ended[-1] == "i-2"
    stage.cloud.there = [replace(one, state=InstanceState.GONE) for one in stage.cloud.there]
    stage.passes(5)
    assert stage.provisioner.tidy() or stage.provisioner.tidy()
    assert stage.cloud.groups == []


@pytest.fixture
def released(stage):
    """A stage whose only node has ended."""
    stage.bring_up(TRAINER)
    stage.provisioner.release([TRAINER])
    stage.passes(150, step=1)
    return stage


def test_a_controller_without_its_lease_removes_no_group(released):
    released.cloud.start("run-rollout-9-g0", placement())
    ended, released.taken_over = list(released.cloud.ended), True
    for _ in range(3):
        assert not released.provisioner.tidy()
    assert (released.cloud.ended, len(released.cloud.groups)) == (ended, 1)


def test_a_run_is_not_tidy_while_a_disk_of_it_cannot_go(released):
    released.cloud.keeps_disks = True
    released.cloud.disks = [Resource(cloud="aws", region=REGION, kind="disk", id="vol-9", run="run")]
    for _ in range(3):
        assert not released.provisioner.tidy()
        released.passes(10)
    released.cloud.keeps_disks = False
    released.passes(400, step=5)
    assert released.provisioner.tidy() or released.provisioner.tidy()
    assert released.cloud.disks == []


def test_the_rules_follow_an_address_that_changes_during_a_launch(stage):
    stage.request()
    stage.passes(1)
    stage.sky.finish(NODE)
    stage.digest, stage.address = None, "198.51.100.9/32"
    stage.passes(70)
    assert stage.cloud.let_in[-1] == "198.51.100.9/32"


def test_an_address_that_changes_all_the_time_keeps_no_dead_node(stage):
    stage.bring_up(TRAINER)
    stage.links[TRAINER].seconds_since_message = 400.0
    for number in range(16):
        stage.address = f"198.51.100.{number}/32"
        fact = stage.passes(60, step=1)[TRAINER]
    assert fact.status is NodeStatus.GONE


def test_an_address_service_that_does_not_answer_keeps_no_dead_node(stage):
    stage.bring_up(TRAINER)
    stage.links[TRAINER].seconds_since_message = 400.0
    stage.address = ""
    fact = stage.passes(200, step=1)[TRAINER]
    assert fact.status is NodeStatus.UP
    assert any("address service" in trouble for trouble in stage.provisioner.troubles())
    assert stage.passes(250, step=1)[TRAINER].status is NodeStatus.GONE
    assert stage.cloud.let_in[-1] == "203.0.113.7/32"


def test_time_in_which_the_controller_was_suspended_is_not_silence(stage):
    stage.bring_up(TRAINER)
    stage.bring_up(NODE)
    stage.links[NODE].seconds_since_message = 30.0
    stage.time.ms += 3_600_000  # SIGSTOP, or a closed lid
    assert stage.passes(30)[NODE].status is NodeStatus.UP


# --- spend deadlines ------------------------------------------------------------------------------------


def test_a_later_spend_deadline_reaches_the_node_and_skypilots_timer(stage):
    stage.bring_up(NODE)
    stage.bring_up(TRAINER)
    stage.provisioner.rearm(NODE, stage.time.ms + 7_200_000)
    stage.passes(1)
    assert stage.links[NODE].rearmed_ms == [7_200_000]
    assert stage.sky.rearmed == [(NODE, 120 + 30)]
    stage.passes(600, step=2)
    assert len(stage.sky.rearmed) in (2, 3)


# --- the rest -------------------------------------------------------------------------------------------


def test_no_resource_is_left_when_the_run_is_over(stage):
    stage.bring_up(TRAINER)
    assert not stage.provisioner.tidy()
    stage.provisioner.release([TRAINER])
    stage.passes(5)
    assert stage.provisioner.tidy() or stage.provisioner.tidy()
    assert stage.cloud.groups == []
    assert stage.cloud.disks == []
    assert stage.sky.known == {}


def test_a_silent_skypilot_does_not_keep_an_instance_alive(stage):
    stage.bring_up(TRAINER)
    stage.sky.down_for_good = True
    stage.provisioner.release([TRAINER])
    assert stage.passes(5)[TRAINER].status is NodeStatus.GONE
    assert stage.cloud.ended == ["i-1"]
    assert not stage.provisioner.tidy()  # SkyPilot still lists it
    stage.sky.down_for_good = False
    stage.passes(90)
    assert stage.provisioner.tidy() or stage.provisioner.tidy()


# --- the role of the trainer ----------------------------------------------------------------------------

OTHER = "run-rollout-1-g0"


def promoted(stage, name=NODE, generation=1):
    """Order the node to take the trainer's role, like the controller after the trainer's end is on record."""
    bought = NodeSpec.model_validate(stage.file(name, "spec"))
    change = {"role": "trainer", "generation": generation, "token": "the run's token"}
    stage.provisioner.assign(bought.model_copy(update=change))


def calls_in(stage, name, pid, role):
    """The node's agent of this role has started, and its workers have called in."""
    stage.links[name].shows("agent", pid=pid)
    stage.links[name].shows("ready", at_ms=stage.time.ms, pid=pid, role=role)


def lost_trainer(stage):
    """Bring up a trainer and two rollout nodes, and have the cloud preempt the trainer."""
    for name in (TRAINER, NODE, OTHER):
        stage.bring_up(name)
    stage.cloud.take_back(TRAINER)
    assert stage.passes(10)[TRAINER].status is NodeStatus.GONE


def test_a_promoted_node_gets_the_role_and_the_token_and_all_others_its_address(stage):
    lost_trainer(stage)
    assert {spec.token for spec in stage.links[NODE].specs} == {"token"}
    addresses = {name: stage.file(name, "machine")["address"] for name in (TRAINER, NODE, OTHER)}
    promoted(stage)
    facts = stage.passes(1)
    spec, other = stage.links[NODE].specs[-1], stage.links[OTHER].specs[-1]
    assert (spec.role, spec.generation, spec.token) == ("trainer", 1, "the run's token")
    assert (other.role, other.token) == ("rollout", "token")
    assert spec.coordinator_host == other.coordinator_host == addresses[NODE] != addresses[TRAINER]
    assert (facts[NODE].status, facts[NODE].ready_ms) == (NodeStatus.PENDING, None), "the old processes called in"
    calls_in(stage, NODE, 6, "trainer")
    fact = stage.passes(1)[NODE]
    assert (fact.status, fact.role) == (NodeStatus.UP, "trainer")
    orders = [len(stage.links[name].specs) for name in (NODE, OTHER)]
    promoted(stage)
    stage.passes(5)
    assert [len(stage.links[name].specs) for name in (NODE, OTHER)] == orders, "a repeated order changes nothing"


def test_a_controller_that_dies_after_a_promotion_is_followed_by_one_that_orders_it(stage):
    lost_trainer(stage)
    promoted(stage)
    stage.process()
    stage.passes(1)
    assert [stage.links[name].specs[-1].role for name in (NODE, OTHER)] == ["trainer", "rollout"]
    assert len({stage.links[name].specs[-1].coordinator_host for name in (NODE, OTHER)}) == 1


def test_the_newest_promotion_has_the_address_although_its_vm_is_the_oldest(stage):
    """The second trainer was launched after the node that takes its role."""
    for name in (NODE, OTHER, "run-trainer-g1"):
        stage.bring_up(name)
    spec = NodeSpec.model_validate(stage.file("run-trainer-g1", "spec"))
    stage.provisioner.assign(spec.model_copy(update={"generation": 1}))
    promoted(stage, generation=2)
    stage.passes(1)
    assert stage.links[OTHER].specs[-1].coordinator_host == stage.file(NODE, "machine")["address"]


def test_a_node_that_is_ending_gets_no_other_role(stage):
    lost_trainer(stage)
    stage.cloud.ends_slowly = True
    stage.provisioner.release([NODE])
    promoted(stage)
    stage.passes(2)
    assert stage.file(NODE, "spec")["role"] == "rollout"
    assert {spec.token for spec in stage.links[NODE].specs} == {"token"}
    stage.provisioner.assign(NodeSpec.model_validate(stage.file(OTHER, "spec")).model_copy(update={"node": "run-x-g0"}))
    assert not (stage.folder / "nodes" / "run-x-g0" / "spec.json").exists()


def test_a_promoted_node_whose_new_processes_never_call_in_is_ended(stage):
    """The files of its old processes stay: its disk is full, or its new agent hangs."""
    lost_trainer(stage)
    promoted(stage)
    assert stage.passes(890, 5)[NODE].status is NodeStatus.PENDING
    assert "did not call in within 900 s" in stage.passes(60, 5)[NODE].evidence
