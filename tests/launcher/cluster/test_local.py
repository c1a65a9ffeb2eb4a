"""The local provisioner: real processes, and a clock that the test moves."""

import contextlib
import errno
import getpass
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.events import Market
from engine.mark import EXITS, MARK, read_exits
from engine.work_clock import LEAD_SECONDS, ProcessMeter, WorkClock
from launcher.decide.node_facts import NodeStatus
from launcher.provision.local import node_end, processes
from launcher.provision.local.local_nodes import LocalNodes
from launcher.provision.local.node_records import NodeRecords
from launcher.provision.local.preempting import SILENCE_MS
from launcher.provision.local.preemptions import PreemptionSchedule
from launcher.provision.local.processes import is_alive, is_stopped, processes_of
from launcher.provision.local.provisioner import LocalProvisioner, node_folder
from tests.launcher.cluster.stage import FAKE_AGENT, HandClock, dead_pid, fact_of, placement, rule, spec, wait_until

NODE = "demo-spot-0-g0"
HOUR_MS = 3_600_000


def provisioner_of(tmp_path: Path, clock: HandClock, schedule: PreemptionSchedule | None = None) -> LocalProvisioner:
    return LocalProvisioner(tmp_path, clock, schedule, FAKE_AGENT, lambda: clock.at_ms)


def started(tmp_path: Path, clock: HandClock, schedule: PreemptionSchedule | None = None) -> LocalProvisioner:
    """Return a provisioner with one node that is up: an agent and its child."""
    provisioner = provisioner_of(tmp_path, clock, schedule)
    provisioner.request(placement(), spec(tmp_path, clock))
    wait_until(lambda: status_of(provisioner) is NodeStatus.UP)
    wait_until(lambda: len(processes_of(node_folder(tmp_path, NODE))) == 2)
    return provisioner


def status_of(provisioner: LocalProvisioner) -> NodeStatus | None:
    fact = fact_of(provisioner, NODE)
    return fact.status if fact else None


def agent_pid(tmp_path: Path) -> int:
    return int(json.loads((node_folder(tmp_path, NODE) / "agent.json").read_text())["pid"])


def test_a_local_node_is_a_session_and_is_billed_from_its_request(tmp_path):
    clock = HandClock()
    provisioner = started(tmp_path, clock)
    assert os.getsid(agent_pid(tmp_path)) == agent_pid(tmp_path)
    fact = fact_of(provisioner, NODE)
    assert fact is not None
    assert (fact.started_ms, fact.ended_ms) == (clock.at_ms, None)


def test_requesting_the_same_name_twice_gives_one_node(tmp_path):
    clock = HandClock()
    provisioner = started(tmp_path, clock)
    before = processes_of(node_folder(tmp_path, NODE))
    provisioner.request(placement(), spec(tmp_path, clock))
    provisioner_of(tmp_path, clock).request(placement(), spec(tmp_path, clock))
    assert processes_of(node_folder(tmp_path, NODE)) == before


def test_a_second_agent_finds_the_lock_held_and_exits(tmp_path):
    clock = HandClock()
    provisioner = started(tmp_path, clock)
    pid = agent_pid(tmp_path)
    provisioner._spawn(NodeRecords(node_folder(tmp_path, NODE), clock))  # like a crash between the start and its record
    wait_until(lambda: list(read_exits(node_folder(tmp_path, NODE)).values()) == [0])
    assert status_of(provisioner) is NodeStatus.UP
    assert agent_pid(tmp_path) == pid


def test_an_interrupted_request_is_completed_by_repeating_it(tmp_path):
    clock = HandClock()
    folder = node_folder(tmp_path, NODE)
    folder.mkdir(parents=True)
    (folder / "node.json").write_text(spec(tmp_path, clock).model_dump_json())
    provisioner = provisioner_of(tmp_path, clock)
    assert fact_of(provisioner, NODE) is None
    provisioner.request(placement(), spec(tmp_path, clock))
    wait_until(lambda: status_of(provisioner) is NodeStatus.UP)


