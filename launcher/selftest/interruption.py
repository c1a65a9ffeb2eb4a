"""Ctrl-C, SIGTERM and a closed terminal: they end a wait of the selftest, and nothing else.

    a signal comes ── while `may_interrupt` is entered ──> raised there as Interrupted
                   └─ at any other time ─────────────────> kept, and raised where `may_interrupt` is entered next

So the cleanup always starts and the file is always written, however many signals come and whenever they come.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "a closed terminal"}


class Interrupted(BaseException):
    """The user ends the selftest. Not an Exception, so that no step takes it for its own failure."""


@dataclass
class Interruption:
    """The signals of one selftest."""

    pending: str = ""
    """The signal that is not answered yet; "" for none. Python drops an exception that comes while an object is
    deleted, so a raised signal stays here until it is answered."""
    is_armed: bool = False

    def arrive(self, name: str) -> None:
        """Take note of a signal. Raises Interrupted inside `may_interrupt`."""
        self.pending = name
        if self.is_armed:
            self.is_armed = False
            raise Interrupted(name)

    def check(self) -> None:
        """Raise Interrupted if a signal is not answered yet. Called once in each turn of a wait."""
        if self.pending:
            self.is_armed = False
            raise Interrupted(self.pending)

    def answer(self) -> None:
        """Forget the signal: the caller acts on it."""
        self.pending = ""

    @contextmanager
    def may_interrupt(self) -> Iterator[None]:
        """Let signals interrupt what is inside."""
        self.is_armed = True
        try:
            self.check()
            yield
        finally:
            self.is_armed = False


@contextmanager
def interruptions() -> Iterator[Interruption]:
    """Turn the signals of a user into interruptions. A second signal of the same kind is an interruption too."""
    interruption = Interruption()

    def arrive(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            silence = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):  # a write to the lost terminal would raise an error
                os.dup2(silence, stream)
        interruption.arrive(NAMES[signal.Signals(number)])

    before = {number: signal.signal(number, arrive) for number in NAMES}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
