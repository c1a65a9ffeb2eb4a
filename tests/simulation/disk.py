"""The on-demand node's disk, in memory: the journal and the weight book of the coordinator.

It keeps the promise of the real ones (engine/coordinator/journal.py): synced data survives a crash, and of later data a
prefix survives. `watch` is called with every record as a reader of the file would see it; `watch_rewrite` with all
records of a rewritten file.
"""

import errno
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.protocol.request import WeightsKey

Record = dict[str, Any]


def as_json(record: Record) -> Record:
    """Return the record as a reader of the file finds it."""
    read: Record = json.loads(json.dumps(record))
    return read


class Disk:
    """Data that outlives a process. `full`: no more data can be written."""

    def __init__(
        self, watch: Callable[[Record, Mapping[str, Any]], None], watch_rewrite: Callable[[list[Any]], None]
    ) -> None:
        self.records: list[tuple[Record, dict[str, Any]]] = []
        self.synced = 0
        self.rewrites = 0
        self.weights: dict[WeightsKey, bytes] = {}
        self.full = False
        self.watch, self.watch_rewrite = watch, watch_rewrite

    def require_space(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "no space left on device")

    def crash(self, share: float) -> None:
        """Lose data that was not synced, except this share (0..1)."""
        del self.records[self.synced + int(share * (len(self.records) - self.synced + 1)) :]
        self.synced = len(self.records)


class MemoryJournal:
    """`Journal`, on a `Disk`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._blobs: dict[str, Any] = {}
        for _, blobs in disk.records:
            self._blobs.update(blobs)
        self._position = 0

    def replay(self) -> Iterator[Record]:
        return iter([record for record, _ in self._disk.records])

    def append(self, record: Record, blobs: Mapping[str, Any] | None = None, *, durable: bool = True) -> None:
        self._disk.require_space()
        kept, record = dict(blobs) if blobs else {}, as_json(record)
        self._disk.watch(record, kept)
        self._disk.records.append((record, kept))
        self._blobs.update(kept)
        if durable:
            self._position += 1

    def sync(self) -> None:
        self._disk.synced = len(self._disk.records)

    def position(self) -> int:
        return self._position

    def blob(self, name: str) -> Any:
        return self._blobs[name]

    def rewrite(self, records: list[tuple[Record, dict[str, Any]]]) -> None:
        self._disk.require_space()
        records = [(as_json(record), blobs) for record, blobs in records]
        self._disk.watch_rewrite(records)
        self._disk.records = list(records)
        self._disk.rewrites += 1
        self._disk.synced = len(records)
        self._blobs = {}
        for _, blobs in records:
            self._blobs.update(blobs)


class MemoryBook:
    """`WeightBook`, on a `Disk`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def write(self, weights: WeightsKey, data: bytes) -> None:
        self._disk.require_space()
        self._disk.weights[weights] = data

    def read(self, weights: WeightsKey) -> bytes:
        return self._disk.weights[weights]

    def drop(self, weights: WeightsKey) -> None:
        self._disk.weights.pop(weights, None)
