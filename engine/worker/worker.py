"""Pull work, sample images, score the images and report the results. Every runtime uses the same worker class.

    pull -> load weights | denoise, looking up between steps -> score (in a thread, beside the next work) -> finish

The worker only makes calls and receives none. A thread beside the denoising steps commits in-flight state at an
interval of steps. On a drain order, the worker commits the current step and takes no new work, so a preemption with
notice loses no step. When a lease is revoked (`Fenced`), the worker drops the work at once. The worker always runs the
full shape named by the work, padded with copies, so an image's bits do not depend on the worker. If the shape does not
fit into memory, the worker gives the lease back and reports the largest shape that may fit.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, assert_never

import msgspec
import torch
from safetensors.torch import save
from torch import Tensor

from engine.clock import Clock
from engine.diffusion.images import as_bytes
from engine.diffusion.sampler import Plan, advance, initial
from engine.diffusion.trajectory import Trajectory
from engine.events import Phase
from engine.models.adapter import DiTAdapter
from engine.models.half import half_precision
from engine.models.weights import set_weights
from engine.parallel.communicator import TornGroup
from engine.parallel.elastic import Elastic
from engine.protocol.messages import GroupReport, Result, SharedWork, StepTime
from engine.protocol.request import (
    Drain,
    Exit,
    Fenced,
    Finished,
    Kind,
    LoadWeights,
    Regroup,
    Reply,
    Score,
    Wait,
    WeightsKey,
    Work,
    request_class,
)
from engine.rewards.reward import Reward
from engine.worker.commits import CommitSender, blob_name
from engine.worker.coordinator_calls import CoordinatorCalls
from engine.worker.image_inputs import ImageInputs
from engine.worker.memory import is_out_of_memory
from engine.worker.phases import IDLE_KINDS, PHASE_OF
from engine.worker.scoring import ImageScorer
from engine.worker.transport import Transport
from engine.worker.usage import Usage
from engine.worker.weight_source import FromCoordinator, WeightSource

MOST_FAULTS = 10
"""Failures in a row after which the process ends. The node's agent then starts a new process."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Made:
    """A lease with sampled images, still to be scored and sent."""

    work: Work
    trajectories: list[Trajectory]
    scoring: "Future[tuple[list[Score], Tensor]]"
    paced: tuple[int, float]
    """Number of workers that shared the lease, and seconds per step."""


