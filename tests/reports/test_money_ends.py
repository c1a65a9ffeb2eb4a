"""A VM costs money until the cloud says that the VM ended, not until our order to end it.

The controller, the ledger and the provisioner are real. The cloud may refuse or ignore an order to terminate, may not
answer, and may forget a VM's end. It knows the true cost: each VM costs money from its start to its real end.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from engine.events import Market
from launcher.cli.main import run as spotrl
from launcher.clouds.base import CloudRefused, CloudUnreachable, Instance, InstanceState
from launcher.clouds.gce import GceApi
from launcher.clouds.gce_calls import GoogleCalls
from launcher.controller.controller import Controller
from launcher.exit_codes import ExitCode
from launcher.ledger.accounting import run_costs, side_costs_of_run
from launcher.ledger.models import NodeEvent
from launcher.ledger.store import current_status, nodes_of, open_ledger, writing
from launcher.provision.sky.bundle import Bundle
from launcher.provision.sky.outcome import Failed, Outcome
from launcher.provision.sky.set_up import SetUp
from launcher.provision.sky.sky_provisioner import SkyProvisioner
from launcher.provision.sky.surroundings import Purchases
from launcher.runs.runs import request_stop
from tests.launcher.cluster.stage import SimulatedCloud, cloud_run, cloud_site, dead_pid
from tests.launcher.cluster.test_sky_provisioner import AtOnce, FakeCloud, FakeLink, FakeSky, Killed, Time

REGION, MINUTE = "us-east-1", 60_000
ORDERS = {
    "error": CloudUnreachable("TerminateInstances: 500 InternalError"),
    "permission": CloudRefused("UnauthorizedOperation: you are not authorized to perform ec2:TerminateInstances"),
    "protected": CloudRefused("OperationNotPermitted: disableApiTermination is set"),
}
"""Answers to an order to terminate."""

QUICK = {("error", "gcp")}
"""Answers and clouds of one test that are tried in the quick tier."""


@dataclass
class MoneyCloud(FakeCloud):
    """A cloud with the time of every VM's start and end, like EC2 or, without ended VMs in its list, Google Cloud."""

    orders: str = "obeyed"
    """The answer to an order to terminate: obeyed, ignored, a key of `ORDERS`, or `killed` for the death of the process
    that sends it."""
    answers: bool = True
    """Whether calls that only read are answered."""
    forgets: bool = False
    """The cloud has no record of ended VMs."""
    ends_ms: dict[str, int] = field(default_factory=dict)
    all: dict[str, Instance] = field(default_factory=dict)

    def start(self, name, want, region=REGION):
        super().start(name, want, region)
        instance = replace(self.there.pop(), id=f"i-{len(self.all) + 1}")
        self.there.append(instance)
        self.all[instance.id] = instance
        return instance

    def finish(self, name: str, at_ms: int | None = None, keeps_disks: bool = False) -> None:
        """End the VM of this name, as if ordered by the cloud or by the VM itself."""
        for one in [one for one in self.there if one.name == name and one.id not in self.ends_ms]:
            self.ends_ms[one.id] = ended_ms = self.time.ms if at_ms is None else at_ms
            words = {"ended_ms": ended_ms, "reason": "User initiated"}
            self.there.remove(one)
            if self.forgets:
                continue
            if self.cloud == "aws":
                self.there.append(replace(one, state=InstanceState.GONE, **words))
            else:
                self.end_words[one.id] = words
        if not keeps_disks:
            self.disks = [one for one in self.disks if one.node != name]

    def end(self, instances):
        if self.orders in ORDERS:
            raise ORDERS[self.orders]
        if self.orders.startswith("killed"):
            raise Killed
        for instance in instances if self.orders == "obeyed" else ():
            self.ended.append(instance.id)
            self.finish(instance.name, keeps_disks=self.keeps_disks)

    def _answer(self):
        if not self.answers:
            raise CloudUnreachable("the cloud does not answer")

    def true_ms(self, name: str) -> int:
        """Return the paid time of all VMs of a node until now."""
        mine = [one for one in self.all.values() if one.name == name]
        return sum(self.ends_ms.get(one.id, self.time.ms) - one.launched_ms for one in mine)


class Link(FakeLink):
    """A connection to a node without a tunnel."""

    def tunnel(self, port):
        return None


