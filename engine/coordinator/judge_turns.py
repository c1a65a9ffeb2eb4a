"""Turns of the requests to judges: all workers of a run together keep within a judge's rate limit."""

import time
from collections.abc import Callable


class JudgeTurns:
    """Evenly spaced turns of each judge. Unused turns are not saved up.

    Turns are counted in wall time, because a server's limit does not know the run's clock. A restarted coordinator
    begins anew, so two requests may then be closer than the limit allows.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next: dict[str, float] = {}

    def take(self, judge: str, gap_seconds: float) -> float:
        """Take the next turn, and return the seconds until it. `gap_seconds`: between two turns of this judge."""
        now = self._now()
        turn = max(now, self._next.get(judge, now))
        self._next[judge] = turn + gap_seconds
        return turn - now
