"""A copy of SPOTRL_HOME gives no second controller, and a ledger restored from a backup forgets no money.

The controller, its ledger and its decisions are real; the clouds, the clock and the bucket are simulated.
"""

import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from obstore.store import MemoryStore

from launcher.cli.controller import controller as controller_command
from launcher.cli.events import events
from launcher.controller import lease
from launcher.controller.controller import Controller
from launcher.controller.lease import take_lease, this_ledger, this_process
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.ledger.accounting import side_costs_of_run, spent_micro_usd
from launcher.ledger.billing import interval_micro_usd
from launcher.ledger.models import ControllerLease
from launcher.ledger.node_history import metered_micro_usd, node_records
from launcher.runs.own_folder import CopiedLedger
from launcher.storage.store_lease import LEASE_SECONDS, LeaseHeld, LeaseLost, Spent, StoreLease
from tests.launcher.cluster.stage import (
    SPOT_RATE,
    TRAINER_RATE,
    HandClock,
    SimulatedCloud,
    cloud_run,
    dead_pid,
    ledger,
)
from tests.launcher.cluster.test_sky_provisioner import Stage as ProvisionerStage
from tests.launcher.cluster.test_sky_provisioner import placement

MINUTE = 60_000


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPOTRL_CONFIG", str(tmp_path / "config.yaml"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


class Wall:
    """Wall time that the test moves."""

    ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


def lease_of(home: Path, bucket: MemoryStore, wall: Wall) -> StoreLease:
    """Return the lease of a controller that starts now with the ledger in `home`."""
    return StoreLease(lambda: bucket, "demo", this_ledger(home / "ledger.sqlite"), wall, wall)


@pytest.fixture
def two_homes(home, tmp_path):
    """Make a ledger with a run, and a copy of its folder."""
    sessions = ledger(home)
    cloud_run(sessions)
    sessions.kw["bind"].dispose()
    shutil.copytree(home, tmp_path / "copy")
    return home, tmp_path / "copy"


# --- one controller ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["copied", "restored over a live controller", "on another machine", "from an image"])
def test_a_controller_of_a_copied_ledger_is_refused_by_the_bucket(two_homes, monkeypatch, how):
    (home, copy), bucket, wall = two_homes, MemoryStore(), Wall()
    first = lease_of(home, bucket, wall)
    first.take()
    wall.ms += 30_000
    if how == "restored over a live controller":
        shutil.copy(copy / "ledger.sqlite", copy / "new")
        with (home / "ledger.sqlite").open():  # the live controller keeps its file open
            (copy / "new").rename(home / "ledger.sqlite")
            second = lease_of(home, bucket, wall)
    elif how in ("on another machine", "from an image"):
        # A machine made from an image has the same files and numbers; only its start differs.
        monkeypatch.setattr(lease, "this_machine", lambda: "another start")
        second = lease_of(home if how == "from an image" else copy, bucket, wall)
    else:
        second = lease_of(copy, bucket, wall)
    with pytest.raises(LeaseHeld, match=rf"{socket.gethostname()}.*another 60 s.*end that process and wait"):
        second.take()
    first.renew()
    first.check()


def test_a_copy_takes_over_once_the_first_controller_is_silent_and_the_first_stops(two_homes):
    (home, copy), bucket, wall = two_homes, MemoryStore(), Wall()
    first, second = lease_of(home, bucket, wall), lease_of(copy, bucket, wall)
    first.take()
    wall.ms += round(LEASE_SECONDS * 1000) + 1
    second.take()
    with pytest.raises(LeaseLost):
        first.check()
    second.renew()
    second.check()


def test_a_killed_controller_is_followed_at_once_on_its_own_ledger(two_homes):
    (home, _), bucket, wall = two_homes, MemoryStore(), Wall()
    lease_of(home, bucket, wall).take()
    successor = lease_of(home, bucket, wall)  # after kill -9, nothing was given back
    successor.take()
    successor.renew()
    assert successor.lost is None


def test_a_ledger_that_was_moved_keeps_its_lease(two_homes):
    (home, copy), bucket, wall = two_homes, MemoryStore(), Wall()
    lease_of(home, bucket, wall).take()
    home.rename(copy / "moved")
    moved = lease_of(copy / "moved", bucket, wall)
    moved.take()
    moved.renew()
    assert moved.lost is None


