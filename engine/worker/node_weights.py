"""Share one copy of the weights per node, in memory owned by the agent, or on its disk if the memory is too small.

The first worker to need a version fetches the weights once, and the other workers read the fetched copy. A restarted
worker reads the copy too, and uses no network. The files have no name, so their room is freed with the node's last
process, however the process died.

    empty -> arriving (`have` bytes so far) -> whole, with a write number
                \\-> its writer died: the next writer of the same digest goes on from there

A slot is valid while its entry in the book has a write number. The writer removes the number before it writes the slot,
and puts a new number back after it checked the digest, so a reader never takes half-written weights for whole. A reader
holds a shared kernel lock on the slot, a writer an exclusive lock. The locks (POSIX record locks on the book) end with
the process that holds them.
"""

import errno
import fcntl
import hashlib
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple

from engine.protocol.request import WeightsKey
from engine.storage.tensor_files import Stored
from engine.worker.sink import Fetch

SLOTS = 3
"""Number of slots: the live weights, the previous weights, and the averaged evaluation weights."""

PATIENCE_SECONDS = 10.0
"""Seconds a worker waits without any progress of another worker's fetch before fetching its own copy."""

NOTE_BYTES = 16 << 20
"""Bytes after which a writer notes how far it is: the most that is fetched again after its death."""

MEMORY_ROOM = 1.5
"""Available memory that a copy in memory needs, in sizes of the copy. The workers load the weights beside it."""

_LOOK_SECONDS = 0.002
_ENTRY = struct.Struct("<QQQ?32s")
_FETCH, _FIRST = 0, 1
"""Locked bytes of the book: the right to fetch, then one byte for each slot."""


class _Entry(NamedTuple):
    """The book's entry of a slot. `number`: of the write; 0: not whole. `size`, `have`: bytes. `digest`: of all."""

    number: int
    size: int
    have: int
    on_disk: bool
    digest: str


class NodeMemory:
    """Files without names, held by the agent and passed to the processes started by the agent."""

    def __init__(self, handles: list[int]) -> None:
        self.book, *slots = handles
        self.in_memory, self.on_disk = slots[:SLOTS], slots[SLOTS:]

    @classmethod
    def make(cls, folder: Path) -> "NodeMemory":
        """Make the files. `folder`: on the disk that takes weights for which the memory is too small."""
        handles = [os.memfd_create(f"weights-{part}", os.MFD_CLOEXEC) for part in ("book", *range(SLOTS))]
        return cls(handles + [_file_without_name(folder) for _ in range(SLOTS)])

    def close(self) -> None:
        """Free the memory, unless another process holds it too."""
        for handle in (self.book, *self.in_memory, *self.on_disk):
            os.close(handle)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, tuple(DupFd(handle) for handle in (self.book, *self.in_memory, *self.on_disk))


def _inherited(*handles: Any) -> NodeMemory:
    return NodeMemory([handle.detach() for handle in handles])


def _file_without_name(folder: Path) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


@contextmanager
def _memory_of_this_process() -> Iterator[NodeMemory]:
    own = NodeMemory.make(Path(tempfile.gettempdir()))
    try:
        yield own
    finally:
        own.close()


class ArrivingWeights:
    """The `Sink` of one fetch: keeps and hashes pieces, and notes in the book how much is there."""

    def __init__(self, memory: NodeMemory, slot: int, digest: str) -> None:
        self._memory, self._slot, self._wanted = memory, slot, digest
        self._hash = hashlib.sha256()
        entry = read_entry(memory, slot)
        goes_on = not entry.number and entry.digest == digest
        self.size, self.have = (entry.size, 0) if goes_on else (0, 0)
        self._on_disk = entry.on_disk
        self._noted = 0
        if goes_on:
            self._take_over(entry)
        else:
            os.pwrite(memory.book, bytes(_ENTRY.size), slot * _ENTRY.size)

    def begin(self, size: int) -> None:
        """Make room for so many bytes. Raises OSError if neither memory nor disk has the room.

        Weights of another size than those of an earlier call are begun anew.
        """
        if size == self.size:
            return
        memory, disk = self._memory.in_memory[self._slot], self._memory.on_disk[self._slot]
        self._on_disk = _available_bytes() + _kept_bytes(memory) < MEMORY_ROOM * size
        os.ftruncate(memory if self._on_disk else disk, 0)
        if self._on_disk:
            room = os.fstatvfs(disk)
            if room.f_bavail * room.f_frsize + _kept_bytes(disk) < size:
                raise OSError(errno.ENOSPC, f"no room for {size / 1e9:.1f} GB of weights in memory or on disk")
        self.size, self.have, self._noted, self._hash = size, 0, 0, hashlib.sha256()
        # Write into the pages of earlier weights: the first touch of a page is the expensive part.
        os.ftruncate(self._handle, size)
        self._note(0)

    def take(self, piece: memoryview) -> None:
        """Keep the next bytes. Raises ValueError for more bytes than announced."""
        if self.have + len(piece) > self.size:
            raise ValueError(f"more than the announced {self.size} bytes of weights")
        done = 0
        while done < len(piece):
            done += os.pwrite(self._handle, piece[done:], self.have + done)
        self._hash.update(piece)
        self.have += len(piece)
        if self.have - self._noted >= NOTE_BYTES:
            self._note(0)

    def finish(self, number: int) -> bool:
        """Make the weights whole under this write number. Return False if the bytes are not the wanted ones."""
        if self.have != self.size or not self._hash.hexdigest().startswith(self._wanted):
            os.pwrite(self._memory.book, bytes(_ENTRY.size), self._slot * _ENTRY.size)
            return False
        self._note(number)
        return True

    @property
    def _handle(self) -> int:
        return (self._memory.on_disk if self._on_disk else self._memory.in_memory)[self._slot]

    def _note(self, number: int) -> None:
        self._noted = self.have
        entry = _ENTRY.pack(number, self.size, self.have, self._on_disk, self._wanted.encode())
        os.pwrite(self._memory.book, entry, self._slot * _ENTRY.size)

    def _take_over(self, entry: _Entry) -> None:
        """Hash what a dead writer left."""
        stored = Stored.of_handle(self._handle, entry.have)
        for piece in stored.pieces():
            self._hash.update(piece)
        self.have = self._noted = entry.have


