"""A full disk stops nobody for good: who needs room says so once, waits, and goes on when there is some.

Nor does a store that cannot be reached.
"""

import errno
import io
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What an OSError says when a disk, or the caller's share of it, has no room left."""

AWAY = errno.EHOSTUNREACH
"""What it says when the store is a bucket that does not answer."""

ASK_AGAIN_SECONDS = 0.5

Result = TypeVar("Result")


def when_there_is_room(do: Callable[[], Result], tell: Callable[[str], None]) -> Result:
    """Do it, again and again while the disk is full or the store away. `do` must be repeatable.

    Other errors come through.
    """
    waited = False
    while True:
        try:
            result = do()
        except OSError as error:
            if error.errno not in FULL and error.errno != AWAY:
                raise
            if not waited:
                tell(f"{error.strerror}; waiting until {'it answers' if error.errno == AWAY else 'there is room'}")
            waited = True
            time.sleep(ASK_AGAIN_SECONDS)
            continue
        if waited:
            tell("it can be written again; going on")
        return result


class _Lossy(io.RawIOBase):
    """A log file: on a full disk it loses lines, never the process that writes them."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def writable(self) -> bool:
        return True

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        try:
            return os.write(self._handle, data)
        except OSError:
            return len(data)


def log_to(handle: int) -> None:
    """From here on stdout and stderr go to this file, and no `print` fails for want of room."""
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Lossy(1)), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Lossy(2)), line_buffering=True)