def test_files_with_the_token_are_readable_only_by_the_owner(tmp_path):
    started(tmp_path, HandClock())
    assert (node_folder(tmp_path, NODE) / "node.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "SIGSTOP"])
def test_release_ends_every_process_and_may_be_repeated(tmp_path, frozen):
    clock = HandClock()
    provisioner = started(tmp_path, clock)
    pids = processes_of(node_folder(tmp_path, NODE))
    if frozen:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    provisioner.release([NODE])
    provisioner.release([NODE])
    assert processes_of(node_folder(tmp_path, NODE)) == []
    assert not any(is_alive(pid, None) for pid in pids)
    fact = fact_of(provisioner, NODE)
    assert fact is not None
    assert (fact.status, fact.evidence, fact.ended_ms) == (NodeStatus.GONE, "released", clock.at_ms)


def test_a_full_disk_does_not_prevent_a_release(tmp_path, monkeypatch):
    provisioner = started(tmp_path, HandClock())

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    monkeypatch.setattr("launcher.provision.local.node_records.write_durably", full)
    with pytest.raises(OSError, match="No space left"):
        provisioner.release([NODE])  # the controller repeats the request
    assert processes_of(node_folder(tmp_path, NODE)) == []


def test_release_reaches_a_process_that_left_the_session(tmp_path):
    clock = HandClock()
    provisioner = started(tmp_path, clock)
    folder = node_folder(tmp_path, NODE)
    stray = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"],
        start_new_session=True,
        env={**os.environ, MARK: str(folder)},
    )
    provisioner.release([NODE])
    assert stray.wait(timeout=240) == -signal.SIGKILL


def test_a_node_released_before_its_request_is_never_started(tmp_path):
    clock = HandClock()
    provisioner = provisioner_of(tmp_path, clock)
    provisioner.release([NODE])
    provisioner.request(placement(), spec(tmp_path, clock))
    fact = fact_of(provisioner, NODE)
    assert fact is not None
    assert (fact.status, fact.started_ms) == (NodeStatus.GONE, None)
    assert processes_of(node_folder(tmp_path, NODE)) == []


def test_an_agent_killed_alone_takes_its_children_with_it(tmp_path):
    clock = HandClock()
    provisioner = started(tmp_path, clock)
    os.kill(agent_pid(tmp_path), signal.SIGKILL)
    wait_until(lambda: status_of(provisioner) is NodeStatus.GONE)
    fact = fact_of(provisioner, NODE)
    assert fact is not None
    assert "SIGKILL" in fact.evidence
    assert not fact.reclaimed
    assert processes_of(node_folder(tmp_path, NODE)) == []


def test_an_exit_code_is_found_that_is_written_while_the_agent_is_looked_for(tmp_path, monkeypatch):
    """The starter writes the code and reaps the process between two looks of the provisioner."""
    folder, pid = tmp_path / "node", dead_pid()
    folder.mkdir()

    def reaped_meanwhile(_: int) -> bool:
        (folder / EXITS).write_text(json.dumps({"pid": pid, "code": -signal.SIGKILL}) + "\n")
        return False

    monkeypatch.setattr(processes, "is_zombie", reaped_meanwhile)
    assert node_end._exit_evidence(NodeRecords(folder, HandClock()), pid) == "its agent was killed by SIGKILL"


def test_a_frozen_node_is_lost_after_a_while(tmp_path):
    clock = HandClock(factor=1.0)
    provisioner = started(tmp_path, clock)
    for pid in processes_of(node_folder(tmp_path, NODE)):
        os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(agent_pid(tmp_path)))
    assert status_of(provisioner) is NodeStatus.UP
    clock.pass_ms(4_000)
    assert status_of(provisioner) is NodeStatus.UP
    clock.pass_ms(2_000)
    assert status_of(provisioner) is NodeStatus.GONE
    assert processes_of(node_folder(tmp_path, NODE)) == []


