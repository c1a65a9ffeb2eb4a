"""Single keys from a terminal, without Enter."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Keys(Protocol):
    """A source of keys."""

    def wait(self, seconds: float) -> str:
        """Return the next key as a lower-case letter, or "" if none was pressed within `seconds`."""


class NoKeys:
    """Without a terminal for input there are no keys: waits the whole time."""

    def wait(self, seconds: float) -> str:
        time.sleep(seconds)
        return ""


class TerminalKeys:
    """Keys of the terminal at a file descriptor. Ctrl-C stays a signal."""

    def __init__(self, descriptor: int) -> None:
        """Take the descriptor of a terminal that hands over single keys."""
        self._descriptor = descriptor

    def wait(self, seconds: float) -> str:
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return ""
        pressed = os.read(self._descriptor, 64)
        if not pressed:  # the terminal is gone; without a pause the caller would read again and again
            time.sleep(seconds)
        # One letter counts. Arrows and other keys send several bytes that begin with Escape.
        return pressed.decode(errors="replace").lower() if len(pressed) == 1 else ""


@contextmanager
def keys_of_terminal() -> Iterator[Keys]:
    """Read keys from standard input while the context is open, and restore the terminal afterwards."""
    if not sys.stdin.isatty():
        yield NoKeys()
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield TerminalKeys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
