"""Files of tensors, written and read in pieces: no step copies a whole state or holds Python's lock for long.

    [8 bytes: length of the header][header: JSON][bytes of the tensors, one after another]

The layout is that of safetensors, with the same order of tensors, so both libraries read each other's files. A write
hashes every piece on its way to the file. Reading, writing and hashing of a piece release Python's lock.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import RawIOBase
from pathlib import Path

from engine.durable import sync_folder

PIECE_BYTES = 4 << 20
"""Bytes of a piece. A copy of 4 MiB takes about a millisecond."""

ORDER = ("U8", "I8", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")
"""Dtypes in the order of safetensors, which writes the tensors of the last dtype first."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of a file. `dtype`: name in safetensors. `at`: offset of its bytes in the file. `size`: in bytes."""

    dtype: str
    shape: tuple[int, ...]
    at: int
    size: int

    def rows(self, first: int, count: int) -> "TensorEntry":
        """Return some rows of the tensor, along its first dimension. The tensor has at least one row."""
        row = self.size // self.shape[0]
        return replace(self, shape=(count, *self.shape[1:]), at=self.at + first * row, size=count * row)


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """A whole file on this machine. `digest`: SHA-256 in hex. `size`: in bytes."""

    path: Path
    digest: str
    size: int

    def open(self) -> "Stored":
        """Open the file for reading. Raises OSError if the file is gone."""
        return Stored.of_path(self.path)


class Stored:
    """Bytes in a file or in memory, read in pieces. A file stays readable after its name is removed."""

    def __init__(self, size: int, read: Callable[[int, memoryview], None]) -> None:
        """`read(at, target)` fills the target with the bytes from offset `at` on."""
        self.size = size
        self.read_into = read

    @classmethod
    def of_bytes(cls, data: bytes | memoryview) -> "Stored":
        view = memoryview(data)

        def read(at: int, target: memoryview) -> None:
            target[:] = view[at : at + len(target)]

        return cls(len(view), read)

    @classmethod
    def of_handle(cls, handle: int, size: int) -> "Stored":
        """Read from an open file. The caller keeps the file open."""

        def read(at: int, target: memoryview) -> None:
            done = 0
            while done < len(target):
                got = os.preadv(handle, [target[done:]], at + done)
                if not got:
                    raise OSError(f"the file ends at {at + done} bytes; it should have {size}")
                done += got

        return cls(size, read)

    @classmethod
    def of_path(cls, path: Path) -> "Stored":
        """Open a file. Raises OSError. The file is closed with the last reference to the result."""
        with path.open("rb", buffering=0) as file:
            return cls.of_file(file)

    @classmethod
    def of_file(cls, file: RawIOBase) -> "Stored":
        """Read from an open file, which the caller may close. It is closed with the last reference to the result."""
        handle = os.dup(file.fileno())
        stored = cls.of_handle(handle, os.fstat(handle).st_size)
        weakref.finalize(stored, os.close, handle)
        return stored

    def __eq__(self, other: object) -> bool:
        """Return True if the bytes are equal."""
        if not isinstance(other, Stored):
            return NotImplemented
        return self.size == other.size and all(
            mine == its for mine, its in zip(self.pieces(), other.pieces(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def pieces(self) -> Iterator[memoryview]:
        """Yield all bytes in order. Each piece is valid until the next one."""
        buffer = memoryview(bytearray(min(PIECE_BYTES, self.size)))
        for at in range(0, self.size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, self.size - at)]
            self.read_into(at, piece)
            yield piece

    def digest(self) -> str:
        """Return the SHA-256 of all bytes, in hex."""
        sha256 = hashlib.sha256()
        for piece in self.pieces():
            sha256.update(piece)
        return sha256.hexdigest()

    def to_bytes(self) -> bytes:
        """Return all bytes in one object: for small contents."""
        data = bytearray(self.size)
        self.read_into(0, memoryview(data))
        return bytes(data)

    def entries(self) -> dict[str, TensorEntry]:
        """Return the tensors by name. Raises ValueError if these bytes are not a whole file of tensors."""
        try:
            start = memoryview(bytearray(8))
            self.read_into(0, start)
            length = int.from_bytes(start, "little")
            if 8 + length > self.size:
                raise ValueError(f"its header of {length} bytes is cut off at {self.size}")
            header = memoryview(bytearray(length))
            self.read_into(8, header)
            entries = {
                name: TensorEntry(
                    dtype=raw["dtype"],
                    shape=tuple(raw["shape"]),
                    at=8 + length + raw["data_offsets"][0],
                    size=raw["data_offsets"][1] - raw["data_offsets"][0],
                )
                for name, raw in json.loads(bytes(header)).items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OSError) as error:
            raise ValueError(f"these are not tensors in the format of safetensors: {error}") from error
        end = max((entry.at + entry.size for entry in entries.values()), default=8 + length)
        if end != self.size:
            raise ValueError(f"the file of tensors has {self.size} bytes; its header names {end}")
        return entries


def header_of(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> tuple[bytes, list[str]]:
    """Return the start of a file, and the names of the tensors in the order of their bytes.

    `tensors`: dtype, shape and size in bytes of each tensor by name
    """
    names = sorted(tensors, key=lambda name: (-ORDER.index(tensors[name][0]), name.encode()))
    header, at = {}, 0
    for name in names:
        dtype, shape, size = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> TensorFile:
    """Write a file durably and atomically, and hash it on the way.

    Raises OSError, e.g. if the disk is full. An older file of this name then stays, and no other file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    digest, size = hashlib.sha256(), 0
    try:
        with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                write_all(file, memoryview(piece))
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)  # a half-written copy would keep a full disk full
        raise
    sync_folder(path.parent)
    return TensorFile(path=path, digest=digest.hexdigest(), size=size)


def copy_durably(file: TensorFile, path: Path) -> None:
    """Copy a file to another disk, in pieces. Raises OSError, e.g. if the disk is full."""
    write_pieces(path, file.open().pieces())


def write_all(file: RawIOBase, data: memoryview) -> None:
    """Write all bytes to an unbuffered file, which may take fewer at a time. Raises OSError."""
    while data:
        data = data[file.write(data) or 0 :]


def link_durably(file: Path, path: Path) -> None:
    """Give a durable file a second name, without a copy. An older file of that name is replaced atomically.

    Raises OSError, e.g. if the two names are on different disks.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    os.link(file, fresh)
    try:
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    fresh.unlink(missing_ok=True)  # rename leaves both names if they are the same file already
    sync_folder(path.parent)
