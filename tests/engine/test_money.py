"""The money deadline on the machine's boot clock: no clock jump, restart, crash or SIGSTOP gets round it."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from engine.node.alone import LAST_CONTACT, start_ticks
from engine.node.spend_guard import KEEP_MS, LATE_MS, Guard, Moment, TimeLeft, guard
from engine.storage.metadata import GCE_HOST
from tests.engine.metadata_faces import FakeCompute, FakeGceMetadata

START = Moment(boot_id="first", boot_ms=1_000_000, wall_ms=1_700_000_000_000)


class Machine:
    """A folder, and clocks that are moved by hand."""

    def __init__(self, folder):
        self.folder, self.at = folder, START

    def money(self):
        return TimeLeft(self.folder, now=lambda: self.at)

    def pass_ms(self, ms, *, wall_ms=None):
        self.at = replace(self.at, boot_ms=self.at.boot_ms + ms, wall_ms=self.at.wall_ms + (wall_ms or ms))

    def reboot(self, *, off_ms):
        self.at = Moment(boot_id=self.at.boot_id + "+", boot_ms=5_000, wall_ms=self.at.wall_ms + off_ms)

    def node(self, left_ms, **more):
        (self.folder / "node.json").write_text(json.dumps({"money_left_ms": left_ms, "cloud": "gcp", **more}))

    def told(self, left_ms, told):
        (self.folder / "money.json").write_text(json.dumps({"left_ms": left_ms, "told": told}))


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "logs").mkdir()
    return Machine(tmp_path)


def test_a_node_without_a_limit_has_no_deadline(machine):
    assert machine.money().left_ms() is None
    machine.node(None)
    assert machine.money().left_ms() is None


def test_it_counts_from_when_the_node_was_first_told(machine):
    machine.node(60_000)
    money = machine.money()
    assert money.left_ms() == 60_000
    machine.pass_ms(61_000)
    assert money.left_ms() == -1_000


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
def test_a_clock_jump_moves_nothing(machine, jump_ms):
    machine.node(60_000)
    money = machine.money()
    money.left_ms()
    machine.pass_ms(1_000, wall_ms=jump_ms)
    assert money.left_ms() == 59_000
    assert machine.money().left_ms() == 59_000  # nor for an agent that starts now


def test_no_order_lets_a_node_live_longer_than_the_money_would_last_for_it_alone(machine):
    """A controller that forgot what was spent tells every node that its money lasts for hours more."""
    machine.node(60_000, money_longest_ms=100_000)
    money = machine.money()
    money.left_ms()
    machine.pass_ms(50_000)
    machine.told(3_600_000, told=1)
    assert money.left_ms() == 50_000
    machine.pass_ms(10_000)
    machine.node(3_600_000, money_longest_ms=3_600_000)  # told anew, as to an agent that replaces this one
    machine.told(3_600_000, told=2)
    assert money.left_ms() == 40_000
    assert machine.money().left_ms() == 40_000  # nor for an agent that starts now
    machine.told(10_000, told=3)
    assert money.left_ms() == 10_000
    machine.reboot(off_ms=60_000)
    assert machine.money().left_ms() == -50_000


def test_an_agent_that_starts_again_does_not_extend_it(machine):
    machine.node(60_000)
    machine.money().left_ms()
    machine.pass_ms(50_000)
    assert machine.money().left_ms() == 10_000


def test_a_new_node_json_counts_anew(machine):
    machine.node(60_000)
    machine.money().left_ms()
    machine.pass_ms(50_000)
    machine.node(40_000, coordinator_host="10.0.0.9")
    assert machine.money().left_ms() == 40_000


def test_its_controller_may_extend_and_shorten_it_each_order_once(machine):
    machine.node(60_000)
    money = machine.money()
    money.left_ms()
    machine.pass_ms(10_000)
    machine.told(90_000, told=1)
    assert money.left_ms() == 90_000
    machine.pass_ms(10_000)
    assert money.left_ms() == 80_000
    assert machine.money().left_ms() == 80_000
    machine.told(1_000, told=2)
    assert money.left_ms() == 1_000


def test_the_guard_and_the_agent_agree(machine):
    machine.node(60_000)
    agent, guard = machine.money(), machine.money()
    assert agent.left_ms() == 60_000
    machine.pass_ms(700)
    assert guard.left_ms() == 59_300
    machine.told(90_000, told=1)
    assert agent.left_ms() == 90_000
    machine.pass_ms(700)
    assert agent.left_ms() == 89_300


def test_a_reboot_counts_the_time_that_the_machine_was_off(machine):
    machine.node(600_000)
    money = machine.money()
    money.left_ms()
    machine.pass_ms(KEEP_MS)
    money.left_ms()
    machine.reboot(off_ms=100_000)
    again = machine.money()
    assert again.left_ms() == 600_000 - KEEP_MS - 100_000
    machine.pass_ms(1_000, wall_ms=-500_000)  # and from here on its new boot's clock rules again
    assert again.left_ms() == 600_000 - KEEP_MS - 101_000


def test_a_reboot_with_a_clock_set_back_counts_at_least_this_boot(machine):
    machine.node(600_000)
    machine.money().left_ms()
    machine.reboot(off_ms=-10_000_000)
    assert machine.money().left_ms() == 595_000


def test_half_written_orders_change_nothing(machine):
    machine.node(60_000)
    machine.money().left_ms()
    (machine.folder / "money.json").write_text('{"left_ms": 1')
    (machine.folder / "node.json").write_text('{"money_left')
    assert machine.money().left_ms() == 60_000


# --- the guard ------------------------------------------------------------------------------------------


@pytest.fixture
def google(monkeypatch):
    metadata, compute = FakeGceMetadata(), FakeCompute()
    metadata.is_instance("a-machine")
    monkeypatch.setenv(GCE_HOST, metadata.address)
    monkeypatch.setenv("SPOTRL_GCP_COMPUTE_ENDPOINT", compute.url)
    monkeypatch.setenv("SPOTRL_SHUTDOWN", "true")
    yield compute
    metadata.close()
    compute.close()


AGENT = """
import sys, time
from pathlib import Path
from engine.node.spend_guard import Guard
guard = Guard(Path(sys.argv[1]))
while True:
    guard.keep_alive()
    time.sleep(0.1)
