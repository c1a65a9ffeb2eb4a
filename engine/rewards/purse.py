"""Money and turns for calls of a judge. Money is held before the calls, and the calls are billed afterwards.

The promise: no call is made without money held for the most that the call can cost. Whatever fails, the money of a call
that may have been made is never used again.
"""

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from engine.protocol.messages import PaidCall
from engine.rewards.reward import RewardError


class BudgetUsedUp(RewardError):
    """The judges' budget of the run is used up. The run stops."""


class Purse(Protocol):
    """Source of money and turns, shared by all workers of a run. Threads may share a purse."""

    def hold(self, micro_usd: int, *, wait: bool) -> int | None:
        """Hold money and return the number of the hold. Raises BudgetUsedUp.

        `wait`: wait for money that others hold. Without, None: others hold the money at the moment.
        """

    def bill(self, hold: int, calls: Sequence[PaidCall]) -> None:
        """Pay the calls from the held money, and give the rest back. Repeated: no effect."""

    def turn(self, judge: str, gap_seconds: float) -> float:
        """Take the next turn of a judge with a rate limit, and return the wall seconds until it."""


class Payment:
    """Money for the calls of one list of images, as a context: its end bills all calls. Threads may share a payment."""

    def __init__(self, purse: Purse, most_micro_usd: int, calls: int) -> None:
        """Hold money for `calls` calls of at most `most_micro_usd` each. Waits for money that others hold."""
        self._purse, self._most = purse, most_micro_usd
        self._left = most_micro_usd * calls
        first = purse.hold(self._left, wait=True)
        assert first is not None, "a hold that waits has a number"
        self._holds = [(first, self._left)]
        """Number and money of each hold."""
        self._calls: list[PaidCall] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Payment":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # The last hold comes first. It alone may be billed for more than its money, so the money that the others give
        # back is free only afterwards.
        for hold, calls in reversed(self._bills()):
            self._purse.bill(hold, calls)

    def _bills(self) -> list[tuple[int, list[PaidCall]]]:
        """Return the calls of each hold: those that its money pays, and all others with the last hold.

        The coordinator may count a hold as spent, if it takes the worker for dead. The calls of later holds then still
        count.
        """
        calls, bills = deque(self._calls), []
        for hold, micro_usd_left in self._holds:
            paid: list[PaidCall] = []
            while calls and calls[0].micro_usd <= micro_usd_left:
                paid.append(calls.popleft())
                micro_usd_left -= paid[-1].micro_usd
            bills.append((hold, paid))
        bills[-1][1].extend(calls)
        return bills

    def take(self) -> bool:
        """Take the money of one call. False: there is none at the moment. Raises BudgetUsedUp."""
        with self._lock:
            if self._left < self._most:
                more = self._purse.hold(self._most, wait=False)
                if more is None:
                    return False
                self._holds.append((more, self._most))
                self._left += self._most
            self._left -= self._most
            return True

    def made(self, call: PaidCall) -> None:
        """Record a call, for which money was taken."""
        with self._lock:
            self._left += self._most - call.micro_usd
            self._calls.append(call)

    def not_made(self) -> None:
        """Put the money of a call back that the server certainly did not charge."""
        with self._lock:
            self._left += self._most
