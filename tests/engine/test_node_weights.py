"""A node fetches a weight version once for all its workers and their restarts."""

import multiprocessing
import os
import signal
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.clock import ScaledClock
from engine.coordinator.weight_book import digest_of
from engine.protocol.request import LoadWeights, WeightsKey
from engine.worker import node_weights
from engine.worker.node_weights import SLOTS, NodeMemory, NodeWeights
from tests.engine.heads import reply_to_dict

V0 = WeightsKey(version=0)
SIZE = 3_000_000
PIECE = 100_000
CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def weights(number, size=SIZE):
    return bytes([number]) * size


class Book:
    """Weights that a coordinator would send, and the number of fetches."""

    def __init__(self, *versions):
        self.versions = {digest_of(data): data for data in versions}
        self.fetches = 0

        self.sent = 0
        """Bytes sent in all."""

    def fetch(self, key, digest, sink):
        self.fetches += 1
        data = self.versions.get(digest)
        if data is None:
            return False
        sink.begin(len(data))
        for at in range(sink.have, len(data), PIECE):
            piece = memoryview(data)[at : at + PIECE]
            self.sent += len(piece)
            sink.take(piece)
        return True


def read(source, data):
    with source.get(V0, digest_of(data)) as found:
        return found is not None and found.to_bytes() == data


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
    count = counts.get(timeout=120)
    process.join()
    assert process.exitcode == (-signal.SIGKILL if killed else 0)
    return count


@pytest.mark.slow
def test_all_workers_of_a_node_fetch_a_version_once_despite_a_restart(folder):
    memory = NodeMemory.make(folder)
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


def test_a_joining_worker_loads_its_nodes_weights_without_the_coordinator(folder):
    # Imported here, because every process of the other tests imports this file.
    import torch

    from engine.models.weights import get_weights
    from engine.worker.worker import Worker

    mine, published = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    data = get_weights(dict(published.named_parameters()))
    memory, coordinator = NodeMemory.make(folder), ToBeLoaded(digest_of(data))
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
        source=NodeWeights(memory, Book().fetch),
    )
    joiner.serve_once(wait=False)
    assert joiner.holds == (V0, digest_of(data))
    assert torch.equal(mine.weight, published.weight)
    assert coordinator.calls == ["pull"]


def end_in_the_middle(memory, number, reached, how):
    """Fetch two thirds of a version, then end in this way."""

    class Ends(Book):
        def fetch(self, key, digest, sink):
            data = self.versions[digest]
            sink.begin(len(data))
            while sink.have < 2 * len(data) // 3:
                sink.take(memoryview(data)[sink.have : sink.have + PIECE])
            reached.set()
            os.kill(os.getpid(), how)

    read(NodeWeights(memory, Ends(weights(number)).fetch), weights(number))


def ended_in_the_middle(memory, number, how=signal.SIGKILL):
    reached = CONTEXT.Event()
    process = CONTEXT.Process(target=end_in_the_middle, args=(memory, number, reached, how))
    process.start()
    assert reached.wait(120)
    if how == signal.SIGKILL:
        process.join()
        assert process.exitcode == -signal.SIGKILL
    return process


def test_a_killed_writer_leaves_no_lock_and_no_complete_weights(folder):
    memory = NodeMemory.make(folder)
    kept = [weights(number) for number in range(SLOTS)]
    mine = NodeWeights(memory, Book(*kept, weights(9)).fetch)
    assert all(read(mine, data) for data in kept)
    ended_in_the_middle(memory, 9)
    book = Book(*kept, weights(9))
    source = NodeWeights(memory, book.fetch)
    assert all(read(source, data) for data in kept[1:])
    assert book.fetches == 0
    assert read(source, weights(9))
    assert read(source, weights(9))
    assert book.fetches == 1


def test_after_a_writers_death_only_the_missing_bytes_are_fetched(folder, monkeypatch):
    monkeypatch.setattr(node_weights, "NOTE_BYTES", PIECE)
    memory, book = NodeMemory.make(folder), Book(weights(9))
    # The dead writer noted its progress every 16 MiB, the number that a new process starts with.
    process = CONTEXT.Process(target=note_often_and_die, args=(memory,))
    process.start()
    process.join()
    assert read(NodeWeights(memory, book.fetch), weights(9))
    assert book.sent == SIZE // 3


def note_often_and_die(memory):
    node_weights.NOTE_BYTES = PIECE
    end_in_the_middle(memory, 9, CONTEXT.Event(), signal.SIGKILL)


def test_what_a_dead_writer_left_is_checked(folder):
    """Its bytes are hashed again, so a damaged part never counts as weights."""
    memory, book = NodeMemory.make(folder), Book(weights(9))
    process = CONTEXT.Process(target=note_often_and_die, args=(memory,))
    process.start()
    process.join()
    os.pwrite(memory.in_memory[0], b"damaged", 1000)
    source = NodeWeights(memory, book.fetch)
    assert not read(source, weights(9))
    assert read(source, weights(9))
    assert book.sent == SIZE // 3 + SIZE


def test_weights_too_large_for_the_memory_lie_on_disk(folder, monkeypatch):
    monkeypatch.setattr(node_weights, "MEMORY_ROOM", 1e9)
    memory = NodeMemory.make(folder)
    assert read(NodeWeights(memory, Book(weights(1)).fetch), weights(1))
    assert os.fstat(memory.on_disk[0]).st_size == SIZE
    assert os.fstat(memory.in_memory[0]).st_size == 0
    assert run(memory, 1) == 0
    assert not list(folder.iterdir())


