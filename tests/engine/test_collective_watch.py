"""Groups whose calls only queue work: a hanging collective aborts the group once, and nothing waits for ever."""

import time
from dataclasses import replace

import pytest
import torch

from engine.parallel.collective_watch import CollectiveWatch, WatchThread
from engine.parallel.communicator import (
    GLOO_ONLY,
    NCCL_TRIES,
    ON_CPU,
    Communicators,
    SPGroup,
    TornGroup,
    backend_of,
    join_store,
    serve_store,
)


class Device:
    """A device that does queued work when told to, and counts aborts."""

    def __init__(self, timeout_seconds=5.0):
        self.now, self.queued, self.done, self.aborts, self.fails = 0.0, 0, 0, 0, False
        self.watch = CollectiveWatch(self.abort, self.mark, timeout_seconds=timeout_seconds, clock=lambda: self.now)

    def abort(self):
        self.aborts += 1

    def mark(self):
        number = self.queued

        def has_ended():
            if self.fails:
                raise RuntimeError("CUDA error")
            return self.done >= number

        return has_ended

    def queue(self):
        self.queued += 1

    def at(self, now):
        self.now = now
        self.watch.look()
        return self.watch.is_torn


def test_a_collective_without_an_end_aborts_its_group_once():
    device = Device()
    device.watch.call(device.queue)
    assert [device.at(now) for now in (1.0, 5.0, 5.1, 9.0)] == [False, False, True, True]
    assert device.aborts == 1
    assert not device.watch.has_ended()


def test_progress_of_a_long_pass_restarts_the_time():
    device = Device()
    for _ in range(3):
        device.watch.call(device.queue)
    for now in (4.0, 8.0, 12.0):
        device.done += 1
        assert not device.at(now)
    assert device.watch.has_ended()
    assert not device.at(100.0), "nothing is queued, so nothing is late"
    device.watch.call(device.queue)
    assert not device.at(104.0), "the time begins with the call"
    assert device.at(105.1)


def test_a_call_that_does_not_return_counts_too():
    device = Device()
    device.watch.call(lambda: device.at(6.0))
    assert device.aborts == 1


def test_an_error_of_the_device_aborts_the_group():
    device = Device()
    device.watch.call(device.queue)
    device.fails = True
    assert device.at(0.0)
    assert device.aborts == 1


def test_an_error_of_a_call_is_the_callers_and_not_a_hang():
    device = Device()
    with pytest.raises(RuntimeError, match="refused"):
        device.watch.call(refuse)
    assert not device.at(100.0)
    assert device.watch.has_ended()


def refuse():
    raise RuntimeError("refused")


class Hanging:
    """A process group whose collectives never end on the device, as with a dead peer."""

    def __init__(self):
        self.aborts = 0

    def size(self):
        return 2

    def rank(self):
        return 0

    def allreduce(self, tensors):
        return self

    broadcast = allreduce

    def wait(self):
        pass

    def abort(self):
        self.aborts += 1


def whole_pass(group, call):
    getattr(group, call)(torch.ones(2))
    group.finish()


@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
def test_a_pass_with_a_dead_peer_raises_within_the_timeout(call):
    hanging = Hanging()
    group = SPGroup(hanging, CollectiveWatch(hanging.abort, lambda: lambda: False, timeout_seconds=0.05))
    began = time.monotonic()
    with pytest.raises(TornGroup, match="did not end in time"):
        whole_pass(group, call)
    assert time.monotonic() - began < 20.0
    with pytest.raises(TornGroup, match="was aborted"):
        group.all_reduce(torch.ones(2))
    assert hanging.aborts == 1


def test_the_thread_aborts_a_group_whose_worker_waits_for_the_device():
    device, thread = Device(timeout_seconds=0.0), WatchThread()
    device.watch.call(device.queue)
    device.now = 1.0
    thread.add(device.watch)
    until = time.monotonic() + 60.0
    while not device.watch.is_torn and time.monotonic() < until:
        time.sleep(0.001)
    assert device.aborts == 1
    thread.remove(device.watch)


@pytest.mark.parametrize(("places", "backend"), [
    (("a", "b"), "nccl"), (("a", "b", "c"), "nccl"), (("a", "a"), "gloo"), (("a", GLOO_ONLY), "gloo"),
    ((GLOO_ONLY, GLOO_ONLY), "gloo"),
])  # fmt: skip
def test_nccl_needs_a_gpu_for_every_member(places, backend):
    assert backend_of(places) == backend


@pytest.fixture
def store():
    served = serve_store()
    yield join_store(served.port, timeout_seconds=60.0)
    del served


def test_a_worker_whose_nccl_groups_fail_uses_gloo_from_then_on(store):
    formed = []

    def form(backend, *how):
        formed.append(backend)
        if backend == "nccl":
            raise RuntimeError("NCCL error: unhandled system error")
        return ON_CPU.form(backend, *how)

    communicators = Communicators(store, timeout_seconds=20.0, links=replace(ON_CPU, place="a GPU", form=form))
    for number in range(NCCL_TRIES):
        with pytest.raises(TornGroup, match="NCCL error"):
            communicators.get(number, 0, 1)
    assert communicators.get(NCCL_TRIES, 0, 1).degree == 1
    assert formed == ["nccl"] * NCCL_TRIES + ["gloo"]


def test_a_group_that_hangs_while_it_forms_is_aborted(store):
    hanging = Hanging()
    links = replace(ON_CPU, place="a GPU", form=lambda *_: hanging, mark=lambda: lambda: False)
    communicators = Communicators(store, timeout_seconds=0.05, patience_seconds=1.0, links=links)
    with pytest.raises(TornGroup, match="did not end in time"):
        communicators.get(1, 0, 1)
    communicators.drop(1)
    assert hanging.aborts == 1