@dataclass(kw_only=True)
class Worker:
    """Worker for one device. `may_load`: False for the trainer's own model, because only the trainer sets its weights.

    Scoring and commits run in threads of their own, so `transport` must accept calls from several threads. With both
    `overlap_...` fields False, all calls come from one thread, in a reproducible order.
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
    kinds: Sequence[Kind] = tuple(Kind)
    may_load: bool = True
    overlap_scoring: bool = True
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
    heard: Callable[[Regroup], None] = lambda order: None
    """Callback with every regroup order, before the worker follows the order."""
    elastic: Elastic | None = None
    """Member of the node's sequence-parallel groups; None: the worker always works alone."""

    usage: Usage = field(init=False)
    holds: tuple[WeightsKey, str] | None = field(default=None, init=False)
    room: int | None = field(default=None, init=False)
    """Largest number of images in one forward pass; None until a shape did not fit into memory."""

    def __post_init__(self) -> None:
        self.usage = Usage(self.clock)
        self.source = self.source or FromCoordinator(self.transport)
        self.calls = CoordinatorCalls(
            transport=self.transport,
            usage=self.usage,
            worker=self.name,
            node=self.node,
            workers_of_node=self.workers_of_node,
            boot=self.boot,
        )
        self._pending: list[_Made] = []
        self._commits = CommitSender(
            self.calls, self.clock, overlaps=self.overlap_commits, is_preemptible=self.may_load
        )
        self._paced = (1, 0.0)
        self.scorer = ImageScorer(self.adapter, self.reward, self.student)
        self._scoring_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="score")
        self._faults_in_a_row = 0

    # --- the loop ---------------------------------------------------------------------------------------

    def serve(self) -> str:
        """Work until the coordinator orders an exit. Returns the reason."""
        while True:
            reply = self.serve_once(wait=True)
            if isinstance(reply, Exit):
                return reply.reason
            if isinstance(reply, Drain):
                # Nothing to do until the node is wanted again or is gone.
                time.sleep(min(0.2, self.heartbeat_seconds))

    def serve_once(self, *, wait: bool) -> Reply:
        """Pull once and follow the answer. Returns the order that was followed."""
        if self.draining():
            return self._wind_up()
        if self.elastic is not None and self.elastic.follows:
            handed = self.elastic.handed(self.heartbeat_seconds if wait else 0.0)
            if handed is not None:
                return self._follow(handed)
            wait = False  # no work was handed over, or the group is over: pull for news
        reply = self.calls.pull(
            holds=self.holds,
            kinds=self.kinds,
            room=self.room,
            group=self._group_report(),
            wait=wait and not self._pending,
        )
        match reply:
            case Work():
                self._do(reply)
            case LoadWeights():
                if not self.may_load:
                    return Wait()
                with self.usage.measure(Phase.SYNC):
                    self._load(reply)
            case Wait() | Drain() | Exit():
                self._settle(block=True)
            case Regroup() if self.elastic is not None:
                self.heard(reply)
                with self.usage.measure(Phase.SYNC):
                    self.elastic.follow(reply)
            case Regroup() | Fenced():
                raise RuntimeError(f"the coordinator answered a pull with {reply}, which this worker cannot follow")
            case _:
                assert_never(reply)
        return reply

    def assume(self, weights: WeightsKey, digest: str) -> None:
        """Record that the model already holds these weights. The trainer calls this after setting its own weights."""
        self.holds = (weights, digest)

    def _wind_up(self) -> Reply:
        """Send the scored results and take no new work.

        Used after the node agent received a notice, even if the coordinator has not heard of the notice.
        """
        if self.elastic is not None:
            self.elastic.leave()
        self._settle(block=True)
        reply = self.calls.heartbeat({})
        return reply if isinstance(reply, Exit) else Drain(deadline_ms=0)

    # --- sampling images --------------------------------------------------------------------------------

    def _do(self, work: Work) -> None:
        kind = work.attempts[0].request.kind
        if kind in IDLE_KINDS and self._device.type == "cpu":
            # Scoring would share the CPU core with the new work. The trainer waits for the pending scores, so scores go
            # first.
            self._settle(block=True, held=work)
        try:
            with self.usage.measure(PHASE_OF[kind]):
                trajectories = self._denoise(work)
                if trajectories is None:
                    return
                latents = torch.stack([trajectory.x for trajectory in trajectories])
                prompts = [a.request.prompt for a in work.attempts]
                scoring = self._scoring_thread.submit(self.scorer, latents, prompts, work.scorer)
                made = _Made(work=work, trajectories=trajectories, scoring=scoring, paced=self._paced)
            self._pending.append(made)
            self._settle(block=True, keep=1 if self.overlap_scoring else 0)
            return
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
            self._tore()  # or the other workers would wait for this forward pass
            if not is_out_of_memory(error):
                self._fault(work, error)
                return
            text = str(error)
        # Free memory only here: the error and the tensors of its frames are now released.
        self._make_room(work, text)

    def _denoise(self, work: Work) -> list[Trajectory] | None:
        """Denoise all images of a lease, step by step. Returns None if the lease was revoked or given back."""
        made = ImageInputs.of(work, self.adapter)
        trajectories = self._begin(work, made.seeds)
        x = torch.stack([trajectories[i].x for i in made.filled]).to(self._device)
        seconds: list[float] = []
        try:
            self._hand_out(work, x, trajectories[0].step)
            with self._precision(work):
                for step in range(trajectories[0].step, made.plan.steps):
                    begun = time.perf_counter()
                    x, log_probs = advance(self.adapter, made.plan, made.conditioning, made.seeds, x, step)
                    if x.is_cuda:
                        torch.cuda.synchronize(x.device)  # queued work can be neither timed nor stopped
                    trajectories = self._record(made.plan, work, trajectories, x, log_probs)
                    time.sleep(max(0.0, begun + self.step_seconds - time.perf_counter()))
                    seconds.append(time.perf_counter() - begun)
                    self.trace(work, step + 1)
                    if step + 1 < made.plan.steps and not self._agree(self._go_on(work, trajectories)):
                        return None
        except TornGroup:
            self._tore()
            self._hand_back(work, trajectories)
            return None
        self._paced = (self._degree, median(seconds or [0.0]))
        return trajectories

    def _precision(self, work: Work) -> contextlib.AbstractContextManager[None]:
        return half_precision(self.adapter.transformer) if work.dtype == "bfloat16" else contextlib.nullcontext()

    @property
    def _degree(self) -> int:
        """Return the number of workers that share this worker's images."""
        return 1 if self.elastic is None else self.elastic.degree

    @property
    def _device(self) -> torch.device:
        return next(self.adapter.transformer.parameters()).device

    def _begin(self, work: Work, seeds: Sequence[int]) -> list[Trajectory]:
        """Return the start state of the images: the committed states if a resume is allowed, else the initial noise."""
        if work.attempts[0].step and self.resume != "restart":
            names = [str(attempt.state) for attempt in work.attempts]
            states = self.calls.states(names)
            found = [Trajectory.from_bytes(states[name]) for name in names]
            if self.resume == "close" or all(t.degree == self._degree for t in found):
                return found
        noise = initial(seeds[: len(work.attempts)], self.adapter.latent_shape())
        return [Trajectory.begin(x) for x in noise]

    def _record(
        self, plan: Plan, work: Work, trajectories: list[Trajectory], x: Tensor, log_probs: Tensor
    ) -> list[Trajectory]:
        if work.attempts[0].request.kind is not Kind.TRAIN:
            return [
                replace(t, step=t.step + 1, x=row)  # never resumed, and only the final latents are used
                for t, row in zip(trajectories, x, strict=False)
            ]
        kept = zip(trajectories, x.cpu(), log_probs.cpu(), strict=False)
        return [t.then(plan, row, p, self._degree) for t, row, p in kept]

    # --- in a sequence-parallel group ----------------------------------------------------------------------

    def _group_report(self) -> GroupReport | None:
        return None if self.elastic is None else self.elastic.report()

    def _hand_out(self, work: Work, x: Tensor, step: int) -> None:
        """Start the other workers of the group on the same images, from these latents on."""
        if self.elastic is not None and self.elastic.degree > 1:
            assert self.holds is not None
            shared = SharedWork(work=work, digest=self.holds[1], step=step)
            self.elastic.hand_out(msgspec.json.encode(shared))
            self.elastic.share(x)

    def _agree(self, go_on: bool) -> bool:
        return go_on if self.elastic is None else self.elastic.agree(go_on, self._device)

    def _tore(self) -> None:
        if self.elastic is not None:
            self.elastic.tore()

    def _follow(self, handed: bytes) -> Reply:
        """Compute the forward passes of the group's first worker.

        The first worker records, commits, scores and decides.
        """
        assert self.elastic is not None
        shared = msgspec.json.decode(handed, type=SharedWork)
        work = shared.work
        try:
            self._hold(work.attempts[0].weights, shared.digest)
            made = ImageInputs.of(work, self.adapter)
            x = torch.empty(len(made.seeds), *self.adapter.latent_shape(), device=self._device)
            with self.usage.measure(PHASE_OF[work.attempts[0].request.kind]), self._precision(work):
                self.elastic.share(x)
                for step in range(shared.step, made.plan.steps):
                    x, _ = advance(self.adapter, made.plan, made.conditioning, made.seeds, x, step)
                    if step + 1 < made.plan.steps and not self.elastic.agree(True, self._device):
                        break
            self._faults_in_a_row = 0
        except TornGroup:
            self.elastic.tore()
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
            self.elastic.tore()
            self._faults_in_a_row += 1
            print(f"could not follow lease {work.lease}: {type(error).__name__}: {error}", flush=True)
            if self._faults_in_a_row >= MOST_FAULTS:
                raise
        return work

    def _hold(self, weights: WeightsKey, digest: str) -> None:
        if self.holds != (weights, digest):
            self._load(LoadWeights(weights=weights, digest=digest))
        if self.holds != (weights, digest):
            raise RuntimeError(f"weights {weights} with digest {digest} were published anew meanwhile")

    # --- between denoising steps --------------------------------------------------------------------------

    def _go_on(self, work: Work, trajectories: list[Trajectory]) -> bool:
        """Return True if the worker may take the next step. Gives the work back when the node drains."""
        self._settle(block=False)
        drain = self.draining()
        replies = [self._commits.answer(wait=False)]
        if not drain and time.perf_counter() - self.calls.last >= self.heartbeat_seconds:
            leases = {made.work.lease: made.trajectories[0].step for made in self._pending}
            leases[work.lease] = trajectories[0].step
            replies.append(self.calls.heartbeat(leases))
        for reply in replies:
            match reply:
                case Fenced():
                    self._fenced(reply.lease)
                    if reply.lease == work.lease:
                        return False
                case Exit():
                    return False
                case Drain() | Regroup():  # preemption, or an order to join another group
                    drain = True
                case _:
                    pass
        if drain:
            self._hand_back(work, trajectories)
        elif self._commits.is_due(work, trajectories[0].step):
            with self.usage.measure(Phase.SYNC):
                self._commits.begin(work, trajectories)
        return not drain

    def _hand_back(self, work: Work, trajectories: list[Trajectory]) -> None:
        """Make the in-flight state durable, then give the lease back. The next worker resumes from this step."""
        if work.attempts[0].request.kind is Kind.TRAIN and self.resume != "restart":
            with self.usage.measure(Phase.SYNC):
                self._commits.answer(wait=True)
                if self._commits.last != (work.lease, trajectories[0].step):
                    self._commits.begin(work, trajectories)
                    self._commits.answer(wait=True)
        self.calls.give_back(work.lease)

    # --- scoring ------------------------------------------------------------------------------------------

    def _settle(self, *, block: bool, keep: int = 0, held: Work | None = None) -> None:
        """Send finished scores. With `block`, wait until at most `keep` leases are unscored.

        `held`: leased work that starts only after the wait; heartbeats renew its lease.
        """
        for made in list(self._pending):
            if block and len(self._pending) > keep:
                self._wait_for(made, held)
            if not made.scoring.done() or made not in self._pending:
                continue
            self._pending.remove(made)
            try:
                scores, pictures = made.scoring.result()
            except Exception as error:  # a user's reward may raise anything; the fault is reported
                if is_out_of_memory(error):
                    self._make_room(made.work, str(error))
                else:
                    self._fault(made.work, error)
                continue
            self._finish(made, scores, pictures)

    def _wait_for(self, made: _Made, held: Work | None) -> None:
        """Wait until the lease is scored or revoked.

        Scoring may last longer than a lease, so heartbeats renew all leases.
        """
        phase = PHASE_OF[made.work.attempts[0].request.kind]
        while made in self._pending:
            with self.usage.measure(phase):
                wait_for([made.scoring], timeout=self.heartbeat_seconds)
            if made.scoring.done():
                return
            leases = {pending.work.lease: pending.trajectories[0].step for pending in self._pending}
            if held is not None:
                leases[held.lease] = held.attempts[0].step
            reply = self.calls.heartbeat(leases)
            if isinstance(reply, Fenced):
                self._fenced(reply.lease)

    def _finish(self, made: _Made, scores: list[Score], pictures: Tensor) -> None:
        results, blobs = [], {}
        for i, (attempt, score) in enumerate(zip(made.work.attempts, scores, strict=True)):
            name = None
            if attempt.request.kind is Kind.TRAIN:
                name = blob_name(attempt.request, made.trajectories[i].step)
                blobs[name] = made.trajectories[i].to_bytes()
            elif made.work.pictures[i]:
                name = blob_name(attempt.request, made.trajectories[i].step)
                blobs[name] = save({"picture": as_bytes(pictures[i])})
            results.append(Result.of(Finished(request=attempt.request, score=score, trajectory=name)))
        pace = None
        if self.elastic is not None:
            degree, seconds = made.paced
            class_ = request_class(made.work.shape, made.work.dtype)
            pace = StepTime(request_class=class_, degree=degree, seconds=seconds)
        if not isinstance(self.calls.finish(made.work.lease, results, blobs, pace), Fenced):
            self.finished()
        self._faults_in_a_row = 0

    def _fenced(self, lease: int) -> None:
        self._pending = [made for made in self._pending if made.work.lease != lease]

    def _make_room(self, work: Work, text: str) -> None:
        """Record that the shape does not fit, and give the lease back without a fault.

        The next pull reports the smaller limit.
        """
        self.room = min(work.shape - 1, work.shape if self.room is None else self.room)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"{work.shape} pictures do not fit into memory, at most {self.room} from now on: {text}", flush=True)
        self.calls.give_back(work.lease)

    def _fault(self, work: Work, error: BaseException) -> None:
        self._faults_in_a_row += 1
        text = f"{type(error).__name__}: {error}"[:500]
        self.calls.fault(work.lease, text)
        if self._faults_in_a_row >= MOST_FAULTS:
            raise error

    # --- weights --------------------------------------------------------------------------------

    def _load(self, order: LoadWeights) -> None:
        assert self.source is not None
        with self.source.get(order.weights, order.digest) as data:
            if data is None:
                return  # weights were published again; the next pull names the new digest
            self.holds = None
            set_weights(self.parameters, data)
        self.holds = (order.weights, order.digest)