class MoneyStage:
    """A run on `MoneyCloud`. Launches succeed at once."""

    def __init__(self, home: Path, cloud: str = "aws", **run_fields) -> None:
        self.sessions = open_ledger(home / "ledger.sqlite")
        fields = {"sites": (cloud_site(cloud, REGION),), "spot": 1, **run_fields}
        self.run = cloud_run(self.sessions, name="run", **fields)
        self.time = Time(self.run.created_ms)
        self.cloud = MoneyCloud(self.time, cloud=cloud)
        self.sky = FakeSky(self.cloud)
        self.links: dict[str, Link] = {}
        self.silent: set[str] = set()
        self.controller = self.process()

    def process(self) -> Controller:
        """Start the controller's process anew, over the same files."""

        def link(login, mirror):
            self.links[mirror.name] = Link(login, mirror)
            return self.links[mirror.name]

        self.links.clear()
        (Path(self.run.folder) / "nodes").mkdir(parents=True, exist_ok=True)
        self.provisioner = SkyProvisioner(
            Purchases(
                run="run",
                owners={"aws": "me", "gcp": "me"},
                folder=Path(self.run.folder),
                ssh_from="203.0.113.7/32",
                buckets=("s3://bucket/runs/run",),
                bundle=Bundle(folder=Path(self.run.folder) / "bundle", digest="d1", setup="sh set_up.sh"),
                regions=[(self.cloud.cloud, REGION)],
            ),
            sky=self.sky,
            clouds={self.cloud.cloud: self.cloud},
            clock=self.time,
            link=link,
            pool=AtOnce(),
            ask_set_up=lambda login: SetUp(home="/home/ubuntu", digest="d1", exit_code=None, log=""),
            begin_set_up=lambda login, folder, command: None,
            monotonic=self.time.monotonic,
        )
        self.controller = Controller(
            self.sessions, self.run, self.provisioner, self.time, f"test-{self.time.ms}", dead_pid(), lambda a, b: None
        )
        return self.controller

    def passes(self, minutes: float, step_s: float = 10.0) -> None:
        for _ in range(max(1, round(minutes * 60 / step_s))):
            self.time.ms += round(step_s * 1000)
            for launch in self.sky.launches:
                if self.sky.requests[self.sky.names[launch.name]] is None:
                    self.cloud.start(launch.name, launch.want)
                    self.sky.finish(launch.name)
            alive = {one.name for one in self.cloud.there if one.state is InstanceState.RUNNING}
            for name, link in self.links.items():
                answers = name in alive and name not in self.silent
                link.seconds_since_message = 0.0 if answers else (link.seconds_since_message or 0.0) + step_s
                link.messages += answers
                if answers and not (link.mirror / "ready.json").exists():
                    link.shows("agent", pid=5)
                    link.shows("ready", at_ms=self.time.ms, pid=5)
            self.controller.one_pass()

    def begun(self, minutes: float = 4) -> "MoneyStage":
        self.passes(minutes)
        assert all(one.state is InstanceState.RUNNING for one in self.cloud.there)
        return self

    def order_down(self) -> None:
        request_stop(self.sessions, "run")

    def release(self, name: str) -> None:
        """Have the controller order the end of a node, as after a failover."""
        with writing(self.sessions) as session:
            node = next(node for node in nodes_of(session, self.run) if node.name == name)
            session.add(NodeEvent(node_id=node.id, at_ms=self.time.ms, kind="releasing"))

    def spend_deadline_ms(self, name: str) -> int:
        spec = json.loads((Path(self.run.folder) / "nodes" / name / "spec.json").read_text())
        rearmed = [self.time.ms + left_ms for left_ms in self.links[name].rearmed_ms]
        return max([spec["money_deadline_ms"], *rearmed])

    @property
    def names(self) -> list[str]:
        return sorted({one.name for one in self.cloud.all.values()})

    def stage(self) -> str:
        with self.sessions() as session:
            status = current_status(session, self.run)
            assert status is not None
            return status.status

    def costs(self):
        with self.sessions() as session:
            return run_costs(session, self.run, self.time.ms)

    def paid_ms(self, name: str) -> int:
        """Return the time of the node that the ledger has paid or will pay by now."""
        return next(node.ms for node in self.costs().nodes if node.node == name)

    def side_ms(self, kind: str) -> int:
        """Return the time of all disks or addresses that the ledger has paid or will pay by now."""
        with self.sessions() as session:
            found = side_costs_of_run(session, self.run, self.time.ms)
        return sum(cost.end_ms - cost.start_ms for cost in found if cost.kind == kind)

    def true_micro_usd(self) -> int:
        """Return the true cost of the VMs at the prices of the ledger."""
        rates = {node.node: node.micro_usd_per_hour for node in self.costs().nodes}
        return sum(self.cloud.true_ms(name) * rates[name] // 3_600_000 for name in self.names)


def status_json(capsys) -> dict:
    """Return what `spotrl status run --json` prints."""
    capsys.readouterr()
    assert spotrl(["status", "run", "--json"]) == ExitCode.OK
    return json.loads(capsys.readouterr().out)


LOOK_MS = 10_000
"""Time between two looks of these tests. The ledger may be wrong by a look where the cloud names no time."""

TRAINER, SPOT = "run-trainer-g0", "run-spot-0-g0"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "none.yaml"))
    return tmp_path


