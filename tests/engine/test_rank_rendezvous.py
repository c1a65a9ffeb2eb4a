"""Ranks of a trainer meet again after a loss, whatever the survivors are doing at that time."""

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig, RuntimeConfig
from engine.events import Market
from engine.node import rank_rendezvous, rank_watch
from engine.node.child import EXIT_TORN
from engine.node.rank_network import host_of_store, use_network
from engine.node.rank_rendezvous import forget_ranks, joined_group, leaves_torn_group, led_group
from engine.node.rank_watch import leave_when
from engine.node.trainer_nodes import meeting_file
from engine.node_spec import ClockConfig, NodeSpec
from engine.parallel.communicator import LOOPBACK, TornGroup
from engine.protocol.rank_meeting import NO_MEETING, RankMeeting, read_meeting, write_meeting
from engine.storage import disk

CPU = torch.device("cpu")
SECONDS = 20.0


@pytest.fixture
def left(monkeypatch):
    """Return the exit codes of processes that end themselves."""
    codes, came = [], threading.Event()
    monkeypatch.setattr(rank_watch, "leave", lambda code: (codes.append(code), came.set()))
    monkeypatch.setattr(rank_watch, "LOOK_SECONDS", 0.02)
    codes_in_time = lambda: codes if came.wait(SECONDS) else []  # noqa: E731
    return codes, codes_in_time


@pytest.fixture
def spec(tmp_path):
    return NodeSpec(
        run="run",
        node="trainer",
        role="trainer",
        market=Market.ON_DEMAND,
        workers=1,
        folder=str(tmp_path),
        store=f"file://{tmp_path}/store",
        coordinator_port=1,
        token="t",
        clock=ClockConfig(origin_ms=0),
        engine=EngineConfig(runtime=RuntimeConfig(trainer_ranks=2)),
    )


def test_a_rank_that_begins_again_waits_for_the_next_rank_0_and_ends_the_busy_one(spec, left):
    """Rank 0 is in the middle of a step, so only the new process of rank 1 can tell it of the loss."""
    codes, codes_in_time = left
    with ThreadPoolExecutor() as threads:
        first = threads.submit(joined_group, spec, 1, CPU)
        with led_group(spec, CPU):
            first.result(SECONDS)
            assert codes == []
            again = threads.submit(joined_group, spec, 1, CPU)
            assert EXIT_TORN in codes_in_time()
            assert not again.done(), "it meets no rank 0 that has met another process of this rank"
        forget_ranks(spec)
        with led_group(spec, CPU) as second:
            group = again.result(SECONDS)
            second.send(1, b"hello")
            assert group.receive(0) == b"hello"
            second.finish_sending()


def test_a_rank_ends_when_rank_0_has_begun_another_group(spec, left):
    codes, codes_in_time = left
    with ThreadPoolExecutor() as threads:
        joined = threads.submit(joined_group, spec, 1, CPU)
        with led_group(spec, CPU):
            joined.result(SECONDS)
        forget_ranks(spec)
        assert codes == [], "rank 0 may also have ended with the run"
        other = threads.submit(joined_group, spec, 1, CPU)
        with led_group(spec, CPU):
            other.result(SECONDS)
            assert codes_in_time() == [EXIT_TORN]