"""


@pytest.fixture
def guarded(machine, google):
    """An agent that does nothing but keep its guard."""
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(machine.folder)])
    yield agent
    agent.kill()
    agent.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard_of(machine), signal.SIGKILL)


def guard_of(machine):
    wait_for(lambda: (machine.folder / "guard.json").exists())
    return json.loads((machine.folder / "guard.json").read_text())["pid"]


def wait_for(what, seconds=15.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_whose_agent_is_dead_or_frozen_ends_all_the_same(machine, guarded, google, how):
    machine.node(3_600_000)
    guard_of(machine)
    guarded.send_signal(how)
    time.sleep(0.3)
    assert google.deleted == []
    machine.told(-LATE_MS, told=1)
    wait_for(lambda: google.deleted)
    assert google.deleted == ["/compute/v1/projects/a-project/zones/us-central1-a/instances/a-machine"]
    wait_for(lambda: "Compute Engine deletes a-machine" in (machine.folder / "logs/agent.log").read_text())


def test_the_guard_leaves_the_end_to_the_agent_for_a_while(machine, guarded, google):
    machine.node(0)
    guard_of(machine)
    time.sleep(1.5)
    assert google.deleted == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_guard_is_replaced_and_a_second_one_goes(machine, guarded, how):
    machine.node(3_600_000)
    first = guard_of(machine)
    second = Guard(machine.folder)
    second.keep_alive()
    assert second._process.wait(10) == 0
    os.kill(first, how)
    wait_for(lambda: guard_of(machine) != first)


def test_the_guard_goes_with_its_folder(machine, guarded):
    machine.node(3_600_000)
    pid = guard_of(machine)
    guarded.kill()
    guarded.wait()
    machine.folder.rename(machine.folder.with_name("moved"))
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    machine.folder.with_name("moved").rename(machine.folder)


class Guarded:
    """A guard that runs by hand: sleeping moves the clocks, and the folder goes away after `hours` of it."""

    def __init__(self, machine, hours=1.0):
        self.machine, self.until_ms = machine, START.boot_ms + hours * 3_600_000
        self.heard_until_ms = -1
        self.did = []

    def run(self):
        guard(self.machine.folder, now=lambda: self.machine.at, end=self.end, copy=self.copy, sleep=self.sleep)
        return self.did

    def minutes(self):
        return round((self.machine.at.boot_ms - START.boot_ms) / 60_000, 1)

    def end(self, cloud, say):
        self.did.append((self.minutes(), f"end {cloud}"))

    def copy(self, folder, say):
        self.did.append((self.minutes(), "copy"))
        return True

    def sleep(self, seconds):
        self.machine.pass_ms(round(seconds * 1000))
        if self.machine.at.boot_ms <= self.heard_until_ms:
            os.utime(self.machine.folder / LAST_CONTACT, ns=(0, self.machine.at.boot_ms))
        if self.machine.at.boot_ms > self.until_ms and self.machine.folder.exists():
            self.machine.folder.rename(f"{self.machine.folder}-over")


def agent_is(machine, pid, **more):
    ticks = start_ticks(pid)
    (machine.folder / "agent.json").write_text(json.dumps({"pid": pid, "ticks": ticks, "boot_id": "first", **more}))


def test_a_machine_that_is_still_there_is_ended_again_and_again(machine):
    machine.node(0)
    ends = [at for at, what in Guarded(machine, hours=0.1).run() if what == "end gcp"]
    assert len(ends) >= 5
    assert max(b - a for a, b in itertools.pairwise(ends)) < 1.2


def test_a_finished_node_without_a_controller_copies_its_logs_and_ends_after_ten_minutes(machine):
    machine.node(100 * 3_600_000)
    agent_is(machine, os.getpid(), ticks=1)  # another process has its number by now
    did = Guarded(machine, hours=0.25).run()
    assert did[:2] == [(10.0, "copy"), (10.0, "end gcp")]
    assert {what for _, what in did[2:]} == {"end gcp"}  # copied once


def test_a_node_whose_controller_is_heard_stays(machine):
    machine.node(100 * 3_600_000)
    (machine.folder / LAST_CONTACT).touch()
    guarded = Guarded(machine, hours=3.0)
    guarded.heard_until_ms = START.boot_ms + 2 * 3_600_000
    assert guarded.run()[:2] == [(130.0, "copy"), (130.0, "end gcp")]


def test_a_node_whose_agent_works_stays_without_a_controller(machine):
    machine.node(100 * 3_600_000)
    agent_is(machine, os.getpid())
    assert Guarded(machine, hours=3.0).run() == []


@pytest.mark.parametrize("jump_ms", [-36_000_000, 36_000_000])
def test_a_jump_of_the_wall_clock_neither_ends_a_node_nor_keeps_it(machine, jump_ms):
    machine.node(100 * 3_600_000)
    machine.pass_ms(1, wall_ms=jump_ms)
    assert Guarded(machine, hours=0.2).run()[0] == (10.0, "copy")


def test_an_agent_of_an_earlier_boot_does_not_count_as_one_that_works(machine):
    machine.node(100 * 3_600_000)
    agent_is(machine, os.getpid(), boot_id="an earlier boot")
    assert Guarded(machine, hours=0.2).run()[0] == (10.0, "copy")


def test_the_guard_is_small_and_outside_the_agents_session(machine, guarded):
    machine.node(3_600_000)
    pid = guard_of(machine)
    assert os.getsid(pid) == pid
    code = "import sys, engine.node.spend_guard; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
    ).stdout.split()
    assert not {"torch", "ray", "httpx", "pydantic", "psutil"} & set(loaded)