def assert_paid_is_true(stage: MoneyStage, within_ms: int = 1) -> None:
    assert stage.names, "the run bought nothing"
    for name in stage.names:
        assert stage.paid_ms(name) == pytest.approx(stage.cloud.true_ms(name), abs=within_ms), name


def assert_over_and_true(stage: MoneyStage, capsys, within_ms: int = 1) -> None:
    """Assert that the run has ended and that the ledger, the status and the report say the true cost."""
    assert stage.stage() in ("stopped", "failed", "finished")
    assert set(stage.cloud.all) == set(stage.cloud.ends_ms)
    assert_paid_is_true(stage, within_ms)
    true, tolerance = stage.true_micro_usd(), 1_000_000 * within_ms // 3_600_000 * len(stage.names) + 10
    assert status_json(capsys)["spent_micro_usd"] == pytest.approx(true, abs=tolerance)


# --- an order is no end ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("orders", "cloud"),
    [
        pytest.param(orders, cloud, marks=() if (orders, cloud) in QUICK else pytest.mark.slow)
        for orders in ("error", "permission", "protected", "ignored")
        for cloud in ("aws", "gcp")
    ],
)
def test_a_node_is_paid_until_its_end_while_the_order_to_end_it_fails(home, capsys, orders, cloud):
    stage = MoneyStage(home, cloud).begun()
    stage.cloud.orders = orders
    stage.order_down()
    stage.passes(50, step_s=60)
    assert_paid_is_true(stage)
    stage.cloud.orders = "obeyed"
    stage.passes(5)
    assert_over_and_true(stage, capsys)
    assert all(stage.cloud.true_ms(name) > 50 * MINUTE for name in stage.names)


