"""Exploration desk: the next candidates for workers that would be idle.

The desk estimates the idle time from the last training phases, and the seconds of a candidate from the workers' usage.
The promise: no candidate is submitted while a request of higher priority waits. The estimates are not stored: a
restarted coordinator begins with no measurements, like a new run.
"""

from collections.abc import Sequence

from engine.clock import Clock
from engine.events import Phase
from engine.exploration.batch import BatchExploration
from engine.exploration.budget import PHASES, candidates_that_fit, seconds_until_trained
from engine.protocol.messages import Span
from engine.protocol.request import WeightsKey
from engine.protocol.task import Task
from engine.queue.priority import PRIORITY
from engine.queue.queue import Queue


class ExplorationDesk:
    """Estimates of idle time, and the tasks made from them."""

    def __init__(self, clock: Clock, lease_ms: int) -> None:
        """`lease_ms`: length of a lease. A node that made no call for two lengths is left out of the estimates."""
        self._clock, self._silence_ms = clock, 2 * lease_ms
        self._explorers: dict[str, str] = {}
        """Node of each exploring worker."""
        self.phase_seconds: list[float] = []
        """Wall seconds of the last training phases, each from the last rollout of a batch to the next weights."""
        self._since_ms: int | None = None
        """Arrival of the last rollout of the open batch (run's clock); None while rollouts are missing."""
        self._exploring_ms = 0.0
        self._candidates = 0
        self._dealt = False
        """True if candidates were submitted since the last end of a training phase."""

    @property
    def exploring_seconds(self) -> float:
        """GPU-seconds of exploration since the start of this process."""
        return self._clock.wall_seconds(round(self._exploring_ms))

    def add_explorer(self, worker: str, node: str) -> None:
        """Record a worker that takes candidates."""
        self._explorers[worker] = node

    def add_usage(self, spans: Sequence[Span]) -> None:
        """Record a worker's usage."""
        self._exploring_ms += sum(end - begin for phase, begin, end in spans if phase == Phase.EXPLORATION)

    def add_candidates(self, count: int) -> None:
        """Record finished candidates."""
        self._candidates += count

    def begin_training_phase(self, now_ms: int) -> None:
        """Record that no rollout of the open batch is missing. A repeated call changes nothing."""
        if self._since_ms is None:
            self._since_ms = now_ms

    def end_training_phase(self, now_ms: int) -> None:
        """Record that the weights of the next batch are published."""
        if self._since_ms is not None:
            seconds = self._clock.wall_seconds(now_ms - self._since_ms)
            self.phase_seconds = [*self.phase_seconds[1 - PHASES :], seconds]
            self._since_ms = None
        self._dealt = False

    def next_task(self, exploration: BatchExploration | None, queue: Queue, now_ms: int) -> Task | None:
        """Return a task with more candidates once every submitted candidate is leased, else None."""
        if exploration is None or any(queue.waits(kind) for kind in PRIORITY):
            return None
        nodes = queue.live_nodes(now_ms, self._silence_ms)
        requests = exploration.more(self._candidates_that_fit(nodes, exploration.pending, now_ms))
        if not requests:
            return None
        self._dealt = True
        order = exploration.order
        return Task(
            requests=requests,
            weights=WeightsKey(version=order.version),
            sampler=order.sampler,
            steps=order.steps,
            # A counted budget repeats bit for bit, so every forward pass has the full shape. Otherwise a pass has the
            # shape of its candidates, because a full pass may not fit into the idle time.
            shape=order.shape if order.counted is not None else min(order.shape, len(requests)),
            dtype=order.dtype,
            scorer=order.scorer,
            latents=order.latents,
        )

    def _candidates_that_fit(self, nodes: Sequence[str], pending: int, now_ms: int) -> int:
        """Return the number of candidates to add, given the live nodes and `pending` candidates in progress.

        If the idle time is too short for a candidate, one task is tried in each training phase. Without the trial, a
        slow first measurement (a GPU's first forward pass) would turn exploration off for the rest of the run.
        """
        elapsed = 0.0 if self._since_ms is None else self._clock.wall_seconds(now_ms - self._since_ms)
        seconds_left = seconds_until_trained(self.phase_seconds, elapsed_seconds=elapsed)
        gpus = sum(node in nodes for node in self._explorers.values())
        per_candidate = self.exploring_seconds / self._candidates if self._candidates else None
        fit = candidates_that_fit(
            seconds_left, gpus=gpus, gpu_seconds_per_candidate=per_candidate or None, pending=pending
        )
        if fit == 0 and not self._dealt:
            fit = candidates_that_fit(seconds_left, gpus=gpus, gpu_seconds_per_candidate=None, pending=pending)
        return fit
