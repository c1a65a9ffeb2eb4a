"""Tasks and the requests of a task while the requests are in the queue.

The promise: a task is checked when it is built, before the coordinator writes the task to the journal.
"""

from dataclasses import dataclass, field
from typing import get_args

from engine.protocol.request import Attempt, Kind, RequestId, Scorer, WeightsKey, request_class
from engine.queue.pace import Pace


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A set of requests that share weights and sampler plan, as submitted by the trainer.

    `sampler` is the plan as JSON (engine/diffusion/sampler.py). `steps` is the plan's number of denoising steps.
    `pictures` is the number of leading requests whose finished image is sent back. All requests have the same kind.
    Raises ValueError if the scorer is the student and the kind is not exploration: training and reports use the reward.
    """

    requests: tuple[RequestId, ...]
    weights: WeightsKey
    sampler: str
    steps: int
    shape: int
    dtype: str
    pictures: int = 0
    scorer: Scorer = "reward"

    @property
    def request_class(self) -> str:
        return request_class(self.shape, self.dtype)

    def __post_init__(self) -> None:
        # Check here and not in `submit`: a task rejected by the queue must not be in the journal already.
        if self.scorer not in get_args(Scorer):
            raise ValueError(f"a task's scorer is {self.scorer!r}; use one of {', '.join(get_args(Scorer))}")
        others = {str(request.kind) for request in self.requests} - {str(Kind.EXPLORE)}
        if self.scorer == "student" and others:
            raise ValueError(
                f"a task of kind {', '.join(sorted(others))} names the student as its scorer; only exploration may, "
                "because a student ranks seeds and its scores are not the reward; use scorer='reward'"
            )


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

    def commit(self, step: int, blob: str) -> None:
        """Resume from this state in the next attempt."""
        self.attempt = Attempt(request=self.attempt.request, weights=self.attempt.weights, step=step, state=blob)
