"""Rate limit of one process: starts at most so many requests in a minute, evenly spaced."""

import threading
import time
from collections.abc import Callable

MINUTE_SECONDS = 60.0


class EvenPace:
    """Delays callers. Threads may share a pace. `per_minute`: None for no limit."""

    def __init__(
        self,
        per_minute: int | None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._gap_seconds = 0.0 if per_minute is None else MINUTE_SECONDS / per_minute
        self._now, self._sleep = now, sleep
        self._next = now()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait for the caller's turn. Unused turns are not saved up."""
        with self._lock:
            turn = max(self._now(), self._next)
            self._next = turn + self._gap_seconds
        if (pause := turn - self._now()) > 0:
            self._sleep(pause)
