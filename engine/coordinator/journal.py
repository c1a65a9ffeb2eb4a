"""Store the coordinator's state on disk, in an append-only file of records with their blobs.

Every result acknowledged to a worker has been through `sync`. On opening, the journal drops a record cut short by a
crash. Every earlier record is whole, because each record carries a checksum. A damaged record followed by whole records
was acknowledged: the file stays unchanged, and opening the journal fails.
"""

import os
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.durable import sync_folder
from engine.protocol.codec import Blobs, pack, unpack

_HEAD = struct.Struct("<4sQI")
_MAGIC = b"SPT1"


class JournalDamaged(Exception):
    """Damage in the middle of the journal: a record differs from the written record. The file was left unchanged."""


class Journal:
    """Journal with a single writer. Blobs are read from the file by name, so blobs use no memory."""

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
        """Yield the records found when the journal was opened, oldest first. Works once."""
        records, self._records = self._records, []
        yield from records

    def append(self, record: Mapping[str, Any], blobs: Blobs | None = None, *, durable: bool = True) -> None:
        """Write one record; the record is durable only after `sync`.

        Raises OSError (a full disk) and then leaves no trace.

        `durable`: False for a record no caller waits for. Such a record does not move `position`.
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
        """Make everything appended so far survive a power cut. May run in a thread."""
        with self._lock:
            os.fsync(self._file.fileno())

    def position(self) -> int:
        """Return the bytes of durable records appended since this journal was opened.

        Rewrites do not change the count.
        """
        return self._appended

    def blob(self, name: str) -> bytes:
        """Return a blob. Raises KeyError if the blob was never written, or was dropped by a compaction."""
        start, size = self._blobs[name]
        return os.pread(self._file.fileno(), size, start)

    def rewrite(self, records: list[tuple[dict[str, Any], dict[str, bytes]]]) -> None:
        """Replace the whole journal by these records, atomically. Records of trained batches are no longer needed."""
        fresh = self._path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                for record, blobs in records:
                    body = pack(record, blobs)
                    file.write(_HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            fresh.unlink(missing_ok=True)  # a half-written copy would keep a full disk full
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
        """Read every record and cut off a torn record at the end. Raises JournalDamaged without changing the file."""
        self._end = 0
        data = self._path.read_bytes() if self._path.exists() else b""
        while (body := _record_at(data, self._end)) is not None:
            record, blobs = unpack(body)
            self._records.append(record)
            self._end += _HEAD.size + len(body)
            self._index(blobs, self._end)
        if (whole := _next_record(data, self._end + 1)) is not None:
            raise JournalDamaged(
                f"{self._path} is damaged at byte {self._end}: that record cannot be read, and there are whole records "
                f"from byte {whole} on. The file was left as it is. Copy it away first. Then restore it from a backup, "
                f"or cut it off (`truncate -s {self._end} {self._path}`) and lose what came after: the run goes on "
                "from its newest checkpoint"
            )
        # Unbuffered: bytes refused by a full disk must not be written later, when the file object is closed.
        file = self._path.open("a+b", buffering=0)
        file.truncate(self._end)
        return file

    def _index(self, blobs: Blobs, end: int) -> None:
        """Record the positions of the blobs of the record ending at `end`."""
        offset = end - sum(len(data) for data in blobs.values())
        for name, data in blobs.items():
            self._blobs[name] = (offset, len(data))
            offset += len(data)


def _record_at(data: bytes, start: int) -> bytes | None:
    """Return the body of the record starting at this byte, or None if there is no whole record."""
    if start + _HEAD.size > len(data):
        return None
    magic, size, crc = _HEAD.unpack_from(data, start)
    if magic != _MAGIC or start + _HEAD.size + size > len(data):
        return None
    body = data[start + _HEAD.size : start + _HEAD.size + size]
    return body if zlib.crc32(body) == crc else None


def _next_record(data: bytes, start: int) -> int | None:
    """Return the start of the next whole record, or None."""
    at = data.find(_MAGIC, start)
    while at >= 0 and _record_at(data, at) is None:
        at = data.find(_MAGIC, at + 1)
    return at if at >= 0 else None
