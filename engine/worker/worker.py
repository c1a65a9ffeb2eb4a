"""Pull work, sample images, score the images and report the results. Every runtime uses the same worker class.

    pull -> load weights | denoise, looking up between steps -> score (in threads, beside the next work) -> finish

The worker only makes calls and receives none. A thread beside the denoising steps commits in-flight state at an
interval of steps. On a drain order, the worker commits the current step and takes no new work, so a preemption with
notice loses no step. Images that are sampled and still unscored are committed too, and another worker scores them. When
a lease is revoked (`Fenced`), the worker drops the work at once. The worker always runs the full shape named by the
work, padded with copies, so an image's bits do not depend on the worker. If the shape does not fit into memory, the
worker gives the lease back and reports the largest shape that may fit.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, assert_never

import torch

from engine.clock import Clock
from engine.diffusion.trajectory import Trajectory
from engine.events import Phase
from engine.models.adapter import DiTAdapter
from engine.models.merge import MergedAdapters, merges
from engine.out_of_memory import is_out_of_memory
from engine.parallel.elastic import Elastic
from engine.protocol.request import (
    TRAINED,
    Drain,
    Exit,
    Fenced,
    Kind,
    LoadWeights,
    Regroup,
    Reply,
    Wait,
    WeightsKey,
    Work,
    Yield,
)
from engine.rewards.reward import Reward
from engine.timing.work import NO_SECONDS, WorkSeconds
from engine.work_clock import NoMeter, WorkMeter
from engine.worker.commits import CommitSender
from engine.worker.coordinator_calls import CoordinatorCalls
from engine.worker.faults import LeaseFaults
from engine.worker.group_member import GroupMember
from engine.worker.loaded_weights import LoadedWeights
from engine.worker.phases import IDLE_KINDS, PHASE_OF
from engine.worker.sampling import ImageSampler
from engine.worker.scoring import ImageScorer
from engine.worker.scoring_call import ScoreLimits, ScorerHangs
from engine.worker.scoring_queue import ScoringQueue
from engine.worker.transport import Transport
from engine.worker.usage import Usage
from engine.worker.weight_source import FromCoordinator, WeightSource

TEND_SECONDS = 0.02
"""Interval of looks for finished scores, while the worker's own thread does other work."""

LAST_SCORES_SECONDS = 0.5
"""Wall seconds a drained worker waits for scores. A preemption notice may leave few seconds, and a scoring server may
take minutes."""

MOST_STUCK = 8
"""Calls of scorers that did not return and still run in the trainer's process. With more, the trainer starts anew from
its checkpoint, because each may use a core."""