@pytest.mark.slow
def test_every_node_of_a_trainer_is_paid_until_its_end(home, capsys):
    stage = MoneyStage(home, trainers=3).begun()
    stage.cloud.orders = "permission"
    stage.order_down()
    stage.passes(50, step_s=60)
    stage.cloud.orders = "obeyed"
    stage.passes(5)
    assert len(stage.names) == 4
    assert_over_and_true(stage, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
@pytest.mark.parametrize("orders", ["killed before", "killed after"])
def test_an_order_lost_with_the_controller_ends_no_bill(home, capsys, orders, cloud):
    stage = MoneyStage(home, cloud).begun()
    stage.cloud.orders = orders
    stage.order_down()
    with pytest.raises(Killed):
        stage.passes(5)
    stage.time.ms += 20 * MINUTE
    if orders == "killed after":  # the cloud took its time
        stage.cloud.finish(SPOT)
        stage.cloud.finish(TRAINER)
    stage.time.ms += 20 * MINUTE
    stage.cloud.orders = "obeyed"
    stage.process()
    stage.passes(5)
    assert_over_and_true(stage, capsys)


@pytest.mark.slow
def test_a_node_that_another_controller_ends_is_paid_until_its_end(home, capsys):
    stage = MoneyStage(home).begun()
    stage.cloud.orders = "error"
    stage.order_down()
    stage.passes(20, step_s=60)
    stage.process()
    stage.passes(20, step_s=60)
    stage.cloud.orders = "obeyed"
    stage.passes(5)
    assert_over_and_true(stage, capsys)


@pytest.mark.slow
def test_a_node_with_a_foreign_identity_is_paid_until_its_end(home, capsys):
    stage = MoneyStage(home).begun()
    stage.cloud.orders = "permission"
    stage.cloud.change(SPOT, identity="skypilot-v1")
    stage.passes(40, step_s=60)
    assert_paid_is_true(stage)
    stage.cloud.orders = "obeyed"
    stage.order_down()
    stage.passes(5)
    assert_over_and_true(stage, capsys)


def test_a_vm_that_stopped_before_the_order_costs_nothing_from_then_on(home, capsys):
    stage = MoneyStage(home).begun()
    stopped_ms = stage.time.ms
    stage.cloud.orders = "protected"
    (vm,) = [one for one in stage.cloud.there if one.name == SPOT]
    stage.cloud.ends_ms[vm.id] = stopped_ms
    stage.cloud.change(SPOT, state=InstanceState.STOPPING, ended_ms=stopped_ms, reason="stopped by hand")
    stage.order_down()
    stage.passes(30, step_s=60)
    stage.cloud.orders = "obeyed"
    del stage.cloud.ends_ms[vm.id]
    stage.passes(5)
    stage.cloud.ends_ms[vm.id] = stopped_ms
    assert_over_and_true(stage, capsys)


# --- the budget -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("orders", ["error", "ignored"])
def test_a_silent_node_that_cannot_be_ended_counts_against_the_budget(home, orders):
    stage = MoneyStage(home, max_total=3_000_000).begun()
    stage.cloud.orders = orders
    stage.silent.add(SPOT)
    stage.passes(5, step_s=1)
    stage.passes(75, step_s=60)
    before = stage.costs().total
    stage.cloud.orders = "obeyed"
    stage.passes(5)
    assert stage.costs().total > before  # the sum never falls when the node is gone at last
    assert_paid_is_true(stage)
    stage.passes(120, step_s=60)
    assert stage.stage() == "stopped"
    assert stage.true_micro_usd() <= 3_000_000


def test_nodes_of_another_run_that_cannot_be_ended_hold_its_money_against_the_limit_of_all_runs(home):
    stage = MoneyStage(home, max_total=3_000_000).begun()
    beside = cloud_run(stage.sessions, name="beside", spot=0, all_runs={"max_total": "$50"})
    controller = Controller(
        stage.sessions, beside, SimulatedCloud(stage.time), stage.time, "beside", dead_pid(), lambda a, b: None
    )
    stage.cloud.orders = "ignored"
    stage.order_down()
    stage.passes(20, step_s=60)
    others = controller.facts().others
    ends_ms = {name: stage.spend_deadline_ms(name) for name in stage.names}
    most = sum(
        (ends_ms[node.node] - stage.time.ms) * node.micro_usd_per_hour // 3_600_000 for node in stage.costs().nodes
    )
    assert most > 2_000_000
    assert most <= others.reserved <= 3_050_000 - others.metered
    stage.cloud.orders = "obeyed"
    stage.passes(5)
    assert stage.stage() == "stopped"
    assert controller.facts().others.reserved == 0


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
@pytest.mark.parametrize("orders", ["error", "ignored", "permission", "ignored, with a limit of all runs alone"])
def test_replaced_nodes_that_cannot_be_ended_do_not_pass_the_budget(home, orders, cloud):
    """The old node works on until its own spend deadline, beside its successor and without a word from us."""
    orders, _, is_of_all_runs = orders.partition(", ")
    limit = {"max_total": None, "all_runs": {"max_total": "$6"}} if is_of_all_runs else {"max_total": 6_000_000}
    stage = MoneyStage(home, cloud, spot=3, max_hourly=None, **limit).begun()
    stage.cloud.orders = orders
    old = [f"run-spot-{number}-g0" for number in range(3)]
    deadline_ms = max(stage.spend_deadline_ms(name) for name in old)
    for name in old:
        stage.release(name)
    while stage.stage() == "running" and stage.time.ms < deadline_ms:
        stage.passes(5, step_s=60)
    assert len(stage.names) == 7
    for name in stage.names:
        stage.cloud.finish(name, at_ms=max(stage.time.ms, deadline_ms) if name in old else stage.time.ms)
    stage.time.ms = max(stage.time.ms, deadline_ms)
    assert stage.true_micro_usd() <= 6_000_000


# --- an end during an outage of the cloud's API -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
@pytest.mark.parametrize("is_ordered_first", [True, False])
def test_a_node_that_ended_during_an_outage_is_paid_until_its_end(home, capsys, is_ordered_first, cloud):
    stage = MoneyStage(home, cloud).begun()
    stage.cloud.answers, stage.cloud.orders = False, "error"
    if is_ordered_first:
        stage.order_down()
    stage.passes(5)
    for name in (TRAINER, SPOT):
        stage.cloud.finish(name)  # at its spend deadline
    stage.order_down()
    stage.passes(60, step_s=60)
    stage.cloud.answers, stage.cloud.orders = True, "obeyed"
    stage.passes(5)
    assert_over_and_true(stage, capsys)


@pytest.mark.parametrize("cloud", [pytest.param("aws", marks=pytest.mark.slow), "gcp"])
def test_an_end_that_the_cloud_has_forgotten_is_the_last_look_that_saw_the_vm(home, capsys, cloud):
    stage = MoneyStage(home, cloud).begun()
    stage.cloud.forgets = True
    for name in (TRAINER, SPOT):
        stage.cloud.finish(name)
    stage.time.ms += 180 * MINUTE  # a closed lid
    stage.order_down()
    stage.passes(5)
    assert_over_and_true(stage, capsys, within_ms=LOOK_MS)


@pytest.mark.slow
def test_a_new_process_knows_the_last_look_that_saw_the_vm(home, capsys):
    stage = MoneyStage(home).begun()
    stage.cloud.forgets = True
    for name in (TRAINER, SPOT):
        stage.cloud.finish(name)
    stage.time.ms += 180 * MINUTE
    stage.process()
    stage.order_down()
    stage.passes(5)
    assert_over_and_true(stage, capsys, within_ms=MINUTE + LOOK_MS)


@pytest.mark.slow
def test_a_node_whose_agent_answers_is_alive_although_the_cloud_does_not_answer(home, capsys):
    stage = MoneyStage(home).begun()
    stage.cloud.answers, stage.cloud.forgets = False, True
    stage.passes(60, step_s=60)
    for name in (TRAINER, SPOT):
        stage.cloud.finish(name)
    stage.passes(60, step_s=60)
    stage.cloud.answers = True
    stage.order_down()
    stage.passes(5)
    assert_over_and_true(stage, capsys, within_ms=MINUTE)


@pytest.mark.slow
def test_an_agent_that_reported_its_own_end_is_paid_until_then(home, capsys):
    stage = MoneyStage(home).begun()
    stage.cloud.answers, stage.cloud.forgets = False, True
    stage.silent |= {TRAINER, SPOT}
    stage.passes(40, step_s=60)
    for name in (TRAINER, SPOT):
        stage.links[name].shows("exit", code=7, text="the money deadline has come", at_ms=stage.time.ms)
        stage.cloud.finish(name)
    stage.passes(60, step_s=60)
    stage.cloud.answers = True
    stage.order_down()
    stage.passes(5)
    assert_over_and_true(stage, capsys)


# --- disks, and VMs that live on ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_disk_that_outlives_its_vm_costs_money_and_the_vm_does_not(home, capsys):
    stage = MoneyStage(home).begun()
    stage.cloud.keeps_disks = True
    stage.order_down()
    stage.passes(3)
    assert set(stage.cloud.all) == set(stage.cloud.ends_ms)
    ended_ms = max(stage.cloud.ends_ms.values())
    stage.passes(40, step_s=60)
    assert_paid_is_true(stage)
    rate, disks_ms = status_json(capsys)["micro_usd_per_hour"], stage.side_ms("disk")
    assert rate == 0
    stage.cloud.keeps_disks = False
    removed_ms = stage.time.ms
    stage.passes(5)
    assert_over_and_true(stage, capsys)
    vms_ms = sum(stage.cloud.true_ms(name) for name in stage.names)
    assert stage.side_ms("address") == vms_ms
    assert stage.side_ms("disk") == pytest.approx(vms_ms + 2 * (removed_ms - ended_ms), abs=4 * MINUTE)
    assert stage.side_ms("disk") >= disks_ms


@pytest.mark.parametrize("orders", ["obeyed", pytest.param("error", marks=pytest.mark.slow)])
def test_a_vm_that_was_missing_from_the_list_and_lives_is_paid_until_its_end(home, capsys, orders):
    stage = MoneyStage(home).begun()
    (vm,) = [one for one in stage.cloud.there if one.name == SPOT]
    stage.cloud.there.remove(vm)  # the list is wrong for a minute
    stage.cloud.end_words[vm.id] = {}
    stage.passes(1)
    stage.cloud.orders = orders
    stage.cloud.there.append(vm)
    stage.passes(30, step_s=60)
    if orders == "error":
        assert stage.paid_ms(SPOT) == pytest.approx(stage.cloud.true_ms(SPOT), abs=2)
    stage.cloud.orders = "obeyed"
    stage.order_down()
    stage.passes(5)
    assert_over_and_true(stage, capsys, within_ms=LOOK_MS)


@pytest.mark.slow
def test_a_vm_that_came_up_after_its_release_is_paid(home, capsys):
    stage = MoneyStage(home)
    stage.time.ms += 5_000
    stage.controller.one_pass()
    stage.time.ms += 5_000
    stage.controller.one_pass()
    (launch, *_) = stage.sky.launches
    stage.order_down()
    for request in stage.sky.requests:
        stage.sky.requests[request] = Outcome(failed=Failed.CANCELLED)
    stage.passes(1)
    stage.cloud.start(launch.name, launch.want)
    stage.cloud.orders = "error"
    stage.passes(30, step_s=60)
    stage.cloud.orders = "obeyed"
    stage.passes(5)
    assert stage.cloud.true_ms(launch.name) > 29 * MINUTE
    assert_over_and_true(stage, capsys, within_ms=LOOK_MS)


# --- Google Cloud's operations ------------------------------------------------------------------------------

MADE_MS, ENDED_MS, PATH = 1_772_600_000_000, 1_772_603_600_000, "projects/p/zones/us-central1-a/instances/run-spot-0-g0"
AT_THE_END = {"insertTime": "2026-03-04T05:50:00Z", "endTime": "2026-03-04T05:53:20Z"}


class Operations(GoogleCalls):
    """The operations of a zone, newest first."""

    def __init__(self, *operations: dict) -> None:
        super().__init__({})
        self.operations = [{"targetLink": PATH, **one} for one in operations]

    def ask(self, method, where, path, body=None, query=None):
        return {"items": self.operations}


@pytest.mark.parametrize(
    ("operations", "ended_ms"),
    [
        ([{"operationType": "delete", **AT_THE_END}], ENDED_MS),
        ([{"operationType": "compute.instances.guestTerminate", **AT_THE_END}], ENDED_MS),
        # accepted, and not done
        ([{"operationType": "delete", "insertTime": "2026-03-04T05:10:00Z"}], None),
        # failed, and then done
        (
            [
                {"operationType": "delete", **AT_THE_END},
                {
                    "operationType": "delete",
                    "insertTime": "2026-03-04T05:10:00Z",
                    "endTime": "2026-03-04T05:10:09Z",
                    "error": {"errors": [{"code": "INTERNAL_ERROR"}]},
                },
            ],
            ENDED_MS,
        ),
        # failed, and the end is not known
        ([{"operationType": "delete", **AT_THE_END, "error": {"errors": [{"code": "INTERNAL_ERROR"}]}}], None),
        # an earlier VM of the name
        (
            [{"operationType": "stop", "insertTime": "2026-03-04T04:00:00Z", "endTime": "2026-03-04T04:01:00Z"}],
            None,
        ),
    ],
)
def test_on_google_cloud_only_an_operation_that_ended_the_vm_is_its_end(operations, ended_ms):
    instance = Instance(
        cloud="gcp",
        region="us-central1",
        zone="us-central1-a",
        id="run-spot-0-g0",
        name="run-spot-0-g0",
        run="run",
        owner="me",
        state=InstanceState.RUNNING,
        market=Market.SPOT,
        instance_type="g2-standard-4",
        launched_ms=MADE_MS,
    )
    assert GceApi({}, Operations(*operations)).end_of(instance).ended_ms == ended_ms
