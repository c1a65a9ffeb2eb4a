"""The spend deadline of a node on the boot clock: it holds over clock jumps, restarts, crashes and SIGSTOP."""

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

from engine.node.alone import LAST_ANSWER, LAST_CONTACT, start_ticks
from engine.node.spend_guard import KEEP_MS, LATE_MS, Guard, Moment, TimeLeft, guard
from engine.storage.metadata import GCE_HOST
from tests.engine.fake_metadata import FakeCompute, FakeGceMetadata

START = Moment(boot_id="first", boot_ms=1_000_000, wall_ms=1_700_000_000_000)


class NodeFolder:
    """A node folder, and clocks that the test moves."""

    def __init__(self, folder):
        self.folder, self.at = folder, START

    def time_left(self):
        return TimeLeft(self.folder, now=lambda: self.at)

    def pass_ms(self, ms, *, wall_ms=None):
        self.at = replace(self.at, boot_ms=self.at.boot_ms + ms, wall_ms=self.at.wall_ms + (wall_ms or ms))

    def reboot(self, *, off_ms):
        self.at = Moment(boot_id=self.at.boot_id + "+", boot_ms=5_000, wall_ms=self.at.wall_ms + off_ms)

    def node(self, left_ms, **more):
        (self.folder / "node.json").write_text(json.dumps({"money_left_ms": left_ms, "cloud": "gcp", **more}))

    def set_deadline(self, left_ms, number):
        (self.folder / "money.json").write_text(json.dumps({"left_ms": left_ms, "told": number}))


@pytest.fixture
def node_folder(tmp_path):
    (tmp_path / "logs").mkdir()
    return NodeFolder(tmp_path)


def test_a_node_without_a_limit_has_no_deadline(node_folder):
    assert node_folder.time_left().left_ms() is None
    node_folder.node(None)
    assert node_folder.time_left().left_ms() is None


def test_the_deadline_counts_from_the_first_order_to_the_node(node_folder):
    node_folder.node(60_000)
    time_left = node_folder.time_left()
    assert time_left.left_ms() == 60_000
    node_folder.pass_ms(61_000)
    assert time_left.left_ms() == -1_000


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
def test_a_clock_jump_does_not_move_the_deadline(node_folder, jump_ms):
    node_folder.node(60_000)
    time_left = node_folder.time_left()
    time_left.left_ms()
    node_folder.pass_ms(1_000, wall_ms=jump_ms)
    assert time_left.left_ms() == 59_000
    assert node_folder.time_left().left_ms() == 59_000  # the same holds for an agent that starts now


def test_no_order_extends_a_node_beyond_the_longest_affordable_life(node_folder):
    """A controller that forgot its spend sends every node a deadline hours ahead."""
    node_folder.node(60_000, money_longest_ms=100_000)
    time_left = node_folder.time_left()
    time_left.left_ms()
    node_folder.pass_ms(50_000)
    node_folder.set_deadline(3_600_000, number=1)
    assert time_left.left_ms() == 50_000
    node_folder.pass_ms(10_000)
    node_folder.node(3_600_000, money_longest_ms=3_600_000)  # a new node.json, as for an agent that replaces this one
    node_folder.set_deadline(3_600_000, number=2)
    assert time_left.left_ms() == 40_000
    assert node_folder.time_left().left_ms() == 40_000  # the same holds for an agent that starts now
    node_folder.set_deadline(10_000, number=3)
    assert time_left.left_ms() == 10_000
    node_folder.reboot(off_ms=60_000)
    assert node_folder.time_left().left_ms() == -50_000


def test_restarting_the_agent_does_not_extend_the_deadline(node_folder):
    node_folder.node(60_000)
    node_folder.time_left().left_ms()
    node_folder.pass_ms(50_000)
    assert node_folder.time_left().left_ms() == 10_000


def test_a_new_node_json_restarts_the_deadline(node_folder):
    node_folder.node(60_000)
    node_folder.time_left().left_ms()
    node_folder.pass_ms(50_000)
    node_folder.node(40_000, coordinator_host="10.0.0.9")
    assert node_folder.time_left().left_ms() == 40_000


def test_the_controller_may_move_the_deadline_and_each_order_counts_once(node_folder):
    node_folder.node(60_000)
    time_left = node_folder.time_left()
    time_left.left_ms()
    node_folder.pass_ms(10_000)
    node_folder.set_deadline(90_000, number=1)
    assert time_left.left_ms() == 90_000
    node_folder.pass_ms(10_000)
    assert time_left.left_ms() == 80_000
    assert node_folder.time_left().left_ms() == 80_000
    node_folder.set_deadline(1_000, number=2)
    assert time_left.left_ms() == 1_000


