"""Wait while a disk is full: the caller reports the problem once, waits, and continues when the disk has room.

A store that cannot be reached is treated the same way.
"""

import errno
import io
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk, or of a used-up disk quota."""

AWAY = errno.EHOSTUNREACH
"""Error number of a store whose bucket does not answer."""

ASK_AGAIN_SECONDS = 0.5

Result = TypeVar("Result")


def when_there_is_room(do: Callable[[], Result], report: Callable[[str], None]) -> Result:
    """Call `do`, and repeat the call while the disk is full or the store is unreachable. `do` must be repeatable.

    Other errors are raised.
    """
    waited = False
    while True:
        try:
            result = do()
        except OSError as error:
            if error.errno not in FULL and error.errno != AWAY:
                raise
            if not waited:
                report(f"{error.strerror}; waiting until {'it answers' if error.errno == AWAY else 'there is room'}")
            waited = True
            time.sleep(ASK_AGAIN_SECONDS)
            continue
        if waited:
            report("it can be written again; going on")
        return result


class _Lossy(io.RawIOBase):
    """Log file that loses lines on a full disk, but never stops the writing process."""

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
    """Send stdout and stderr to this file from now on. No `print` fails on a full disk."""
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Lossy(1)), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Lossy(2)), line_buffering=True)