class NodeWeights:
    """A worker's `WeightSource` on the node's memory.

    Use from one thread of a process at a time, because the kernel locks by process.
    """

    def __init__(self, memory: NodeMemory, fetch: Fetch) -> None:
        self._memory = memory
        self._fetch = fetch

    @contextmanager
    def get(self, weights: WeightsKey, digest: str) -> Iterator[Stored | None]:
        while True:
            with self._found(digest) as stored:
                if stored is not None:
                    yield stored
                    return
            # The right to fetch is a courtesy: a worker whose patience ended fetches without it, into another slot.
            with self._locked(_FETCH, fcntl.LOCK_EX, PATIENCE_SECONDS), self._slot_to_write(digest) as slot:
                if any(entry.number and entry.digest == digest for entry in self._entries()):
                    continue  # another worker fetched first
                if slot is None:
                    break  # readers or frozen writers hold every slot
                if not self._fetch_into(self._memory, slot, weights, digest):
                    yield None
                    return
        with _memory_of_this_process() as own:
            yield _stored(own, 0) if self._fetch_into(own, 0, weights, digest) else None

    def _fetch_into(self, memory: NodeMemory, slot: int, weights: WeightsKey, digest: str) -> bool:
        numbers = [entry.number for entry in self._entries()]
        arriving = ArrivingWeights(memory, slot, digest)
        return self._fetch(weights, digest, arriving) and arriving.finish(max(numbers) + 1)

    @contextmanager
    def _found(self, digest: str) -> Iterator[Stored | None]:
        """Yield the slot with these weights, or None. The slot is not written while the context is open."""
        for slot, entry in enumerate(self._entries()):
            if not entry.number or entry.digest != digest:
                continue
            with self._locked(_FIRST + slot, fcntl.LOCK_SH, PATIENCE_SECONDS) as mine:
                entry = read_entry(self._memory, slot)
                if mine and entry.number and entry.digest == digest:
                    yield _stored(self._memory, slot)
                    return
        yield None

    @contextmanager
    def _slot_to_write(self, digest: str) -> Iterator[int | None]:
        """Yield a slot without reader or writer: one where these weights arrived in part, else the oldest."""
        entries = self._entries()

        def age(slot: int) -> tuple[bool, int]:
            entry = entries[slot]
            return entry.digest != digest or bool(entry.number), entry.number

        for slot in sorted(range(SLOTS), key=age):
            with self._locked(_FIRST + slot, fcntl.LOCK_EX, 0.0) as mine:
                if mine:
                    yield slot
                    return
        yield None

    def _entries(self) -> list[_Entry]:
        return [read_entry(self._memory, slot) for slot in range(SLOTS)]

    @contextmanager
    def _locked(self, byte: int, kind: int, patience_seconds: float) -> Iterator[bool]:
        """Yield True if the lock was acquired before patience ended. The lock is held inside the context.

        Patience begins anew whenever more bytes have arrived in any slot: large weights take their time.
        """
        until, entries = time.monotonic() + patience_seconds, self._entries()
        held = False
        while not held:
            try:
                fcntl.lockf(self._memory.book, kind | fcntl.LOCK_NB, 1, byte)
                held = True
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= until:
                    now = self._entries()
                    if now == entries:
                        break
                    until, entries = time.monotonic() + patience_seconds, now
                time.sleep(_LOOK_SECONDS)
        try:
            yield held
        finally:
            if held:
                fcntl.lockf(self._memory.book, fcntl.LOCK_UN, 1, byte)


def read_entry(memory: NodeMemory, slot: int) -> _Entry:
    """Return the book's entry of a slot."""
    raw = os.pread(memory.book, _ENTRY.size, slot * _ENTRY.size)
    if len(raw) < _ENTRY.size:
        return _Entry(0, 0, 0, False, "")
    number, size, have, on_disk, digest = _ENTRY.unpack(raw)
    return _Entry(number, size, have, on_disk, digest.rstrip(b"\0").decode())


def _stored(memory: NodeMemory, slot: int) -> Stored:
    entry = read_entry(memory, slot)
    handle = (memory.on_disk if entry.on_disk else memory.in_memory)[slot]
    return Stored.of_handle(handle, entry.size)


def _kept_bytes(handle: int) -> int:
    """Return the bytes that a file takes. After a fetch that broke, these are fewer than the file's size."""
    return 512 * os.fstat(handle).st_blocks  # 512: the unit of st_blocks


def _available_bytes() -> int:
    """Return the bytes of memory that can be used without taking any from a process."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
