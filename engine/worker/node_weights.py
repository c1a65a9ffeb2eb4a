"""Share one copy of the weights per node, in memory owned by the agent.

The first worker to need a version fetches the weights once, and the other workers map the fetched copy. A restarted
worker maps the copy too, and reads neither disk nor network. The memory has no name (memfd), so the memory is freed
with the node's last process, however the process died.

A slot is valid while its entry is in the book. The writer removes the entry before writing the slot, and puts the entry
back last, so a reader never takes half-written weights for whole. A reader holds a shared kernel lock on the slot, a
writer an exclusive lock. The locks (POSIX record locks on the book) end with the process that holds them.
"""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any

from engine.protocol.request import WeightsKey

SLOTS = 3
"""Number of slots: the live weights, the previous weights, and the averaged evaluation weights."""

PATIENCE_SECONDS = 10.0
"""Seconds a worker waits for another worker's fetch before fetching its own copy."""

_LOOK_SECONDS = 0.002
_ENTRY = struct.Struct("<QQ32s")
"""Entry of a slot: write number, size and digest of the weights. Write number zero: the slot is empty."""
_FETCH, _FIRST = 0, 1
"""Locked bytes of the book: the right to fetch, then one byte for each slot."""


class NodeMemory:
    """Memory held by the agent and passed to the processes started by the agent."""

    def __init__(self, handles: list[int]) -> None:
        self.book, *self.slots = handles

    @classmethod
    def make(cls) -> "NodeMemory":
        return cls([os.memfd_create(f"weights-{part}", os.MFD_CLOEXEC) for part in ("book", *range(SLOTS))])

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, tuple(DupFd(handle) for handle in (self.book, *self.slots))


def _inherited(*handles: Any) -> NodeMemory:
    return NodeMemory([handle.detach() for handle in handles])


class NodeWeights:
    """A worker's `WeightSource` on the node's memory.

    Use from one thread of a process at a time, because the kernel locks by process.
    """

    def __init__(self, memory: NodeMemory, fetch: Callable[[WeightsKey, str], bytes | None]) -> None:
        self._memory = memory
        self._fetch = fetch
        self._mapped: dict[int, memoryview] = {}
        """Last mapping of each slot. A mapping's content changes with each write, but its size does not."""

    @contextmanager
    def get(self, weights: WeightsKey, digest: str) -> Iterator[memoryview | None]:
        while True:
            with self._found(digest) as data:
                if data is not None:
                    yield data
                    return
            with self._locked(_FETCH, fcntl.LOCK_EX, PATIENCE_SECONDS):
                if any(self._entry(slot)[2] == digest for slot in range(SLOTS)):
                    continue  # another worker fetched first
                fetched = self._fetch(weights, digest)
                if fetched is not None:
                    self._keep(fetched, digest)
            yield None if fetched is None else memoryview(fetched)
            return

    @contextmanager
    def _found(self, digest: str) -> Iterator[memoryview | None]:
        """Yield the mapped slot with these weights, or None. The slot is not written while the context is open."""
        for slot in range(SLOTS):
            if self._entry(slot)[2] != digest:
                continue
            with self._locked(_FIRST + slot, fcntl.LOCK_SH, PATIENCE_SECONDS) as mine:
                _, size, found = self._entry(slot)
                if mine and found == digest:
                    yield self._map(slot, size)
                    return
        yield None

    def _map(self, slot: int, size: int) -> memoryview:
        if slot not in self._mapped or len(self._mapped[slot]) != size:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapped[slot] = memoryview(mmap.mmap(self._memory.slots[slot], size, flags, mmap.PROT_READ))
        return self._mapped[slot]

    def _keep(self, data: bytes, digest: str) -> None:
        """Store the weights for the other workers, in the oldest slot without a reader."""
        numbers = {slot: self._entry(slot)[0] for slot in range(SLOTS)}
        for slot in sorted(numbers, key=lambda slot: numbers[slot]):
            with self._locked(_FIRST + slot, fcntl.LOCK_EX, 0.0) as mine:
                if mine:
                    at = slot * _ENTRY.size
                    os.pwrite(self._memory.book, bytes(_ENTRY.size), at)
                    self._write(self._memory.slots[slot], data)
                    entry = _ENTRY.pack(max(numbers.values()) + 1, len(data), digest.encode())
                    os.pwrite(self._memory.book, entry, at)
                    return

    def _write(self, handle: int, data: bytes) -> None:
        # Write into existing pages: the first touch of a page is the expensive part.
        os.ftruncate(handle, len(data))
        done = 0
        while done < len(data):
            done += os.pwrite(handle, memoryview(data)[done:], done)

    def _entry(self, slot: int) -> tuple[int, int, str]:
        raw = os.pread(self._memory.book, _ENTRY.size, slot * _ENTRY.size)
        if len(raw) < _ENTRY.size:
            return 0, 0, ""
        number, size, digest = _ENTRY.unpack(raw)
        return number, size, digest.decode() if number else ""

    @contextmanager
    def _locked(self, byte: int, kind: int, patience_seconds: float) -> Iterator[bool]:
        """Yield True if the lock was acquired before patience ended. The lock is held inside the context."""
        until = time.monotonic() + patience_seconds
        held = False
        while not held:
            try:
                fcntl.lockf(self._memory.book, kind | fcntl.LOCK_NB, 1, byte)
                held = True
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= until:
                    break
                time.sleep(_LOOK_SECONDS)
        try:
            yield held
        finally:
            if held:
                fcntl.lockf(self._memory.book, fcntl.LOCK_UN, 1, byte)
