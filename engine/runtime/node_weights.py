"""One copy of the weights per node, in memory that its agent owns and its workers share.

The first worker that needs a version fetches it once, the others map what it left there, and so does a worker that
was started again: it reads neither disk nor network. The memory has no name (memfd), so it is gone with the last
process of the node, however that died.

A slot counts when its entry in the book is there; the entry is taken out before the slot is written and put back
last, so nothing half-written is ever taken for whole. Who reads a slot holds a shared lock of the kernel's, who
writes it an exclusive one. These locks (POSIX record locks on the book) end with the process that holds them.
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

from engine.rollout.request import WeightsKey

SLOTS = 3
"""The live weights, the ones before them, and the average that is evaluated."""

PATIENCE_SECONDS = 10.0
"""How long a worker waits for another that is fetching; then it fetches for itself."""

_LOOK_SECONDS = 0.002
_ENTRY = struct.Struct("<QQ32s")
"""Which writing of the book this is, size and digest of the weights; a zero first: nothing there."""
_FETCH, _FIRST = 0, 1
"""What is locked, as bytes of the book: the right to fetch, then one for each slot."""


class NodeMemory:
    """The agent's part: holds the memory, and travels to the processes that it starts."""

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
    """A worker's part: a `WeightSource`. One thread of a process at a time, because the kernel locks by process."""

    def __init__(self, memory: NodeMemory, fetch: Callable[[WeightsKey, str], bytes | None]) -> None:
        self._memory = memory
        self._fetch = fetch
        self._mapped: dict[int, memoryview] = {}
        """Slots as they were mapped last; what is mapped changes with what is written, but not its size."""

    @contextmanager
    def get(self, weights: WeightsKey, digest: str) -> Iterator[memoryview | None]:
        while True:
            with self._found(digest) as data:
                if data is not None:
                    yield data
                    return
            with self._locked(_FETCH, fcntl.LOCK_EX, PATIENCE_SECONDS):
                if any(self._entry(slot)[2] == digest for slot in range(SLOTS)):
                    continue  # another worker was faster
                fetched = self._fetch(weights, digest)
                if fetched is not None:
                    self._keep(fetched, digest)
            yield None if fetched is None else memoryview(fetched)
            return

    @contextmanager
    def _found(self, digest: str) -> Iterator[memoryview | None]:
        """The slot with these weights, mapped; it is not written while they are read."""
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
        """Leave it for the others, in place of what was written longest ago and is not being read."""
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
        # Pages that are there already are written again: the first touch of a page is what costs.
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
        """Whether the lock could be had before patience ended; it is held inside."""
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