def test_an_agent_that_fails_at_its_start_gives_evidence(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_TROUBLE", "crash")
    clock = HandClock()
    provisioner = provisioner_of(tmp_path, clock)
    provisioner.request(placement(), spec(tmp_path, clock))
    wait_until(lambda: status_of(provisioner) is NodeStatus.GONE)
    fact = fact_of(provisioner, NODE)
    assert fact is not None
    assert fact.evidence == "its agent exited with code 1 before it was an agent"
    assert fact.started_ms is None
    assert "no such model" in (node_folder(tmp_path, NODE) / "logs" / "agent.log").read_text()


def test_an_agent_that_dies_during_a_poll_still_has_its_exit_signal(tmp_path, monkeypatch):
    clock = HandClock()
    provisioner = started(tmp_path, clock)
    look = processes.is_recorded_alive

    def die_then_look(record):
        """Let the agent die at the worst moment: just before the provisioner looks for its process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(record["pid"], signal.SIGKILL)
        wait_until(lambda: not look(record))
        return look(record)

    monkeypatch.setattr(processes, "is_recorded_alive", die_then_look)
    fact = fact_of(provisioner, NODE)
    assert fact is not None
    assert (fact.status, fact.evidence) == (NodeStatus.GONE, "its agent was killed by SIGKILL")


def test_the_exit_code_of_a_second_agent_is_not_taken_for_the_firsts(tmp_path):
    clock = HandClock()
    provisioner = started(tmp_path, clock)
    provisioner._spawn(NodeRecords(node_folder(tmp_path, NODE), clock))
    wait_until(lambda: list(read_exits(node_folder(tmp_path, NODE)).values()) == [0])
    os.kill(agent_pid(tmp_path), signal.SIGKILL)
    wait_until(lambda: status_of(provisioner) is NodeStatus.GONE)
    fact = fact_of(provisioner, NODE)
    assert fact is not None
    assert fact.evidence == "its agent was killed by SIGKILL"


def test_a_node_whose_workers_never_call_is_lost_after_a_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_TROUBLE", "deaf")
    clock = HandClock(factor=1.0)
    provisioner = provisioner_of(tmp_path, clock)
    provisioner.request(placement(), spec(tmp_path, clock))
    wait_until(lambda: (node_folder(tmp_path, NODE) / "agent.json").exists())
    assert status_of(provisioner) is NodeStatus.PENDING
    clock.pass_ms(601_000)
    assert status_of(provisioner) is NodeStatus.GONE
    assert processes_of(node_folder(tmp_path, NODE)) == []


@pytest.mark.parametrize("manner", range(4))
def test_the_local_cloud_preempts_a_node_as_scheduled(tmp_path, manner):
    """Manners: notice + SIGKILL, SIGSTOP, SIGKILL, notice + SIGSTOP; each by a new provisioner."""
    clock = HandClock()
    rules = rule(1_800_000, first=manner)
    fate = rules.preemption(0).manner
    started(tmp_path, clock, rules)
    fresh = lambda: provisioner_of(tmp_path, clock, rules)  # noqa: E731
    born = clock.at_ms
    clock.pass_ms(1_800_000 - 120_000 - 1)
    fact = fact_of(fresh(), NODE)
    assert fact is not None
    assert (fact.status, fact.notice_deadline_ms) == (NodeStatus.UP, None)
    clock.pass_ms(1)
    fact = fact_of(fresh(), NODE)
    assert fact is not None
    assert fact.notice_deadline_ms == (born + 1_800_000 if fate.with_notice else None)
    assert (node_folder(tmp_path, NODE) / "notice.json").exists() == fate.with_notice
    clock.pass_ms(120_000)
    fact = fact_of(fresh(), NODE)
    assert fact is not None
    if fate.signal == "SIGSTOP":
        assert fact.status is NodeStatus.UP  # the cloud has not reported it yet
        wait_until(lambda: all(is_stopped(pid) for pid in processes_of(node_folder(tmp_path, NODE))))
        clock.pass_ms(SILENCE_MS)
        fact = fact_of(fresh(), NODE)
        assert fact is not None
    assert fact.status is NodeStatus.GONE
    assert (fact.reclaimed, fact.signal, fact.with_notice) == (True, fate.signal, fate.with_notice)
    assert fact.ended_ms == born + 1_800_000
    assert processes_of(node_folder(tmp_path, NODE)) == []


def test_a_delayed_preemption_still_gives_the_whole_notice(tmp_path):
    clock = HandClock()
    rules = rule(1_800_000, first=0)
    provisioner = started(tmp_path, clock, rules)
    clock.pass_ms(HOUR_MS)
    fact = fact_of(provisioner, NODE)
    assert fact is not None
    assert (fact.status, fact.notice_deadline_ms) == (NodeStatus.UP, clock.at_ms + 120_000)


def test_an_interrupted_preemption_is_completed(tmp_path):
    clock = HandClock()
    rules = rule(1_800_000, first=2)
    started(tmp_path, clock, rules)
    born = clock.at_ms
    clock.pass_ms(1_800_000)
    folder = node_folder(tmp_path, NODE)
    (folder / "reclaim.json").write_text(f'{{"at_ms": {clock.at_ms}}}')  # like a crash before the kill
    clock.pass_ms(1000)
    fact = fact_of(provisioner_of(tmp_path, clock, rules), NODE)
    assert fact is not None
    assert (fact.status, fact.reclaimed, fact.ended_ms) == (NodeStatus.GONE, True, born + 1_800_000)


def test_only_spot_nodes_are_preempted_each_at_its_own_time(tmp_path):
    clock = HandClock()
    provisioner = provisioner_of(tmp_path, clock, rule(1000, 2000))
    ordinals = []
    for name, market in [("a", Market.SPOT), ("t", Market.ON_DEMAND), ("b", Market.SPOT)]:
        provisioner.request(placement(market), spec(tmp_path, clock, name))
        ordinals.append(provisioner._ordinal(Market.SPOT))
        provisioner.request(placement(market), spec(tmp_path, clock, name))
    assert ordinals == [1, 1, 2]


def test_an_agent_found_dead_is_not_billed_past_its_spend_deadline(tmp_path):
    clock = HandClock()
    provisioner = started(tmp_path, clock)
    provisioner.rearm(NODE, clock.at_ms + 5000)
    os.kill(agent_pid(tmp_path), signal.SIGKILL)
    wait_until(lambda: not is_alive(agent_pid(tmp_path), None))
    clock.pass_ms(HOUR_MS)
    fact = fact_of(provisioner, NODE)
    assert fact is not None
    assert fact.ended_ms == clock.at_ms - HOUR_MS + 5000


def test_a_user_without_a_name_can_clean_up(tmp_path, monkeypatch):
    """In a container with another user's number there is no such name, and `spotrl panic` must still end all nodes."""

    def nameless():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert LocalNodes(tmp_path).caller().owner == str(os.getuid())


def test_the_run_waits_for_a_node_that_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.provision.local.provisioner.START_SECONDS", 0.5)
    monkeypatch.setenv("FAKE_TROUBLE", "deaf")
    clock = WorkClock(path=tmp_path / "clock", origin_ms=1_000_000, factor=60.0)
    clock.begin(0)
    provisioner = LocalProvisioner(tmp_path, clock, None, FAKE_AGENT)
    provisioner.request(placement(), spec(tmp_path, HandClock()))
    provisioner.observe()
    began_ms, meter = clock.now_ms(), ProcessMeter(clock)
    meter.done(0.5 + 0.9 * LEAD_SECONDS)
    provisioner.observe()
    meter.keep_pace()
    meter.done(0.5)
    waiting = threading.Thread(target=meter.keep_pace)
    waiting.start()
    for _ in range(20):
        provisioner.observe()
        waiting.join(0.02)
    assert waiting.is_alive()
    assert clock.now_ms() == began_ms + round((1.0 + 0.9 * LEAD_SECONDS) * 60_000), "a start is no work"
    (node_folder(tmp_path, NODE) / "ready.json").write_text('{"at_ms": 1060000}')
    wait_until(lambda: status_of(provisioner) is NodeStatus.UP)
    waiting.join(10.0)
    assert not waiting.is_alive()
