"""The coordinator's memory on disk: an append-only file of records with their blobs.

What is acknowledged to a worker has been through `sync`. A record that was cut short by a crash is dropped
when the journal is opened again; everything before it is whole, because each record carries a checksum.
"""

import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.rollout.wire import Blobs, pack, unpack

_HEAD = struct.Struct("<4sQI")
_MAGIC = b"SPT1"


class Journal:
    """One writer. Blobs are read back from the file by name, so that they need no memory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "journal"
        self._blobs: dict[str, tuple[int, int]] = {}
        self._records: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._end = 0
        self._appended = 0
        self._file = self._open()

    def replay(self) -> Iterator[dict[str, Any]]:
        """The records that were found when the journal was opened, oldest first; once."""
        records, self._records = self._records, []
        yield from records

    def append(self, record: Mapping[str, Any], blobs: Blobs | None = None, *, durable: bool = True) -> None:
        """Write one record; not durable before `sync`. Raises OSError (a full disk) and leaves no trace then.

        `durable`: false for a record that nobody waits for; it moves no `position`.
        """
        blobs = blobs or {}
        body = pack(record, blobs)
        start = self._end
        whole = memoryview(_HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body)
        written = 0
        try:
            while written < len(whole):
                written += self._file.write(whole[written:])
        except OSError:
            self._file.truncate(start)
            raise
        self._end = start + len(whole)
        if durable:
            self._appended += len(whole)
        self._index(blobs, self._end)

    def sync(self) -> None:
        """Everything appended so far survives the machine's power. May run in a thread."""
        with self._lock:
            os.fsync(self._file.fileno())

    def position(self) -> int:
        """How much that must be durable has been appended since this journal was opened, whatever was rewritten."""
        return self._appended

    def blob(self, name: str) -> bytes:
        """Raises KeyError for a blob that was never written or was compacted away."""
        start, size = self._blobs[name]
        return os.pread(self._file.fileno(), size, start)

    def rewrite(self, records: list[tuple[dict[str, Any], dict[str, bytes]]]) -> None:
        """Replace everything by these records, all or nothing: what is trained need not be remembered."""
        fresh = self._path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                for record, blobs in records:
                    body = pack(record, blobs)
                    file.write(_HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            fresh.unlink(missing_ok=True)  # half a copy would keep a full disk full
            raise
        with self._lock:
            fresh.replace(self._path)
            sync_folder(self._path.parent)
            self._file.close()
            self._blobs = {}
            self._file = self._open()
        self._records = []

    def close(self) -> None:
        self._file.close()

    def _open(self) -> Any:
        self._end = 0
        data = self._path.read_bytes() if self._path.exists() else b""
        while self._end + _HEAD.size <= len(data):
            magic, size, crc = _HEAD.unpack_from(data, self._end)
            start = self._end + _HEAD.size
            body = data[start : start + size]
            if magic != _MAGIC or len(body) != size or zlib.crc32(body) != crc:
                break
            record, blobs = unpack(body)
            self._records.append(record)
            self._end = start + size
            self._index(blobs, self._end)
        # Unbuffered: what a full disk refused must not be written later, when the file object is closed.
        file = self._path.open("a+b", buffering=0)
        file.truncate(self._end)
        return file

    def _index(self, blobs: Blobs, end: int) -> None:
        """Remember where the blobs of the record that ends here are."""
        offset = end - sum(len(data) for data in blobs.values())
        for name, data in blobs.items():
            self._blobs[name] = (offset, len(data))
            offset += len(data)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
