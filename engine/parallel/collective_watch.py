"""Watch the collectives of a group whose calls only queue work on a GPU (NCCL), and abort the group if one hangs.

    begun -> queued on the device -> ended
       \\-> no progress within the timeout -> group aborted, torn for good

A collective with a dead or frozen peer never ends, and everything that waits for the device then waits with it. Only
the abort of the group ends the collective. A thread of the worker therefore looks at all watches (`WatchThread`),
whatever the worker's own thread waits for. After an abort the results of the pass are garbage: the group's caller must
see `is_torn` before it uses them.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

HasEnded = Callable[[], bool]
"""Returns True once the device has done everything that was queued before. Never waits."""

LOOK_SECONDS = 0.02
"""Interval of looks at the watches."""


class CollectiveWatch:
    """The unfinished collectives of one group, oldest first."""

    def __init__(
        self,
        abort: Callable[[], None],
        mark: Callable[[], HasEnded],
        *,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without collectives.

        abort            ends everything that the group has queued; called at most once, by the thread that looks
        mark             returns the `HasEnded` of the work that is queued now
        timeout_seconds  longest time without progress, while a collective is unfinished
        """
        self._abort, self._mark, self._clock = abort, mark, clock
        self._timeout_seconds = timeout_seconds
        self._unfinished: deque[list[HasEnded]] = deque()
        self._progress = 0.0
        self._lock = threading.Lock()
        self.is_torn = False
        """True once the group was aborted."""

    def call(self, queue: Callable[[], None]) -> None:
        """Call a function that queues a collective. A call that does not return counts as unfinished too."""
        ended: list[HasEnded] = []
        with self._lock:
            if not self._unfinished:
                self._progress = self._clock()
            self._unfinished.append(ended)
        try:
            queue()
            ended.append(self._mark())
        except BaseException:
            ended.append(lambda: True)  # the caller gets the error
            raise

    def look(self) -> None:
        """Drop the collectives that have ended. Abort the group if there was no progress for too long."""
        with self._lock:
            try:
                while self._unfinished and self._unfinished[0] and self._unfinished[0][0]():
                    self._unfinished.popleft()
                    self._progress = self._clock()
                is_late = bool(self._unfinished) and self._clock() - self._progress > self._timeout_seconds
            except RuntimeError:  # the device reports an error of a collective
                is_late = True
            if not is_late or self.is_torn:
                return
            self.is_torn = True
        self._abort()

    def has_ended(self) -> bool:
        """Return whether every collective has ended, by the last look."""
        return not self._unfinished


class WatchThread:
    """The thread that looks at a worker's watches. The thread lives while there is a watch."""

    def __init__(self) -> None:
        self._watches: tuple[CollectiveWatch, ...] = ()
        self._lock = threading.Lock()
        self._runs = False

    def add(self, watch: CollectiveWatch) -> None:
        with self._lock:
            self._watches = (*self._watches, watch)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="collective-watch", daemon=True).start()

    def remove(self, watch: CollectiveWatch) -> None:
        """Stop to look at the watch of a dropped group."""
        with self._lock:
            self._watches = tuple(watched for watched in self._watches if watched is not watch)

    def _run(self) -> None:
        while True:
            with self._lock:
                watches = self._watches
                if not watches:
                    self._runs = False
                    return
            for watch in watches:
                watch.look()
            del watch, watches  # a dropped group is freed at once, not after the pause
            time.sleep(LOOK_SECONDS)
