"""A small disk that can be filled: a tmpfs if it can be mounted, else a limit on the file sizes of a process."""

import contextlib
import errno
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

MOUNT_BYTES = 64 << 20

NO_ROOM = (errno.ENOSPC, errno.EFBIG)
"""Errors of a full disk, and of the file size limit."""


class SmallDisk:
    """A disk at `folder`. `writer`: the process that writes there and gets the limit."""

    def __init__(self, folder: Path, writer: Callable[[], int]) -> None:
        self._folder, self._writer = folder, writer
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={MOUNT_BYTES}", "spotrl-drill", str(folder)]
        try:
            self._is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
        except FileNotFoundError:
            self._is_mounted = False

    def fill(self) -> None:
        if not self._is_mounted:
            longest = max((path.stat().st_size for path in self._folder.iterdir() if path.is_file()), default=0)
            resource.prlimit(self._writer(), resource.RLIMIT_FSIZE, (longest + 100, resource.RLIM_INFINITY))
            return
        chunk = bytes(1 << 16)
        with (self._folder / "filler").open("wb", buffering=0) as file:
            while chunk:
                try:
                    while file.write(chunk) == len(chunk):
                        pass
                except OSError:
                    chunk = chunk[: len(chunk) // 2]

    def free(self) -> None:
        if self._is_mounted:
            (self._folder / "filler").unlink(missing_ok=True)
        else:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self._writer(), resource.RLIMIT_FSIZE, unlimited)

    def close(self) -> None:
        if self._is_mounted:
            subprocess.run(["umount", "--lazy", str(self._folder)], check=True)
            self._is_mounted = False
