"""Compare this machine's clock and the run's clock with the clouds' clocks.

A wrong clock makes the controller meter wrong amounts, so nothing is bought while a clock is wrong. Every answer of a
cloud has a date. The date is compared with this machine's clock, and with the run's clock, which meters the run's
money. The comparison runs at the start and every few minutes.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.clock import Clock
from launcher.decide.clock_doubt import MOST_OFF_MS, Doubt
from launcher.exit_codes import Failure
from launcher.money import duration

log = logging.getLogger(__name__)

ASK_SECONDS = 300.0
AGAIN_SECONDS = 20.0
"""Seconds between two queries while a clock is wrong, or no cloud has answered yet (wall time)."""


class TellsTime(Protocol):
    """The part of CloudLimits used here."""

    def clock_ms(self) -> int: ...


def wall_ms() -> int:
    """Return this machine's clock: milliseconds since 1970-01-01 UTC."""
    return time.time_ns() // 1_000_000


class CloudTime:
    """Differences between the clouds' clocks and this machine's clock, measured at each query.

    `doubt`: the reason not to trust a clock. None while the clocks agree, or before the first answer.
    """

    def __init__(self, clouds: Mapping[str, TellsTime], wall_ms: Callable[[], int] = wall_ms) -> None:
        self._clouds, self._wall_ms = clouds, wall_ms
        self._off: dict[str, int] = {}
        """By cloud: the cloud's time minus this machine's time, in milliseconds."""
        self.doubt: Doubt | None = None

    def ask(self, clock: Clock | None = None) -> None:
        """Query the time of every cloud, compare this machine's clock and the run's clock with it, and update `doubt`.

        `clock`: the run's clock. None: only this machine's clock is compared. For a cloud that does not answer, the
        last measured difference is used.
        """
        for name, cloud in self._clouds.items():
            try:
                cloud_ms = cloud.clock_ms()
            except Failure as error:
                log.info("%s does not say what time it is: %s", name, error)
                continue
            self._off[name] = cloud_ms - self._wall_ms()
        self.doubt = self._judged(clock)
        if self.doubt is not None:
            log.warning("%s", self.doubt.text)

    def now_ms(self) -> int:
        """Return the current time (UTC milliseconds), corrected by the first cloud that answered.

        Return this machine's time if no cloud has answered yet, or if the difference is at most `MOST_OFF_MS`.
        """
        off_ms = next(iter(self._off.values()), 0)
        return self._wall_ms() + (off_ms if abs(off_ms) > MOST_OFF_MS else 0)

    def keep(self, clock: Clock, ended: threading.Event) -> None:
        """Repeat `ask` in a background thread until `ended` is set."""
        threading.Thread(target=self._keep, args=(clock, ended), name="cloud time", daemon=True).start()

    def _keep(self, clock: Clock, ended: threading.Event) -> None:
        while not ended.wait(ASK_SECONDS if self._off and self.doubt is None else AGAIN_SECONDS):
            self.ask(clock)

    def _judged(self, clock: Clock | None) -> Doubt | None:
        for name, off_ms in self._off.items():
            if abs(off_ms) > MOST_OFF_MS:
                side = "behind" if off_ms > 0 else "ahead of"
                return Doubt(
                    f"this machine's clock is {_about(off_ms)} {side} the clock of {name}: nothing is bought "
                    "until it is set (`timedatectl set-ntp true`)",
                    is_ahead=self._ahead_ms(clock, off_ms) > MOST_OFF_MS,
                )
            if abs(ahead_ms := self._ahead_ms(clock, off_ms)) > MOST_OFF_MS:
                side = "ahead of" if ahead_ms > 0 else "behind"
                return Doubt(
                    f"the newest times in the ledger are {_about(ahead_ms)} {side} the clock of {name}, because "
                    "this machine's clock was wrong when they were written: nothing is bought until the clouds' time "
                    "has caught up",
                    is_ahead=ahead_ms > 0,
                )
        return None

    def _ahead_ms(self, clock: Clock | None, off_ms: int) -> int:
        """Return the lead of the run's clock over a cloud's clock (ms)."""
        return 0 if clock is None else clock.now_ms() - (self._wall_ms() + off_ms)


def _about(off_ms: int) -> str:
    """Return the difference in whole minutes, so that the text stays the same from one answer to the next."""
    return duration(max(1, round(abs(off_ms) / 60_000)) * 60_000)