def test_on_a_full_disk_weights_take_the_room_of_earlier_ones_and_no_more(folder, monkeypatch):
    monkeypatch.setattr(node_weights, "MEMORY_ROOM", 1e9)
    memory = NodeMemory.make(folder)
    versions = [weights(number) for number in range(node_weights.SLOTS + 1)]
    source = NodeWeights(memory, Book(*versions).fetch)
    for version in versions[:-1]:
        assert read(source, version)
    monkeypatch.setattr(os, "fstatvfs", lambda handle: SimpleNamespace(f_bavail=0, f_frsize=4096))
    assert read(source, versions[-1])

    os.ftruncate(memory.on_disk[1], 0)
    os.ftruncate(memory.on_disk[1], SIZE)  # as after a fetch that broke at once: a size, and no room behind it
    arriving = node_weights.ArrivingWeights(memory, 1, "another")
    for _ in range(2):  # the fetch waits for room, and asks again
        with pytest.raises(OSError, match="no room"):
            arriving.begin(SIZE)


def test_memory_of_a_broken_fetch_counts_by_its_pages(folder, monkeypatch):
    memory = NodeMemory.make(folder)
    os.ftruncate(memory.in_memory[0], SIZE)  # as after a fetch that broke at once: a size, and no page behind it
    monkeypatch.setattr(node_weights, "_available_bytes", lambda: round(node_weights.MEMORY_ROOM * SIZE) - 1)
    node_weights.ArrivingWeights(memory, 0, "another").begin(SIZE)
    assert (os.fstat(memory.in_memory[0]).st_size, os.fstat(memory.on_disk[0]).st_size) == (0, SIZE)


def test_a_writer_that_makes_progress_is_waited_for(folder, monkeypatch):
    """Patience counts from the newest bytes, because large weights take longer than any fixed patience."""
    monkeypatch.setattr(node_weights, "PATIENCE_SECONDS", 1.0)  # the whole fetch takes longer
    memory, begun = NodeMemory.make(folder), CONTEXT.Event()
    process = CONTEXT.Process(target=fetch_slowly, args=(memory, begun))
    process.start()
    try:
        assert begun.wait(120)
        book = Book(weights(1))
        assert read(NodeWeights(memory, book.fetch), weights(1))
        assert book.fetches == 0
    finally:
        process.kill()
        process.join()


def fetch_slowly(memory, begun):
    node_weights.NOTE_BYTES = PIECE
    data = weights(1)

    def fetch(key, digest, sink):
        sink.begin(len(data))
        begun.set()
        while sink.have < len(data):
            sink.take(memoryview(data)[sink.have : sink.have + PIECE])
            time.sleep(0.05)
        return True

    read(NodeWeights(memory, fetch), data)
    time.sleep(20)


def hold(memory, held, let_go):
    book = Book(weights(0))
    with NodeWeights(memory, book.fetch).get(V0, digest_of(weights(0))) as data:
        held.put(book.fetches)
        let_go.wait()
        assert data is not None
        held.put(data.to_bytes() == weights(0))


def test_weights_being_read_are_not_overwritten(folder):
    memory = NodeMemory.make(folder)
    book = Book(weights(0), *(weights(number, SIZE // 2) for number in range(1, 6)))
    source = NodeWeights(memory, book.fetch)
    read(source, weights(0))
    held, let_go = CONTEXT.Queue(), CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(memory, held, let_go))
    process.start()
    assert held.get(timeout=120) == 0
    for number in range(1, 6):
        assert read(source, weights(number, SIZE // 2))
    let_go.set()
    assert held.get(timeout=120)
    process.join()


def fetch_for_ever(memory, begun):
    def fetch(key, digest, sink):
        begun.set()
        signal.pause()

    read(NodeWeights(memory, fetch), weights(1))


def test_a_worker_frozen_while_fetching_blocks_the_others_for_a_limited_time(folder, monkeypatch):
    monkeypatch.setattr(node_weights, "PATIENCE_SECONDS", 0.2)
    memory, begun = NodeMemory.make(folder), CONTEXT.Event()
    process = CONTEXT.Process(target=fetch_for_ever, args=(memory, begun))
    process.start()
    try:
        assert begun.wait(120)
        book = Book(weights(1))
        assert read(NodeWeights(memory, book.fetch), weights(1))
        assert book.fetches == 1
    finally:
        process.kill()
        process.join()


def test_node_memory_keeps_the_newest_versions_and_overwrites_the_oldest(folder):
    memory = NodeMemory.make(folder)
    versions = [weights(number, size=1000 + number) for number in range(SLOTS + 1)]
    book = Book(*versions)
    source = NodeWeights(memory, book.fetch)
    assert all(read(source, data) for data in versions)
    assert all(read(source, data) for data in versions[1:])
    assert book.fetches == len(versions)
    assert read(source, versions[0])
    assert book.fetches == len(versions) + 1


def test_a_digest_that_was_republished_is_not_found(folder):
    with NodeWeights(NodeMemory.make(folder), Book().fetch).get(V0, "gone") as data:
        assert data is None


def test_an_error_while_fetching_does_not_block_the_next_fetch(folder):
    def broken(key, digest, sink):
        raise RuntimeError("no coordinator")

    memory = NodeMemory.make(folder)
    with pytest.raises(RuntimeError, match="no coordinator"):
        read(NodeWeights(memory, broken), weights(1))
    assert run(memory, 1) == 1
