"""A node fetches a weight version once for all its workers and their restarts."""

import multiprocessing
import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.clock import ScaledClock
from engine.coordinator.weight_book import digest_of
from engine.protocol.request import LoadWeights, WeightsKey
from engine.worker import node_weights
from engine.worker.node_weights import SLOTS, NodeMemory, NodeWeights
from engine.worker.weight_source import FromCoordinator
from tests.engine.heads import reply_to_dict

V0 = WeightsKey(version=0)
SIZE = 3_000_000
CONTEXT = multiprocessing.get_context("forkserver")


def weights(number, size=SIZE):
    return bytes([number]) * size


class Book:
    """Weights that a coordinator would send, and the number of fetches."""

    def __init__(self, *versions):
        self.versions = {digest_of(data): data for data in versions}
        self.fetches = 0

    def fetch(self, key, digest):
        self.fetches += 1
        return self.versions.get(digest)


def read(source, data):
    with source.get(V0, digest_of(data)) as found:
        return found is not None and bytes(found) == data


def work(memory, counts, number, end):
    """Run a worker process: load one version, report the number of fetches, and optionally die."""
    book = Book(weights(number))
    assert read(NodeWeights(memory, book.fetch), weights(number))
    counts.put(book.fetches)
    if end:
        counts.close()
        counts.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)


def run(memory, number, *, killed=False):
    counts = CONTEXT.Queue()
    process = CONTEXT.Process(target=work, args=(memory, counts, number, killed))
    process.start()
    count = counts.get(timeout=20)
    process.join()
    assert process.exitcode == (-signal.SIGKILL if killed else 0)
    return count


def test_all_workers_of_a_node_fetch_a_version_once_despite_a_restart():
    memory = NodeMemory.make()
    assert [run(memory, 1), run(memory, 1, killed=True), run(memory, 1)] == [1, 0, 0]
    assert run(memory, 2) == 1
    assert run(memory, 1) == 0


class ToBeLoaded:
    """A coordinator that orders these weights, but does not send any."""

    def __init__(self, digest):
        self.digest, self.calls = digest, []

    def call(self, head, blobs=None, *, wait=False):
        self.calls.append(head["call"])
        return reply_to_dict(LoadWeights(weights=V0, digest=self.digest)), {}


def test_a_joining_worker_loads_its_nodes_weights_without_the_coordinator():
    # Imported here, because every process of the other tests imports this file.
    import torch

    from engine.models.weights import get_weights
    from engine.worker.worker import Worker

    mine, published = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    data = get_weights(dict(published.named_parameters()))
    memory, coordinator = NodeMemory.make(), ToBeLoaded(digest_of(data))
    assert read(NodeWeights(memory, Book(data).fetch), data)  # its neighbour fetched them
    joiner = Worker(
        name="spot/1",
        node="spot",
        workers_of_node=2,
        transport=coordinator,
        adapter=cast(Any, SimpleNamespace(transformer=mine)),  # this worker makes no image
        parameters=dict(mine.named_parameters()),
        reward=cast(Any, None),
        clock=ScaledClock(origin_ms=0),
        heartbeat_seconds=60.0,
        source=NodeWeights(memory, FromCoordinator(coordinator).fetch),
    )
    joiner.serve_once(wait=False)
    assert joiner.holds == (V0, digest_of(data))
    assert torch.equal(mine.weight, published.weight)
    assert coordinator.calls == ["pull"]


class DiesWriting(NodeWeights):
    def _write(self, handle, data):
        super()._write(handle, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)


def die_writing(memory):
    read(DiesWriting(memory, Book(weights(9)).fetch), weights(9))


def test_a_killed_writer_leaves_no_lock_and_no_complete_weights():
    memory = NodeMemory.make()
    kept = [weights(number) for number in range(SLOTS)]
    mine = NodeWeights(memory, Book(*kept, weights(9)).fetch)
    assert all(read(mine, data) for data in kept)
    process = CONTEXT.Process(target=die_writing, args=(memory,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    book = Book(*kept, weights(9))
    source = NodeWeights(memory, book.fetch)
    assert all(read(source, data) for data in kept[1:])
    assert book.fetches == 0
    assert read(source, weights(9))
    assert read(source, weights(9))
    assert book.fetches == 1


def hold(memory, held, let_go):
    book = Book(weights(0))
    with NodeWeights(memory, book.fetch).get(V0, digest_of(weights(0))) as data:
        held.put(book.fetches)
        let_go.wait()
        assert data is not None
        held.put(bytes(data) == weights(0))


def test_weights_being_read_are_not_overwritten():
    memory = NodeMemory.make()
    book = Book(weights(0), *(weights(number, SIZE // 2) for number in range(1, 6)))
    source = NodeWeights(memory, book.fetch)
    read(source, weights(0))
    held, let_go = CONTEXT.Queue(), CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(memory, held, let_go))
    process.start()
    assert held.get(timeout=20) == 0
    for number in range(1, 6):
        assert read(source, weights(number, SIZE // 2))
    let_go.set()
    assert held.get(timeout=20)
    process.join()


def fetch_for_ever(memory, begun):
    def fetch(key, digest):
        begun.set()
        signal.pause()

    read(NodeWeights(memory, fetch), weights(1))


def test_a_worker_frozen_while_fetching_blocks_the_others_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(node_weights, "PATIENCE_SECONDS", 0.2)
    memory, begun = NodeMemory.make(), CONTEXT.Event()
    process = CONTEXT.Process(target=fetch_for_ever, args=(memory, begun))
    process.start()
    try:
        assert begun.wait(20)
        book = Book(weights(1))
        assert read(NodeWeights(memory, book.fetch), weights(1))
        assert book.fetches == 1
    finally:
        process.kill()
        process.join()


def test_node_memory_keeps_the_newest_versions_and_overwrites_the_oldest():
    memory = NodeMemory.make()
    versions = [weights(number, size=1000 + number) for number in range(SLOTS + 1)]
    book = Book(*versions)
    source = NodeWeights(memory, book.fetch)
    assert all(read(source, data) for data in versions)
    assert all(read(source, data) for data in versions[1:])
    assert book.fetches == len(versions)
    assert read(source, versions[0])
    assert book.fetches == len(versions) + 1


def test_a_digest_that_was_republished_is_not_found():
    with NodeWeights(NodeMemory.make(), Book().fetch).get(V0, "gone") as data:
        assert data is None


def test_an_error_while_fetching_does_not_block_the_next_fetch():
    def broken(key, digest):
        raise RuntimeError("no coordinator")

    memory = NodeMemory.make()
    with pytest.raises(RuntimeError, match="no coordinator"):
        read(NodeWeights(memory, broken), weights(1))
    assert run(memory, 1) == 1