def test_a_copy_of_a_held_ledger_on_another_machine_names_the_first_host(two_homes, monkeypatch):
    home, copy = two_homes
    sessions = ledger(home)
    with sessions() as session:
        run = cloud_run(sessions, name="held")
    take_lease(sessions, run, this_process(), 1)
    sessions.kw["bind"].dispose()
    shutil.copy(home / "ledger.sqlite", copy / "ledger.sqlite")
    first_host = socket.gethostname()
    monkeypatch.setattr(lease, "this_machine", lambda: "another start")
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop-2")
    there = ledger(copy)
    with pytest.raises(LeaseHeld, match=rf"process 1 on {first_host}"):
        take_lease(there, run, this_process(), 2)
    with there() as session:
        assert lease.was_elsewhere(session.get(ControllerLease, run.id)), "the bucket must answer before it goes on"
    expired_ms = time.time_ns() // 1_000_000 + lease.LEASE_MS + 1
    take_lease(there, run, this_process(), 2, expired_ms)  # from here on, the bucket decides


def test_the_command_refuses_a_copy_whose_files_are_those_of_the_first(two_homes, monkeypatch):
    home, copy = two_homes
    (home / "runs" / "demo").mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("SPOTRL_HOME", str(copy))
    result = CliRunner().invoke(controller_command, ["demo"], obj=ledger(copy), standalone_mode=False)
    assert isinstance(result.exception, CopiedLedger)
    assert f"SPOTRL_HOME={home}" in str(result.exception)


# --- a ledger from a backup -------------------------------------------------------------------------------


class RestoredCloud(SimulatedCloud):
    """A cloud whose answers may be those after the run's node folders were lost.

    `is_forgotten`: nodes that ended are not reported, and those that run only as instances without an order.
    """

    is_forgotten = False
    has_orders = False
    """Whether the run's folder still has the orders of its nodes."""

    def observe(self) -> list[NodeFact]:
        facts = super().observe()
        if self.has_orders:
            return [replace(fact, want=self.requested[fact.name][0]) for fact in facts]
        if not self.is_forgotten:
            return facts
        return [
            replace(fact, ready_ms=None, status=NodeStatus.PENDING) for fact in facts if fact.name not in self.ended
        ]


class Backup:
    """A run whose ledger was copied after some minutes, and restored later."""

    def __init__(self, folder: Path, **fields) -> None:
        self.folder = folder
        self.sessions = ledger(folder)
        self.run = cloud_run(self.sessions, **fields)
        self.clock = HandClock(factor=1.0)
        self.clock.at_ms = self.run.created_ms
        self.cloud = RestoredCloud(self.clock)
        self.controller = self.a_controller()

    def a_controller(self, bucket_lease: StoreLease | None = None) -> Controller:
        holder = f"test-{time.monotonic_ns()}"
        return Controller(
            self.sessions, self.run, self.cloud, self.clock, holder, dead_pid(), bucket_lease=bucket_lease
        )

    def passes(self, minutes: float, until: Callable[[], bool] = lambda: False) -> None:
        until_ms = self.clock.now_ms() + round(minutes * MINUTE)
        while self.clock.now_ms() < until_ms and not until():
            self.clock.pass_ms(30_000)
            if self.controller.one_pass():
                return

    def copy(self) -> None:
        self.sessions.kw["bind"].dispose()
        shutil.copy(self.folder / "ledger.sqlite", self.folder / "backup")

    def restore(self, bucket_lease: StoreLease | None = None) -> None:
        self.sessions.kw["bind"].dispose()
        for end in ("-wal", "-shm"):
            (self.folder / f"ledger.sqlite{end}").unlink(missing_ok=True)
        shutil.copy(self.folder / "backup", self.folder / "ledger.sqlite")
        self.sessions = ledger(self.folder)
        if bucket_lease is not None:
            bucket_lease.take()
        self.controller = self.a_controller(bucket_lease)

    def spent(self) -> int:
        """Return the cost with disks and addresses, which the budget counts."""
        with self.sessions() as session:
            return spent_micro_usd(session, self.run, self.clock.now_ms())

    def spent_by_nodes(self) -> int:
        with self.sessions() as session:
            beside = side_costs_of_run(session, self.run, self.clock.now_ms())
        return self.metered() + sum(cost.micro_usd or 0 for cost in beside if cost.kind != "forgotten")

    def metered(self) -> int:
        with self.sessions() as session:
            return metered_micro_usd(session, self.run, self.clock.now_ms())

    def records(self):
        with self.sessions() as session:
            return {record.name: record for record in node_records(session, self.run)}


