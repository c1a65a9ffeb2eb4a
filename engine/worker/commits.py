"""Commits of in-flight state: the latents and log-probs from which another worker resumes an image.

At most one commit is in progress. Sampling goes on meanwhile.
"""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from engine.clock import Clock
from engine.diffusion.trajectory import Trajectory
from engine.protocol.messages import CommittedState
from engine.protocol.request import TRAINED, Reply, RequestId, Work
from engine.worker.coordinator_calls import CoordinatorCalls


@dataclass(frozen=True, kw_only=True, eq=False)
class Commit:
    """A commit in progress. `answer` gives the coordinator's reply and the commit's cost (run's clock ms)."""

    lease: int
    step: int
    answer: "Future[tuple[Reply, float]]"


class CommitSender:
    """Sends commits of one worker. `is_preemptible`: False for the trainer's worker, whose disk no preemption takes."""

    def __init__(self, calls: CoordinatorCalls, clock: Clock, *, overlaps: bool, is_preemptible: bool) -> None:
        self._calls, self._clock, self._overlaps, self._is_preemptible = calls, clock, overlaps, is_preemptible
        self._under_way: Commit | None = None
        self.last = (0, 0)
        """Lease and step of the newest commit sent."""
        self._cost_ms: float | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")

    def is_due(self, work: Work, step: int) -> bool:
        """Return True if a commit is due and no commit is in progress."""
        if not work.commit_every or not self._is_preemptible or self._under_way is not None:
            return False
        lease, committed = self.last
        since = step - (committed if lease == work.lease else work.attempts[0].step)
        return work.attempts[0].request.kind in TRAINED and since >= work.commit_every

    def begin(self, work: Work, trajectories: list[Trajectory]) -> None:
        """Send the current state of the lease.

        The sending thread reads the trajectories while sampling goes on: each step replaces a trajectory and changes
        none.
        """
        step = trajectories[0].step
        if self._overlaps:
            answer = self._thread.submit(self._send, work, trajectories, self._cost_ms)
        else:
            answer = Future()
            answer.set_result(self._send(work, trajectories, self._cost_ms))
        self._under_way = Commit(lease=work.lease, step=step, answer=answer)
        self.last = (work.lease, step)

    def _send(self, work: Work, trajectories: list[Trajectory], commit_ms: float | None) -> tuple[Reply, float]:
        begun = time.perf_counter()
        states, blobs = [], {}
        for attempt, trajectory in zip(work.attempts, trajectories, strict=True):
            name = blob_name(attempt.request, trajectory.step)
            states.append(CommittedState(request=attempt.request, step=trajectory.step, blob=name))
            blobs[name] = trajectory.to_bytes()
        reply = self._calls.commit(work.lease, states, blobs, commit_ms)
        return reply, (time.perf_counter() - begun) / self._clock.wall_seconds(1)

    def answer(self, *, wait: bool) -> Reply | None:
        """Return the answer to the commit in progress, or None if the answer is not there yet.

        Raises the error of the call.
        """
        if self._under_way is None or not (wait or self._under_way.answer.done()):
            return None
        commit, self._under_way = self._under_way, None
        reply, self._cost_ms = commit.answer.result()
        return reply


def blob_name(request: RequestId, step: int) -> str:
    """Return the name of the blob of an image at a step."""
    text = json.dumps([*msgspec.to_builtins(request), step])
    return blake2b(text.encode(), digest_size=12).hexdigest()
