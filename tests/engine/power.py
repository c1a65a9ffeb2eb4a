"""A simulated power cut: only synced data of a folder survives.

A strict disk. A file has the bytes of its last fsync, and a name has the file that it had at the last fsync of its
folder, or at the first fsync of a file under a new name.
"""

import os
from pathlib import Path


class Power:
    """Watches every fsync of this process from now on."""

    def __init__(self, monkeypatch):
        self._bytes: dict[int, bytes] = {}
        """Bytes of the last fsync, by inode."""
        self._names: dict[Path, int] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)

    def cut(self, folder, to):
        """Write the content of `folder` that survives a power cut to `to`."""
        to.mkdir()
        for path, inode in self._names.items():
            if path.is_relative_to(folder):
                kept = to / path.relative_to(folder)
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_bytes(self._bytes.get(inode, b""))
        return to

    def _sync(self, handle):
        self._fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            self._names = {name: inode for name, inode in self._names.items() if name.parent != path}
            self._names |= {path / entry.name: entry.inode() for entry in os.scandir(path) if entry.is_file()}
        else:
            inode = os.fstat(handle).st_ino
            self._bytes[inode] = Path(f"/proc/self/fd/{handle}").read_bytes()
            self._names.setdefault(path, inode)
