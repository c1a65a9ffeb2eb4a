"""Pack the files of a folder into parts of a bounded size, and unpack the parts in any order and in parallel.

    part = length of the index (8 bytes), index (JSON rows of Entry), bytes of the entries

A large file is split between parts. A symbolic link stays a link. Modification times are kept, because Python compares
them with its bytecode files. Nothing is compressed: zlib's fastest level took 40 s of a core for each gigabyte, and
saved less time of a fetch than unpacking costs.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PART_BYTES = 64 << 20
"""Bytes of file content in a part. A connection to a bucket gives about 100 MB/s, so several parts
are fetched in parallel, each through memory."""

ENTRY_BYTES = 256
"""Bytes that an entry counts for beside its content."""

HALF_WRITTEN = re.compile(r"\.pyc\.\d+$")
"""Temporary names under which Python writes bytecode."""


class Damaged(ValueError):
    """A part is not what `packed` made."""


class Entry(NamedTuple):
    """A link, or a piece of a file: `length` bytes at offset `at`. `link`: target of a link, empty for a file."""

    path: str
    link: str
    mode: int
    modified_ns: int
    at: int
    length: int


def packed(folder: Path, leave_out: Callable[[str], bool] = lambda name: False) -> Iterator[bytes]:
    """Yield the parts of a folder. `leave_out`: names directly in the folder that are not packed.

    Files that disappear in the meantime are skipped. Raises OSError for other failures of a read.
    """
    entries: list[Entry] = []
    pieces: list[bytes] = []
    size = 0
    for path in _files(folder, leave_out):
        for entry, piece in _pieces(folder, path):
            entries.append(entry)
            pieces.append(piece)
            size += ENTRY_BYTES + entry.length
            if size >= PART_BYTES:
                yield _part(entries, pieces)
                entries, pieces, size = [], [], 0
    if entries:
        yield _part(entries, pieces)


def _files(folder: Path, leave_out: Callable[[str], bool]) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        directory = Path(root)
        if directory == folder:
            folders[:] = [name for name in folders if not leave_out(name)]
            files = [name for name in files if not leave_out(name)]
        folders.sort()
        links = [name for name in folders if (directory / name).is_symlink()]
        yield from (directory / name for name in sorted([*files, *links]) if not HALF_WRITTEN.search(name))


def _pieces(folder: Path, path: Path) -> Iterator[tuple[Entry, bytes]]:
    name = path.relative_to(folder).as_posix()
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            yield Entry(name, os.readlink(path), 0, 0, 0, 0), b""
            return
        if not stat.S_ISREG(status.st_mode):
            return
        with path.open("rb") as file:
            at = 0
            while True:
                piece = file.read(PART_BYTES)
                yield Entry(name, "", stat.S_IMODE(status.st_mode), status.st_mtime_ns, at, len(piece)), piece
                at += len(piece)
                if at >= status.st_size or not piece:
                    return
    except FileNotFoundError:
        return


def _part(entries: list[Entry], pieces: list[bytes]) -> bytes:
    index = json.dumps(entries).encode()
    return b"".join([len(index).to_bytes(8, "big"), index, *pieces])


@dataclass
class Unpacking:
    """One unpacking of a folder's parts. Safe to use from several threads, one part each.

    `keep`: names of files that exist and are not replaced.
    """

    folder: Path
    keep: Collection[str] = ()
    _placed: dict[str, Entry] = field(default_factory=dict)

    def add(self, part: bytes) -> None:
        """Write the entries of a part. Raises Damaged, and OSError if the disk is full."""
        entries, content = _opened(part)
        parents: set[str] = set()
        at = 0
        for entry in entries:
            piece = content[at : at + entry.length]
            at += entry.length
            if entry.path in self.keep:
                continue
            target = f"{self.folder}/{entry.path}"
            parent = os.path.dirname(target)
            if parent not in parents:
                os.makedirs(parent, exist_ok=True)
                parents.add(parent)
            if entry.link:
                os.symlink(entry.link, target)
            else:
                _write(target, entry, piece)
            self._placed[entry.path] = entry

    def finish(self) -> int:
        """Set the modification times, once all parts are added. Returns the number of files.

        Raises FileNotFoundError for a link that leads nowhere on this machine.
        """
        for name, entry in self._placed.items():
            path = f"{self.folder}/{name}"
            if not entry.link:
                os.utime(path, ns=(entry.modified_ns, entry.modified_ns))
            elif not os.path.exists(path):
                raise FileNotFoundError(f"{path} is a link to {entry.link}, which this machine does not have")
        return len(self._placed)


def _opened(part: bytes) -> tuple[list[Entry], memoryview]:
    try:
        content = memoryview(part)
        length = int.from_bytes(content[:8], "big")
        entries = [Entry(*row) for row in json.loads(bytes(content[8 : 8 + length]))]
    except (ValueError, TypeError) as error:
        raise Damaged(f"a part cannot be read: {error}") from None
    content = content[8 + length :]
    if sum(entry.length for entry in entries) != len(content):
        raise Damaged("a part has another size than its index says")
    for entry in entries:
        if ".." in PurePosixPath(entry.path).parts or entry.path.startswith("/"):
            raise Damaged(f"a part has a file outside its folder: {entry.path}")
    return entries, content


def _write(target: str, entry: Entry, piece: memoryview) -> None:
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, entry.mode | stat.S_IWUSR)
    try:
        done = 0
        while done < len(piece):
            done += os.pwrite(handle, piece[done:], entry.at + done)
    finally:
        os.close(handle)
