"""Rate limit of a judge: a run starts at most so many requests in a minute, evenly spaced."""

import time
from collections.abc import Callable

from engine.rewards.purse import Purse

MINUTE_SECONDS = 60.0


class Pace:
    """Delays callers until their turn. Threads may share a pace.

    `judge`: name of the judge in the run. `per_minute`: requests of all workers; None: no limit. `purse`: gives the
    turns. None: the caller is no part of a run, such as the check before a launch with one image, and has no limit.
    """

    def __init__(
        self, purse: Purse | None, judge: str, per_minute: int | None, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._purse, self._judge, self._per_minute, self._sleep = purse, judge, per_minute, sleep

    def wait(self) -> None:
        """Wait for the caller's turn."""
        if self._purse is None or self._per_minute is None:
            return
        seconds = self._purse.turn(self._judge, MINUTE_SECONDS / self._per_minute)
        if seconds > 0:
            self._sleep(seconds)