def test_a_full_disk_delays_the_meeting_and_ends_no_rank(spec, left, monkeypatch):
    codes, _ = left
    tries = []

    def write(file, meeting):
        tries.append(meeting)
        if len(tries) in (1, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_meeting(file, meeting)

    monkeypatch.setattr(rank_rendezvous, "write_meeting", write)
    monkeypatch.setattr(disk, "ASK_AGAIN_SECONDS", 0.02)
    with ThreadPoolExecutor() as threads:
        joined = threads.submit(joined_group, spec, 1, CPU)
        with led_group(spec, CPU):
            joined.result(SECONDS)
    assert codes == []
    assert [meeting.is_over for meeting in tries] == [False, False, True, True]


def wait_for_watches(before, left):
    """Wait until so many of the watches that began since `before` are left."""
    until = time.monotonic() + SECONDS
    while sum(one.name == "rank-watch" for one in set(threading.enumerate()) - before) > left:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_an_earlier_meeting_is_forgotten_even_if_there_is_none(spec):
    write_meeting(meeting_file(spec), RankMeeting(generation=1, port=9))
    for _ in range(2):
        forget_ranks(spec)
        assert read_meeting(meeting_file(spec)) == NO_MEETING


def test_ranks_of_the_nodes_that_are_there_form_a_group_and_the_others_wait_for_the_next(spec, left, monkeypatch):
    """Three nodes of a rank each, of which node 1 is away. Then it is there, and the group begins again with it."""
    nodes, come = [(0, 2)], []
    others = SimpleNamespace(wait=lambda: nodes[-1], are_silent=lambda: False, have_come=lambda: bool(come))
    monkeypatch.setattr(rank_rendezvous, "OtherNodes", lambda spec: others)
    runtime = RuntimeConfig(trainer_ranks=3)
    first = spec.model_copy(update={"trainer_nodes": 3, "engine": spec.engine.model_copy(update={"runtime": runtime})})
    away, there = (first.model_copy(update={"role": "ranks", "trainer_node": number}) for number in (1, 2))
    with ThreadPoolExecutor() as threads:
        waiting, joined = threads.submit(joined_group, away, 1, CPU), threads.submit(joined_group, there, 2, CPU)
        with led_group(first, CPU) as group:
            second = joined.result(SECONDS)
            assert (group.rank, group.ranks, second.rank, second.ranks) == (0, 2, 1, 2)
            assert not group.may_grow()
            come.append(1)
            assert group.may_grow()
            assert not waiting.done()
        forget_ranks(first)
        nodes.append((0, 1, 2))
        again = threads.submit(joined_group, there, 2, CPU)
        with led_group(first, CPU) as group:
            assert [waiting.result(SECONDS).rank, again.result(SECONDS).rank, group.ranks] == [1, 2, 3]


def test_rank_0_names_no_meeting_before_every_node_of_the_trainer_is_there(spec, monkeypatch):
    class Waits(Exception): ...

    def wait():
        assert read_meeting(meeting_file(spec)) == NO_MEETING
        raise Waits

    monkeypatch.setattr(rank_rendezvous, "OtherNodes", lambda spec: SimpleNamespace(wait=wait))
    with pytest.raises(Waits), led_group(spec, CPU):
        pass


def test_rank_0_of_several_nodes_leaves_when_one_is_silent_and_not_after_the_run(spec, left, monkeypatch):
    codes, codes_in_time = left
    silent, looked = [], threading.Event()

    def are_silent():
        looked.set()
        return bool(silent)

    others = SimpleNamespace(wait=lambda: (0, 1), are_silent=are_silent, have_come=lambda: False)
    monkeypatch.setattr(rank_rendezvous, "OtherNodes", lambda spec: others)
    several = spec.model_copy(update={"trainer_nodes": 2})
    other = several.model_copy(update={"role": "ranks", "trainer_node": 1})

    def lead():
        with ThreadPoolExecutor() as threads:
            joined = threads.submit(joined_group, other, 1, CPU)
            with led_group(several, CPU):
                joined.result(SECONDS)
                assert looked.wait(SECONDS)
                if silent:
                    assert EXIT_TORN in codes_in_time()

    before = set(threading.enumerate())
    lead()
    silent.append(1)
    wait_for_watches(before, 1)  # of rank 1, which ends with its process
    assert codes == [], "the run is over, and its nodes end"
    forget_ranks(several)
    lead()


@pytest.mark.parametrize("ends", ["over", "store"])
def test_a_watch_ends_with_its_group_and_with_its_store(left, ends):
    codes, _ = left
    is_over = threading.Event()

    def is_torn():
        if ends == "store":
            raise RuntimeError("the store is gone: rank 0 ends, or has begun again")
        return is_over.is_set()

    before = set(threading.enumerate())
    over = leave_when(is_torn, "a sign")
    if ends == "over":
        over.set()
        is_over.set()
    wait_for_watches(before, 0)
    assert codes == []


def test_a_lost_rank_is_not_the_fault_of_this_one():
    with pytest.raises(SystemExit) as ended, leaves_torn_group():
        raise TornGroup("rank 1")
    assert ended.value.code == EXIT_TORN


def test_ranks_of_several_nodes_meet_at_the_first_nodes_address_and_of_one_node_on_loopback(spec, monkeypatch):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment = {}
    monkeypatch.setattr("engine.node.rank_network.os", SimpleNamespace(environ=environment))
    there = spec.model_copy(update={"coordinator_host": "127.0.0.2"})
    assert host_of_store(there) == LOOPBACK
    use_network(there)
    assert environment == {}, "torch finds loopback by itself"
    several = there.model_copy(update={"trainer_nodes": 2})
    assert host_of_store(several) == "127.0.0.2"
    use_network(several)
    assert set(environment) == set(names)
