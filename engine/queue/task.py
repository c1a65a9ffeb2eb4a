"""Submitted tasks and their requests while the requests are in the queue.

The promise: a request is in the backlog or in leases, never in both. `slot` and `leases` say where.
"""

from dataclasses import dataclass, field

from engine.protocol.request import Attempt, RequestId
from engine.protocol.task import Task
from engine.queue.pace import Pace


@dataclass(slots=True, eq=False)
class Submission:
    """A task with the values needed for each of its requests."""

    number: int
    task: Task
    pace: Pace
    shown: frozenset[RequestId]


Slot = tuple[int, int, RequestId | None]
"""The slot of a waiting request: (submission, committed step, the request itself if it must run alone, else None).
A lease takes requests from a single slot."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """An unfinished request: leased, waiting or poisoned."""

    attempt: Attempt
    of: Submission
    leases: list[int] = field(default_factory=list)
    slot: Slot | None = None
    """The request's slot in the backlog. None: the request does not wait."""
    crashes: int = 0
    crashed_at: int = -1
    """The committed step at the last crash. A crash at a later step resets the count: the request made progress."""

    hung: bool = False
    """The scorer did not return for a lease with this request."""

    def commit(self, step: int, blob: str) -> None:
        """Resume from this state in the next attempt."""
        self.attempt = Attempt(request=self.attempt.request, weights=self.attempt.weights, step=step, state=blob)