def test_the_guard_and_the_agent_compute_the_same_deadline(node_folder):
    node_folder.node(60_000)
    agent, guard = node_folder.time_left(), node_folder.time_left()
    assert agent.left_ms() == 60_000
    node_folder.pass_ms(700)
    assert guard.left_ms() == 59_300
    node_folder.set_deadline(90_000, number=1)
    assert agent.left_ms() == 90_000
    node_folder.pass_ms(700)
    assert agent.left_ms() == 89_300


def test_a_reboot_counts_the_time_that_the_instance_was_off(node_folder):
    node_folder.node(600_000)
    time_left = node_folder.time_left()
    time_left.left_ms()
    node_folder.pass_ms(KEEP_MS)
    time_left.left_ms()
    node_folder.reboot(off_ms=100_000)
    again = node_folder.time_left()
    assert again.left_ms() == 600_000 - KEEP_MS - 100_000
    node_folder.pass_ms(1_000, wall_ms=-500_000)  # from here on the clock of the new boot counts
    assert again.left_ms() == 600_000 - KEEP_MS - 101_000


def test_a_reboot_with_a_clock_set_back_counts_at_least_this_boot(node_folder):
    node_folder.node(600_000)
    node_folder.time_left().left_ms()
    node_folder.reboot(off_ms=-10_000_000)
    assert node_folder.time_left().left_ms() == 595_000


def test_truncated_orders_are_ignored(node_folder):
    node_folder.node(60_000)
    node_folder.time_left().left_ms()
    (node_folder.folder / "money.json").write_text('{"left_ms": 1')
    (node_folder.folder / "node.json").write_text('{"money_left')
    assert node_folder.time_left().left_ms() == 60_000


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
def guarded(node_folder, google):
    """Start an agent that only keeps its guard alive."""
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(node_folder.folder)])
    yield agent
    agent.kill()
    agent.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard_of(node_folder), signal.SIGKILL)


def guard_of(node_folder):
    wait_for(lambda: (node_folder.folder / "guard.json").exists())
    return json.loads((node_folder.folder / "guard.json").read_text())["pid"]


