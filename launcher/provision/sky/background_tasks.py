"""Run blocking tasks in a pool: one at a time per name, retried with growing gaps after a failure."""

import logging
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from launcher.clouds.base import LoginNeeded
from launcher.exit_codes import Failure

log = logging.getLogger(__name__)

AGAIN_SECONDS, LONGEST_AGAIN_SECONDS, LONGEST_LOOK_SECONDS = 1.0, 60.0, 5.0
"""Retry gaps in seconds. A failed task runs again after 1 s, 2 s, 4 s, ... 60 s. A failed look runs again after at most
5 s, because other tasks wait for its answer."""

NOT_YET_SECONDS = 2.0

LOOKS = ("look ", "requests")
"""Name prefixes of tasks that only read."""


class NotYet(Failure):
    """The request was made and takes its time. Not an error: the task runs again soon."""


@dataclass(slots=True)
class BackgroundTasks:
    """Runs the tasks of a thread that never waits, in the threads of `pool`."""

    pool: Executor
    monotonic: Callable[[], float] = time.monotonic
    troubles: dict[str, str] = field(default_factory=dict)
    """By name: the error of the last try."""
    logins: dict[str, str] = field(default_factory=dict)
    """By name: the error of the last try, if a new login heals it."""
    _busy: set[str] = field(default_factory=set)
    _again: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By name: failures in a row, and the monotonic time of the next permitted try."""
    _done: dict[str, float] = field(default_factory=dict)

    def is_busy(self, name: str) -> bool:
        return name in self._busy

    def every(self, seconds: float, name: str, work: Callable[[], object]) -> None:
        """Run the task, unless the last start is less than `seconds` ago."""
        if self.monotonic() - self._done.get(name, -math.inf) >= seconds and self.do(name, work):
            self._done[name] = self.monotonic()

    def do(self, name: str, work: Callable[[], object]) -> bool:
        """Start `work` in the pool as task `name`. Return whether it was started.

        It is not started while a task of this name runs, or while its retry gap lasts, after a failure or NotYet.
        """
        if name in self._busy or self.monotonic() < self._again.get(name, (0, 0.0))[1]:
            return False

        def run() -> None:
            try:
                work()
            except NotYet as wait:
                self._again[name] = (0, self.monotonic() + NOT_YET_SECONDS)
                log.debug("%s: %s", name, wait)
            except Failure as failure:
                self._failed(name, str(failure))
                if isinstance(failure, LoginNeeded):
                    self.logins[name] = str(failure)
                else:
                    self.logins.pop(name, None)
            except Exception:  # an error in spotrl itself must not stop the task that terminates nodes
                log.exception("%s failed", name)
                self._failed(name, "an error of spotrl's own; its log has it")
            else:
                self._again.pop(name, None)
                self.troubles.pop(name, None)
                self.logins.pop(name, None)
            finally:
                self._busy.discard(name)

        self._busy.add(name)
        self.pool.submit(run)
        return True

    def close(self) -> None:
        """Start no further task. Running tasks end by themselves."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _failed(self, name: str, text: str) -> None:
        times = self._again.get(name, (0, 0.0))[0] + 1
        longest = LONGEST_LOOK_SECONDS if name.startswith(LOOKS) else LONGEST_AGAIN_SECONDS
        gap = min(AGAIN_SECONDS * 2.0 ** min(times - 1, 10), longest) * random.uniform(0.7, 1.0)
        self._again[name] = (times, self.monotonic() + gap)
        if self.troubles.get(name) != text:
            log.warning("%s: %s", name, text)
        self.troubles[name] = text