def lose_nodes(backup: Backup, slots: list[str], minutes: float) -> None:
    for slot in slots:
        live = [name for name in backup.cloud.live() if slot in name]
        backup.cloud.preempt(live[0]) if "spot" in slot else backup.cloud.end(live[0], "its host failed")
        backup.passes(minutes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [
        ["spot-0", "spot-1", "spot-0", "spot-1"],
        ["spot-0"],
        ["trainer", "spot-1"],
        ["spot-0", "spot-0", "spot-0"],
    ],
    ids=lambda lost: "-".join(lost),
)
def test_a_restored_ledger_counts_what_was_spent_since_the_backup(home, lost):
    backup = Backup(home)
    backup.passes(4)
    backup.copy()
    lose_nodes(backup, lost, 12)
    known = set(backup.records())
    backup.restore()
    backup.passes(1)
    assert backup.metered() == backup.cloud.true_micro_usd()
    assert known <= set(backup.records())
    backup.passes(20)
    assert backup.metered() == backup.cloud.true_micro_usd()
    names = [name for name, (_, spec, _) in backup.cloud.requested.items() if spec is not None]
    assert len(names) == len(set(names))
    assert len(backup.cloud.live()) == 3
    told = CliRunner().invoke(events, ["demo", "--kind", "found"], obj=backup.sessions, standalone_mode=False).output
    assert "restored from a backup" in told


@pytest.mark.slow
def test_nodes_whose_orders_are_in_the_runs_folder_go_on_after_a_restore(home):
    backup = Backup(home)
    backup.cloud.has_orders = True
    backup.passes(4)
    backup.copy()
    lose_nodes(backup, ["trainer", "spot-1", "spot-0"], 12)
    live = backup.cloud.live()
    assert len(live) == 3
    backup.restore()
    backup.passes(10)
    assert backup.cloud.live() == live
    assert backup.cloud.released == []
    assert backup.metered() == backup.cloud.true_micro_usd()


@pytest.mark.slow
def test_a_run_with_a_restored_ledger_stays_within_its_budget(home):
    backup = Backup(home, max_total=3_000_000)
    backup.passes(4)
    backup.copy()
    lose_nodes(backup, ["spot-0", "spot-1", "spot-0", "spot-1"], 12)
    backup.restore()
    while backup.cloud.live():
        backup.passes(5)
    assert backup.cloud.true_micro_usd() == backup.metered()
    assert 2_500_000 < backup.metered() <= 3_000_000


def test_without_the_node_folders_the_nodes_that_run_are_billed_from_their_launch(home):
    backup = Backup(home)
    backup.passes(4)
    backup.copy()
    lose_nodes(backup, ["spot-0"], 12)
    [running] = [name for name in backup.cloud.live() if "spot-0" in name]
    up_ms = backup.cloud.up[running]
    backup.restore()
    backup.cloud.is_forgotten = True
    backup.passes(2)
    backup.cloud.is_forgotten = False  # their ends are reported again
    backup.passes(2)
    assert backup.records()[running].happened["up"] == up_ms
    assert running not in backup.cloud.live(), "nobody can look after a node without its order"
    assert backup.metered() == backup.cloud.true_micro_usd()


@pytest.mark.parametrize(
    "losses",
    [
        ["spot-0"],
        pytest.param(["spot-0", "spot-1", "spot-0", "spot-1"], marks=pytest.mark.slow),
        pytest.param(["spot-0", "spot-0"], marks=pytest.mark.slow),
    ],
)
def test_the_bucket_remembers_the_money_of_nodes_that_nothing_else_knows(home, losses):
    """The node folders are lost, and the cloud lists no instance that has ended."""
    bucket, wall = MemoryStore(), Wall()
    backup = Backup(home)
    first = lease_of(home, bucket, wall)
    first.take()
    backup.controller.recorder.bucket_lease = first
    backup.passes(4)
    backup.copy()
    lose_nodes(backup, losses, 12)
    first.renew()
    true = backup.spent()
    backup.restore(lease_of(home, bucket, wall))
    assert backup.spent() >= true
    forgotten = set(backup.cloud.ended)
    plain = backup.cloud.observe
    backup.cloud.observe = lambda: [fact for fact in plain() if fact.name not in forgotten]
    backup.passes(15)
    grown = backup.spent() - true
    assert 0 < grown <= 4 * TRAINER_RATE / 4, "what was forgotten is counted once"
    backup.cloud.observe = plain  # the folders are found again: they explain the money, which is not counted twice
    backup.passes(1)
    assert abs(backup.spent() - backup.spent_by_nodes()) < 10_000


