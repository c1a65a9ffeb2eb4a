"""Ranks of a trainer meet again after a loss, whatever the survivors are doing at that time."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.config import EngineConfig, RuntimeConfig
from engine.events import Market
from engine.node import rank_rendezvous, rank_watch
from engine.node.child import EXIT_TORN
from engine.node.rank_rendezvous import forget_ranks, joined_group, led_group
from engine.node_spec import ClockConfig, NodeSpec
from engine.protocol.rank_meeting import write_meeting
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