def wait_for(what, seconds=240.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_instance_with_a_dead_or_frozen_agent_still_terminates(node_folder, guarded, google, how):
    node_folder.node(3_600_000)
    guard_of(node_folder)
    guarded.send_signal(how)
    time.sleep(0.3)
    assert google.deleted == []
    node_folder.set_deadline(-LATE_MS, number=1)
    wait_for(lambda: google.deleted)
    assert google.deleted == ["/compute/v1/projects/a-project/zones/us-central1-a/instances/a-machine"]
    wait_for(lambda: "Compute Engine deletes a-machine" in (node_folder.folder / "logs/agent.log").read_text())


def test_the_guard_gives_the_agent_time_to_terminate_the_node(node_folder, guarded, google):
    node_folder.node(0)
    guard_of(node_folder)
    time.sleep(1.5)
    assert google.deleted == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_frozen_guard_is_replaced_and_a_second_guard_exits(node_folder, guarded, how):
    node_folder.node(3_600_000)
    first = guard_of(node_folder)
    second = Guard(node_folder.folder)
    second.keep_alive()
    assert second._process.wait(240) == 0
    os.kill(first, how)
    wait_for(lambda: guard_of(node_folder) != first)


def test_the_guard_exits_when_its_folder_is_gone(node_folder, guarded):
    node_folder.node(3_600_000)
    pid = guard_of(node_folder)
    guarded.kill()
    guarded.wait()
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE, "the guard outlives its agent"
    node_folder.folder.rename(node_folder.folder.with_name("moved"))
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    node_folder.folder.with_name("moved").rename(node_folder.folder)


class Guarded:
    """A guard in this process: sleeping moves the clocks, and the folder disappears after `hours`."""

    def __init__(self, node_folder, hours=1.0):
        self.node_folder, self.until_ms = node_folder, START.boot_ms + hours * 3_600_000
        self.controller_until_ms = self.coordinator_until_ms = -1
        self.did = []

    def run(self):
        guard(self.node_folder.folder, now=lambda: self.node_folder.at, end=self.end, copy=self.copy, sleep=self.sleep)
        return self.did

    def minutes(self):
        return round((self.node_folder.at.boot_ms - START.boot_ms) / 60_000, 1)

    def end(self, cloud, say):
        self.did.append((self.minutes(), f"end {cloud}"))

    def copy(self, folder, say):
        self.did.append((self.minutes(), "copy"))
        return True

    def sleep(self, seconds):
        self.node_folder.pass_ms(round(seconds * 1000))
        untils_ms = {LAST_CONTACT: self.controller_until_ms, LAST_ANSWER: self.coordinator_until_ms}
        for name, until_ms in untils_ms.items():
            if self.node_folder.at.boot_ms <= until_ms:
                (self.node_folder.folder / name).touch()
                os.utime(self.node_folder.folder / name, ns=(0, self.node_folder.at.boot_ms))
        if self.node_folder.at.boot_ms > self.until_ms and self.node_folder.folder.exists():
            self.node_folder.folder.rename(f"{self.node_folder.folder}-over")


def agent_is(node_folder, pid, **more):
    ticks = start_ticks(pid)
    (node_folder.folder / "agent.json").write_text(json.dumps({"pid": pid, "ticks": ticks, "boot_id": "first", **more}))


def test_the_guard_repeats_the_termination_while_the_instance_exists(node_folder):
    node_folder.node(0)
    ends = [at for at, what in Guarded(node_folder, hours=0.1).run() if what == "end gcp"]
    assert len(ends) >= 5
    assert max(b - a for a, b in itertools.pairwise(ends)) < 1.2


def test_a_finished_node_without_a_controller_copies_its_logs_and_ends_after_ten_minutes(node_folder):
    node_folder.node(100 * 3_600_000)
    agent_is(node_folder, os.getpid(), ticks=1)  # another process has the agent's pid by now
    did = Guarded(node_folder, hours=0.25).run()
    assert did[:2] == [(10.0, "copy"), (10.0, "end gcp")]
    assert {what for _, what in did[2:]} == {"end gcp"}  # the logs are copied once


def test_a_node_stays_while_its_controller_calls(node_folder):
    node_folder.node(100 * 3_600_000)
    (node_folder.folder / LAST_CONTACT).touch()
    guarded = Guarded(node_folder, hours=3.0)
    guarded.controller_until_ms = START.boot_ms + 2 * 3_600_000
    assert guarded.run()[:2] == [(130.0, "copy"), (130.0, "end gcp")]


def test_a_node_stays_without_a_controller_while_its_agent_works(node_folder):
    node_folder.node(100 * 3_600_000)
    agent_is(node_folder, os.getpid())
    guarded = Guarded(node_folder, hours=3.0)
    guarded.coordinator_until_ms = START.boot_ms + 3 * 3_600_000
    assert guarded.run() == []


@pytest.mark.parametrize(("controller", "coordinator", "ends"), [(-1, 1, 70.0), (1, -1, 70.0), (1, 2, 130.0)])
def test_a_node_without_controller_and_coordinator_ends_after_ten_minutes(node_folder, controller, coordinator, ends):
    """`controller`, `coordinator`: hours until each is silent; both have to be."""
    node_folder.node(100 * 3_600_000)
    agent_is(node_folder, os.getpid())
    guarded = Guarded(node_folder, hours=3.0)
    guarded.controller_until_ms = START.boot_ms + controller * 3_600_000
    guarded.coordinator_until_ms = START.boot_ms + coordinator * 3_600_000
    assert guarded.run()[:2] == [(ends, "copy"), (ends, "end gcp")]


@pytest.mark.parametrize("jump_ms", [-36_000_000, 36_000_000])
def test_a_wall_clock_jump_does_not_change_when_a_node_terminates(node_folder, jump_ms):
    node_folder.node(100 * 3_600_000)
    node_folder.pass_ms(1, wall_ms=jump_ms)
    assert Guarded(node_folder, hours=0.2).run()[0] == (10.0, "copy")


def test_an_agent_of_an_earlier_boot_does_not_count_as_working(node_folder):
    node_folder.node(100 * 3_600_000)
    agent_is(node_folder, os.getpid(), boot_id="an earlier boot")
    assert Guarded(node_folder, hours=0.2).run()[0] == (10.0, "copy")


def test_the_guard_is_small_and_in_a_session_of_its_own(node_folder, guarded):
    node_folder.node(3_600_000)
    pid = guard_of(node_folder)
    assert os.getsid(pid) == pid
    code = "import sys, engine.node.spend_guard; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
    ).stdout.split()
    assert not {"torch", "ray", "httpx", "pydantic", "psutil"} & set(loaded)