@dataclass(kw_only=True)
class Worker:
    """Worker for one device. `may_load`: False for the trainer's own model, because only the trainer sets its weights.

    Scoring and commits run in threads of their own, so `transport` must accept calls from several threads. With
    `scored_beside` 0 and `overlap_commits` False, all calls come from one thread, in a reproducible order.
    """

    name: str
    node: str
    workers_of_node: int
    transport: Transport
    adapter: DiTAdapter
    parameters: dict[str, torch.nn.Parameter]
    reward: Reward
    clock: Clock
    heartbeat_seconds: float
    meter: WorkMeter = field(default_factory=NoMeter)
    """Reports the worker's work to the clock of a local run."""
    seconds: WorkSeconds = NO_SECONDS
    """Seconds of the worker's work on the reference machine."""
    kinds: Sequence[Kind] = tuple(Kind)
    may_load: bool = True
    scored_beside: int = 1
    """Leases that are scored while the next is sampled. 0: a lease is scored before the next is pulled."""
    scores_share_core: bool = True
    """Scoring uses the core of a worker that computes on a CPU. False: other processes or machines score."""
    overlap_commits: bool = True
    step_seconds: float = 0.0
    """Minimum wall seconds of a denoising step."""
    boot: int = field(default_factory=time.time_ns)
    """Start number of the process, to distinguish the process from an earlier one of the same name."""
    source: WeightSource | None = None
    """Source of weights; None: fetch weights from the coordinator."""
    student: Callable[[], Reward | None] = lambda: None
    """Loader of the reward's student, called at the first work with the scorer `student`. If the loader returns None,
    the reward scores instead."""
    draining: Callable[[], bool] = lambda: False
    """Return True once the node agent has received a preemption notice. Checked between steps, without a call."""
    trace: Callable[[Work, int], None] = lambda work, step: None
    """Callback after every step, with the number of finished steps."""
    resume: Literal["exact", "close", "restart"] = "close"
    """Treatment of interrupted images (engine/config.py)."""
    finished: Callable[[], None] = lambda: None
    """Callback after a lease is finished and its results are durable."""
    on_regroup: Callable[[Regroup], None] = lambda order: None
    """Callback with every regroup order, before the worker follows the order."""
    score_limits: ScoreLimits = field(default_factory=ScoreLimits)
    """The times in which the scorers must return."""
    elastic: Elastic | None = None
    """Member of the node's sequence-parallel groups; None: the worker always works alone."""

    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        self.usage = Usage(self.clock, self.meter)
        self.calls = CoordinatorCalls(
            transport=self.transport,
            usage=self.usage,
            worker=self.name,
            node=self.node,
            workers_of_node=self.workers_of_node,
            boot=self.boot,
        )
        self._faults = LeaseFaults(self.calls)
        self._interrupted: Callable[[], bool] = lambda: False
        self._waited = True
        """True if the last answer was no work."""
        self._renewed = 0.0
        """Time of the last renewal of leases that wait for scores (`time.perf_counter`)."""
        transformer, source = self.adapter.transformer, self.source or FromCoordinator(self.transport)
        merged = None
        if self.may_load and merges(transformer):
            merged = MergedAdapters(transformer, processes=self.workers_of_node)
        self._weights = LoadedWeights(self.parameters, source, merged)
        self._group = GroupMember(self.elastic, self.adapter, self._weights, self.usage, self._faults)
        self._commits = CommitSender(
            self.calls, self.clock, overlaps=self.overlap_commits, is_preemptible=self.may_load
        )
        self.scorer = ImageScorer(self.adapter, self.reward, self.student)
        self._scores = ScoringQueue(
            self.calls,
            self.usage,
            self.scorer,
            self._faults,
            heartbeat_seconds=self.heartbeat_seconds,
            reports_steps=self.elastic is not None,
            finished=self.finished,
            commit=lambda sampled: self._commit(sampled.work, sampled.trajectories),
            limits=self.score_limits,
            at_once=max(1, self.scored_beside),
            seconds=self.seconds,
        )
        self.sampler = ImageSampler(
            adapter=self.adapter,
            calls=self.calls,
            group=self._group,
            step_seconds=self.step_seconds,
            seconds=self.seconds,
            trace=self.trace,
            resume=self.resume,
            go_on=self._go_on,
            give_back=self._hand_back,
        )

    @property
    def holds(self) -> tuple[WeightsKey, str] | None:
        """Return the weights in the model and their digest; None: unknown."""
        return self._weights.key

    @property
    def stuck_calls(self) -> int:
        """Return the number of calls of scorers that did not return, and still run in this process."""
        return self._scores.stuck

    @property
    def waited_for_scores_seconds(self) -> float:
        """Return the seconds in which the worker did nothing but wait for scores."""
        return self._scores.waited_seconds

    def serve(self) -> str:
        """Work until the coordinator orders an exit. Returns the reason.

        Raises ScorerHangs after a scorer did not return: the next process starts without the threads of this one.
        """
        while True:
            reply = self.serve_once(wait=True)
            if isinstance(reply, Exit):
                print(f"waited {self.waited_for_scores_seconds:.1f} s for scores", flush=True)
                return reply.reason
            if self._scores.stuck:
                self._give_up_scoring()
                raise ScorerHangs("a scorer did not return; the process ends, and a new one starts")
            if isinstance(reply, Drain):
                # The node drains, so there is no work until the preemption, or until the coordinator withdraws the
                # drain.
                time.sleep(min(0.2, self.heartbeat_seconds))

    def serve_once(self, *, wait: bool, interrupted: Callable[[], bool] = lambda: False) -> Reply:
        """Pull once and follow the answer. Returns the order that was followed.

        `interrupted`: called between denoising steps. True gives the lease back, and the next worker resumes from this
        step.
        """
        self._interrupted, may_wait = interrupted, wait
        if self._scores.stuck > MOST_STUCK:
            raise ScorerHangs(f"{self._scores.stuck} calls of the scorer did not return; the process starts anew")
        if self.draining():
            return self._wind_up()
        if self._group.follows:
            handed = self._group.handed(self.heartbeat_seconds if wait else 0.0)
            if handed is not None:
                return self._group.follow(handed)
            wait = False  # no work was handed over, or the group is over: pull for news
        if not len(self._scores):
            self.usage.meter.keep_pace()
        reply = self.calls.pull(
            holds=self.holds,
            kinds=self.kinds,
            most_images=self._faults.most_images,
            group=self._group.report(),
            wait=wait and not len(self._scores),
        )
        if self._waited:
            self.usage.meter.waited()
        self._waited = isinstance(reply, Wait)
        match reply:
            case Work():
                self._do(reply)
            case LoadWeights():
                if not self.may_load:
                    return Wait()
                with self.usage.measure(Phase.SYNC):
                    self._weights.load(reply)
            case Wait():
                # A slow scorer must not keep the worker from new work, so the next pull comes soon.
                if may_wait:
                    self._scores.send(block=True, longest_seconds=self.heartbeat_seconds)
                else:
                    self.tend_scores()
            case Drain():
                self._give_up_scoring()
            case Exit():
                self._scores.send(block=may_wait)
            case Regroup() if self.elastic is not None:
                self.on_regroup(reply)
                with self.usage.measure(Phase.SYNC):
                    self.elastic.follow(reply)
            case Regroup() | Fenced() | Yield():
                raise RuntimeError(f"the coordinator answered a pull with {reply}, which this worker cannot follow")
            case _:
                assert_never(reply)
        return reply

    def assume(self, weights: WeightsKey, digest: str) -> None:
        """Record that the model already holds these weights. The trainer calls this after setting its own weights."""
        self._weights.key = (weights, digest)

    # --- scores -------------------------------------------------------------------------------------------

    @property
    def unscored(self) -> int:
        """Return the number of sampled leases whose scores were not sent."""
        return len(self._scores)

    def tend_scores(self) -> None:
        """Send the scores that are there, and renew the leases of the others when a heartbeat is due. Does not wait."""
        self._scores.send(block=False)
        leases, now = self._scores.leases(), time.perf_counter()
        if leases and now - self._renewed >= self.heartbeat_seconds:  # a pull renews no lease
            self._renewed = now
            reply = self.calls.heartbeat(leases)
            if isinstance(reply, Fenced):
                self._scores.drop(reply.lease)

    @contextmanager
    def scores_beside(self) -> Iterator[None]:
        """Tend the scores from a thread in the context. Its caller does other work there, and makes no call."""
        if not len(self._scores):
            yield
            return
        over = threading.Event()

        def tend() -> None:
            while len(self._scores) and not over.wait(TEND_SECONDS):
                self.tend_scores()

        self.calls.reports_usage = False
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="tend") as threads:
                tending = threads.submit(tend)
                try:
                    yield
                finally:
                    over.set()
            tending.result()
        finally:
            self.calls.reports_usage = True

    def wind_up_scores(self) -> None:
        """Send the scores that arrive soon, and give the other sampled leases back."""
        self._give_up_scoring()

    def _wind_up(self) -> Reply:
        """Send the scored results and take no new work.

        Called after the node agent received a preemption notice, even if the coordinator does not know the notice yet.
        """
        self._group.leave()
        self._give_up_scoring()
        reply = self.calls.heartbeat({})
        return reply if isinstance(reply, Exit) else Drain(deadline_ms=0)

    def _give_up_scoring(self) -> None:
        """Send the scores that arrive soon, and give the other sampled leases back.

        The next worker resumes after the last step, so only the scoring is repeated.
        """
        self._scores.send(block=True, longest_seconds=LAST_SCORES_SECONDS)
        for sampled in self._scores.take_unscored():
            self._hand_back(sampled.work, sampled.trajectories)

    def _do(self, work: Work) -> None:
        """Sample the images of a lease, and leave them to be scored."""
        kind = work.attempts[0].request.kind
        if kind in IDLE_KINDS and self.scores_share_core and self.sampler.device.type == "cpu":
            # Scoring would share the CPU core with the new work. The trainer waits for the pending scores, so scores go
            # first.
            self._scores.send(block=True, held=work)
        try:
            with self.usage.measure(PHASE_OF[kind]):
                sampled = self.sampler.sample(work)
                if sampled is None:
                    return
                self._scores.add(sampled)
            self._scores.send(block=True, keep=self.scored_beside)
            return
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
            self._group.tore()  # otherwise the other workers would wait for this forward pass
            if not is_out_of_memory(error):
                self._faults.report(work, error)
                return
            text = str(error)
        # Free memory only here: the error and the tensors of its frames are now released.
        self._faults.reduce_shape(work, text)

    # --- between denoising steps --------------------------------------------------------------------------

    def _go_on(self, work: Work, trajectories: list[Trajectory]) -> bool:
        """Return True if the worker may take the next step. Gives the work back when the node drains, or other work is
        more urgent."""
        self._scores.send(block=False)
        drain = self.draining()
        replies = [self._commits.answer(wait=False)]
        if not drain and time.perf_counter() - self.calls.last >= self.heartbeat_seconds:
            replies.append(self.calls.heartbeat({**self._scores.leases(), work.lease: trajectories[0].step}))
        for reply in replies:
            match reply:
                case Fenced():
                    self._scores.drop(reply.lease)
                    if reply.lease == work.lease:
                        return False
                case Exit():
                    return False
                case Drain() | Regroup() | Yield():  # preemption, an order to join another group, or rollouts wait
                    drain = True
                case _:
                    pass
        drain = drain or self._interrupted()
        if drain:
            self._hand_back(work, trajectories)
        elif self._commits.is_due(work, trajectories[0].step):
            with self.usage.measure(Phase.SYNC):
                self._commits.begin(work, trajectories)
        return not drain

    def _hand_back(self, work: Work, trajectories: list[Trajectory]) -> None:
        """Make the in-flight state durable, then give the lease back. The next worker resumes from this step."""
        self._commit(work, trajectories)
        self.calls.give_back(work.lease)

    def _commit(self, work: Work, trajectories: list[Trajectory]) -> None:
        """Make the in-flight state of images to train durable."""
        if work.attempts[0].request.kind in TRAINED and self.resume != "restart":
            with self.usage.measure(Phase.SYNC):
                self._commits.answer(wait=True)
                if self._commits.last != (work.lease, trajectories[0].step):
                    self._commits.begin(work, trajectories)
                    self._commits.answer(wait=True)