def test_a_successor_on_the_same_ledger_has_forgotten_nothing(home):
    bucket, wall = MemoryStore(), Wall()
    backup = Backup(home)
    first = lease_of(home, bucket, wall)
    first.take()
    backup.controller.recorder.bucket_lease = first
    backup.passes(4)
    lose_nodes(backup, ["spot-0"], 1)
    first.renew()
    successor = lease_of(home, bucket, wall)
    successor.take()
    assert successor.spent is not None
    backup.controller = backup.a_controller(successor)
    backup.passes(3)
    assert backup.spent() == backup.spent_by_nodes()


def test_a_run_that_ended_leaves_what_it_spent_in_the_bucket(two_homes):
    (home, copy), bucket, wall = two_homes, MemoryStore(), Wall()
    first = lease_of(home, bucket, wall)
    first.take()
    first.spent = Spent(event=7, at_ms=1000, micro_usd=3_000_000)
    first.give_up()
    second = lease_of(copy, bucket, wall)
    second.take()
    assert second.spent == first.spent


@pytest.mark.slow
def test_a_node_that_was_asked_for_again_is_billed_from_its_true_start(home):
    """The clouds were silent in the first passes after the restore, so the ledger asked for a name that ran already."""
    backup = Backup(home)
    backup.passes(4)
    backup.copy()
    lose_nodes(backup, ["spot-0"], 12)
    backup.restore()
    plain = backup.cloud.observe
    backup.cloud.observe = lambda: [fact for fact in plain() if fact.name not in ("demo-spot-0-g1",)]
    backup.passes(3)
    backup.cloud.observe = plain
    backup.passes(3)
    node = backup.records()["demo-spot-0-g1"]
    assert node.happened["up"] == backup.cloud.up[node.name] < node.requested_ms
    paid_ms = backup.clock.now_ms() - backup.cloud.up[node.name]
    assert backup.metered() >= interval_micro_usd(0, paid_ms, node.micro_usd_per_hour + TRAINER_RATE + SPOT_RATE)


def test_nodes_are_not_given_up_before_the_new_controller_has_listed_every_region(home):
    backup = Backup(home)
    backup.passes(20)
    plain = backup.cloud.observe
    backup.controller = backup.a_controller()
    backup.cloud.observe = list
    backup.passes(3)
    assert all(record.is_live for record in backup.records().values())
    backup.cloud.observe = plain
    backup.passes(2)
    assert backup.metered() == backup.cloud.true_micro_usd()


def test_a_time_of_a_far_wrong_clock_is_still_limited(home):
    backup = Backup(home)
    plain = backup.cloud._up_ms

    def mad(name):
        up_ms = plain(name)
        return None if up_ms is None else up_ms - 1000 * 60 * MINUTE

    backup.cloud._up_ms = mad
    backup.passes(4)
    ups = [record.happened["up"] for record in backup.records().values() if "up" in record.happened]
    assert len(ups) == 3
    assert min(ups) >= backup.run.created_ms
    assert backup.metered() < 200_000


def test_an_instance_of_another_name_is_released_and_not_written_into_the_ledger(home):
    backup = Backup(home)
    backup.passes(4)
    at_ms = backup.clock.now_ms()
    backup.cloud.requested["demo-spot-9-g0"] = (*backup.cloud.requested["demo-spot-0-g0"][:2], at_ms)
    backup.passes(1)
    assert "demo-spot-9-g0" in backup.cloud.released
    assert "demo-spot-9-g0" not in backup.records()


def test_instances_of_lost_folders_are_reported_with_their_times_while_the_cloud_lists_them(tmp_path):
    stage = ProvisionerStage(tmp_path)
    stage.cloud.start("run-rollout-0-g1", placement())
    stage.time.ms += 600_000
    stage.cloud.take_back("run-rollout-0-g1")
    stage.cloud.start("run-rollout-0-g2", placement())
    facts = stage.passes(2)
    ended, running = facts["run-rollout-0-g1"], facts["run-rollout-0-g2"]
    assert (ended.status, ended.reclaimed, ended.ended_ms - ended.started_ms) == (NodeStatus.GONE, True, 600_000)
    assert (running.status, running.started_ms) == (NodeStatus.PENDING, stage.cloud.there[1].launched_ms)
    assert running.want is None


def test_a_node_whose_folder_has_its_order_says_so(tmp_path):
    stage = ProvisionerStage(tmp_path)
    stage.bring_up("run-rollout-0-g1")
    stage.process()
    assert stage.passes(1)["run-rollout-0-g1"].want == placement()
    stage.provisioner.release(["run-rollout-0-g1"])
    assert stage.passes(5)["run-rollout-0-g1"].want == placement()
