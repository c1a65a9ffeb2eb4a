"""Sampled leases that wait for their scores. Threads score them beside the next work; finished leases are sent.

The worker keeps each lease until its scores are sent, and heartbeats renew the lease. A score therefore reaches the
queue only with a valid lease: no image is finished twice, and none is finished unscored.

A scorer that does not return in time (scoring_call.py) ends no run by itself, and no lease is renewed for it without
end: its images are returned as a fault and scored once more, each by itself. An image alone that is late again is
finished without a score.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from math import nan

import torch
from safetensors.torch import save
from torch import Tensor

from engine.diffusion.images import as_bytes
from engine.out_of_memory import is_out_of_memory
from engine.protocol.messages import Result, StepTime
from engine.protocol.request import TRAINED, Fenced, Finished, Score, Work, request_class
from engine.timing.work import NO_SECONDS, WorkSeconds
from engine.worker.commits import blob_name
from engine.worker.coordinator_calls import CoordinatorCalls
from engine.worker.faults import LeaseFaults
from engine.worker.phases import PHASE_OF
from engine.worker.sampling import Sampled
from engine.worker.scoring import ImageScorer
from engine.worker.scoring_call import ScoreLimits, ScoringCall
from engine.worker.usage import Usage


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unscored:
    """A lease with sampled images. `call` gives the scores and the images."""

    sampled: Sampled
    call: ScoringCall


class ScoringQueue:
    """The leases of one worker between the last step and `finish`.

    `reports_steps`: report the seconds of a step with each finished lease. `finished`: called after a lease is finished
    and its results are durable. `at_once`: most leases that are scored at the same time.
    """

    def __init__(
        self,
        calls: CoordinatorCalls,
        usage: Usage,
        scorer: ImageScorer,
        faults: LeaseFaults,
        *,
        heartbeat_seconds: float,
        reports_steps: bool,
        finished: Callable[[], None],
        commit: Callable[[Sampled], None],
        limits: ScoreLimits,
        at_once: int = 1,
        seconds: WorkSeconds = NO_SECONDS,
    ) -> None:
        """`commit`: make the state of sampled images durable. `seconds`: of the work on the reference machine."""
        self._calls, self._usage, self._scorer, self._faults = calls, usage, scorer, faults
        self._heartbeat_seconds, self._reports_steps, self._finished = heartbeat_seconds, reports_steps, finished
        self._seconds = seconds
        self._unscored: list[_Unscored] = []
        self.waited_seconds = 0.0
        """Seconds in which the worker did nothing but wait for scores."""
        self._commit, self._limits = commit, limits
        self._turns = threading.Semaphore(at_once)
        self._given_up: list[ScoringCall] = []

    def __len__(self) -> int:
        """Return the number of unscored leases."""
        return len(self._unscored)

    def add(self, sampled: Sampled) -> None:
        """Start to score a lease."""
        latents = torch.stack([trajectory.x for trajectory in sampled.trajectories])
        prompts = [attempt.request.prompt for attempt in sampled.work.attempts]
        work = sampled.work
        call = ScoringCall(
            self._scorer, latents, prompts, work.scorer, work.no_score, turns=self._turns, limits=self._limits
        )
        self._unscored.append(_Unscored(sampled=sampled, call=call))

    @property
    def stuck(self) -> int:
        """Return the number of calls that were given up and still run in this process."""
        self._given_up = [call for call in self._given_up if call.thread.is_alive()]
        return len(self._given_up)

    def leases(self) -> dict[int, int]:
        """Return the finished step by lease, for a heartbeat."""
        return {unscored.sampled.work.lease: unscored.sampled.trajectories[0].step for unscored in self._unscored}

    def drop(self, lease: int) -> None:
        """Drop a revoked lease."""
        self._unscored = [unscored for unscored in self._unscored if unscored.sampled.work.lease != lease]

    def take_unscored(self) -> list[Sampled]:
        """Remove and return the unscored leases. Their scores are dropped when they arrive."""
        sampled, self._unscored = [unscored.sampled for unscored in self._unscored], []
        return sampled

    def send(
        self, *, block: bool, keep: int = 0, held: Work | None = None, longest_seconds: float | None = None
    ) -> None:
        """Send finished scores. With `block`, wait until at most `keep` leases are unscored.

        `held`: leased work that starts only after the wait; heartbeats renew its lease. `longest_seconds`: of the wait;
        None: no limit.
        """
        until = float("inf") if longest_seconds is None else time.monotonic() + longest_seconds
        for unscored in list(self._unscored):
            if block and len(self._unscored) > keep:
                self._wait_for(unscored, held, until)
            if unscored in self._unscored and unscored.call.is_late:
                self._unscored.remove(unscored)
                self._give_up(unscored)
                continue
            if not unscored.call.scores.done() or unscored not in self._unscored:
                continue
            self._unscored.remove(unscored)
            try:
                scores = unscored.call.scores.result()
            except Exception as error:  # a user's reward may raise anything; the fault is reported
                if is_out_of_memory(error):
                    self._faults.reduce_shape(unscored.sampled.work, str(error))
                else:
                    self._faults.report(unscored.sampled.work, error)
                continue
            self._finish(unscored.sampled, scores, unscored.call.images)

    def _wait_for(self, unscored: _Unscored, held: Work | None, until: float) -> None:
        """Wait until the lease is scored or revoked, at most until the monotonic time `until`.

        Scoring may last longer than a lease, so heartbeats renew all leases.
        """
        phase = PHASE_OF[unscored.sampled.work.attempts[0].request.kind]
        while unscored in self._unscored:
            begun = time.monotonic()
            with self._usage.measure(phase):
                longest = max(0.0, min(self._heartbeat_seconds, until - begun, unscored.call.seconds_left))
                wait_for([unscored.call.scores], timeout=longest)
            self.waited_seconds += time.monotonic() - begun
            if unscored.call.scores.done() or unscored.call.is_late:
                return
            leases = self.leases()
            if held is not None:
                leases[held.lease] = held.attempts[0].step
            reply = self._calls.heartbeat(leases)
            if isinstance(reply, Fenced):
                self.drop(reply.lease)
            if time.monotonic() >= until:
                return

    def _give_up(self, unscored: _Unscored) -> None:
        """Report a call that is late. Several images are scored again one by one; a single image gets no score."""
        sampled = unscored.sampled
        unscored.call.give_up()
        self._given_up.append(unscored.call)
        images = len(sampled.work.attempts)
        text = self._limits.late(sampled.work.scorer, images)
        if images > 1:
            print(f"{text}; they are scored again one by one", flush=True)
            self._commit(sampled)
            self._calls.fault(sampled.work.lease, f"{text}; they are scored again one by one", hangs=True)
            return
        print(f"{text}; it has no score", flush=True)
        self._finish(
            sampled, [Score(reward=nan, metrics={}, fault=text)], unscored.call.images, hangs=f"{text}; no score"
        )

    def _finish(self, sampled: Sampled, scores: list[Score], images: Tensor | None, hangs: str = "") -> None:
        """Send the scores of a lease. `images`: None if they could not be decoded. `hangs`: as in `Finish`."""
        work = sampled.work
        results, blobs = [], {}
        for i, (attempt, score) in enumerate(zip(work.attempts, scores, strict=True)):
            name = None
            if attempt.request.kind in TRAINED or work.latents:
                name = blob_name(attempt.request, sampled.trajectories[i].step)
                blobs[name] = sampled.trajectories[i].to_bytes()
            elif work.images[i] and images is not None:
                name = blob_name(attempt.request, sampled.trajectories[i].step)
                blobs[name] = save({"picture": as_bytes(images[i])})
            results.append(Result.of(Finished(request=attempt.request, score=score, trajectory=name)))
        pace = None
        if self._reports_steps:
            class_ = request_class(work.shape, work.dtype)
            pace = StepTime(request_class=class_, degree=sampled.degree, seconds=sampled.step_seconds)
        if not isinstance(self._calls.finish(work.lease, results, blobs, pace, hangs=hangs), Fenced):
            self._finished()
        self._usage.meter.done(self._seconds.scored(len(results), by_student=work.scorer == "student"))
        self._faults.clear()
