"""Watch the files of a node's folder, and send each change as one message (engine/protocol/console.py).

Promise: no byte is sent twice or left out, even if the console is killed at any moment. Standard library only.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from engine.protocol.console import APPENDED, MIRRORED, TAIL_BYTES, AppendFile, PutFile, RemoveFile, Report

PIECE_BYTES = 48 * 1024
"""Maximum bytes of a file in one line."""


class FileWatch:
    """The files of one folder, and the part of each file that the launcher has."""

    def __init__(self, folder: Path, send: Callable[[Report], None]) -> None:
        """Create the watch. `send`: sends one message to the launcher."""
        self._folder, self._send = folder, send
        self._shown: dict[str, tuple[int, int, int] | None] = {}
        """Size, modification time and inode of each file when last sent; None: reported as absent."""
        self._sent: dict[str, tuple[int, bytes]] = {}
        """Bytes sent of each appended file, and the last bytes sent."""

    def continue_from(self, have: Mapping[str, tuple[int, bytes]]) -> None:
        """Set the launcher's copies of appended files, by name: size and last bytes."""
        self._sent = dict(have)

    def look(self) -> bool:
        """Send the changes since the last look. Returns True if more bytes wait."""
        # Hide the exit of an agent being replaced: the node does not end with that agent.
        replacing = not (self._folder / "started.json").exists()
        for name in MIRRORED:
            self._look_at_small(name, hidden=replacing and name == "exit.json")
        return sum(self._look_at_long(name) for name in self._long_files()) > 0

    def _look_at_small(self, name: str, hidden: bool) -> None:
        path = self._folder / name
        identity: tuple[int, int, int] | None = None
        report: Report = RemoveFile(name=name)
        with contextlib.suppress(FileNotFoundError):
            if not hidden:
                identity, report = _identity(path), PutFile(name=name, text=path.read_text(errors="replace"))
        if name not in self._shown or self._shown[name] != identity:
            self._send(report)
            self._shown[name] = identity

    def _long_files(self) -> Iterator[str]:
        for folder in ("logs", "progress"):
            with contextlib.suppress(FileNotFoundError):
                names = sorted(f"{folder}/{name}" for name in os.listdir(self._folder / folder))
                yield from (name for name in names if APPENDED.fullmatch(name))

    def _look_at_long(self, name: str) -> bool:
        path = self._folder / name
        try:
            identity = _identity(path)
            if self._shown.get(name) == identity:
                return False
            with path.open("rb") as file:
                done, tail = self._sent.get(name, (0, b""))
                file.seek(done - len(tail))
                begin = file.read(len(tail) + PIECE_BYTES)
        except FileNotFoundError:
            return False  # the file was removed; the launcher keeps the bytes received
        if not begin.startswith(tail):
            # The file shrank or was replaced, perhaps by a longer file.
            self._sent[name] = (0, b"")
            self._send(AppendFile(name=name, at=0, data=b""))
            return True
        fresh = begin[len(tail) :]
        if fresh:
            self._send(AppendFile(name=name, at=done, data=fresh))
            self._sent[name] = (done + len(fresh), begin[-TAIL_BYTES:])
        if len(fresh) == PIECE_BYTES:
            return True
        self._shown[name] = identity
        return False


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
