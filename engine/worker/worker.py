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
import json
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from statistics import median
from typing import Any, Literal, assert_never

import torch
from safetensors.torch import save
from torch import Tensor

from engine.clock import Clock
from engine.diffusion.sampler import Plan, advance, initial, plan_from_dict
from engine.diffusion.trajectory import Trajectory
from engine.events import Phase
from engine.models.adapter import Conditioning, DiTAdapter, rows
from engine.models.half import half_precision
from engine.parallel.communicator import TornGroup
from engine.parallel.elastic import Elastic
from engine.protocol.request import (
    Drain,
    Exit,
    Fenced,
    Finished,
    Kind,
    LoadWeights,
    Regroup,
    Reply,
    RequestId,
    Score,
    Scorer,
    Wait,
    WeightsKey,
    Work,
    request_class,
)
from engine.protocol.wire import (
    Blobs,
    finished_to_dict,
    reply_from_dict,
    reply_to_dict,
    request_to_list,
    weights_to_list,
)
from engine.rewards.reward import Reward
from engine.worker.transport import Transport
from engine.worker.usage import Usage
from engine.worker.weight_source import FromCoordinator, WeightSource

PHASE_OF = {
    Kind.TRAIN: Phase.ROLLOUT,
    Kind.EVALUATE: Phase.EVALUATION,
    Kind.CONTROL: Phase.EXPLORATION,
    Kind.EXPLORE: Phase.EXPLORATION,
}

IDLE_KINDS = (Kind.CONTROL, Kind.EXPLORE)
"""Kinds of requests the trainer does not wait for during the rollout of a batch."""

MOST_FAULTS = 10
"""Failures in a row after which the process ends. The node's agent then starts a new process."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights, by the names of safetensors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Made:
    """A lease with sampled images, still to be scored and sent."""

    work: Work
    trajectories: list[Trajectory]
    scoring: "Future[tuple[list[Score], Tensor]]"
    paced: tuple[int, float]
    """Number of workers that shared the lease, and seconds per step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pictures:
    """Inputs shared by all workers that sample the images of one lease."""

    plan: Plan
    filled: list[int]
    """Attempt index of each row: the full shape, padded with copies of the last attempt."""
    seeds: list[int]
    conditioning: Conditioning

    @classmethod
    def of(cls, work: Work, adapter: DiTAdapter) -> "_Pictures":
        attempts = work.attempts
        filled = [min(i, len(attempts) - 1) for i in range(work.shape)]
        prompts = list(dict.fromkeys(attempt.request.prompt for attempt in attempts))
        place = torch.tensor([prompts.index(attempts[i].request.prompt) for i in filled])
        device = next(adapter.transformer.parameters()).device
        return cls(
            plan=plan_from_dict(json.loads(work.sampler)),
            filled=filled,
            seeds=[attempts[i].request.seed for i in filled],
            conditioning=rows(adapter.encode(prompts), place.to(device)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Commit:
    """A commit in progress. `answer` gives the coordinator's reply and the commit's cost (run's clock ms)."""

    lease: int
    step: int
    answer: "Future[tuple[Reply, float]]"


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
        self._pulls = 0
        self._pending: list[_Made] = []
        self._commit: _Commit | None = None
        self._last_commit = (0, 0)
        """Lease and step of the newest commit sent."""
        self._commit_ms: float | None = None
        self._paced = (1, 0.0)
        self._scorer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="score")
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._called = time.perf_counter()
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
        self._pulls += 1
        ask = {
            "call": "pull",
            "seq": self._pulls,
            "holds": [*weights_to_list(self.holds[0]), self.holds[1]] if self.holds else None,
            "kinds": [str(kind) for kind in self.kinds],
            "room": self.room,
        }
        reply = self._call(ask | self._group_report(), wait=wait and not self._pending)
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
        reply = self._call({"call": "heartbeat", "leases": {}})
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
                scoring = self._scorer.submit(self._score, latents, prompts, work.scorer)
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
        made = _Pictures.of(work, self.adapter)
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
            names = [attempt.state for attempt in work.attempts]
            _, states = self.transport.call({"call": "states", "names": names})
            found = [Trajectory.from_bytes(states[str(a.state)]) for a in work.attempts]
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

    def _score(self, latents: Tensor, prompts: list[str], scorer: Scorer) -> tuple[list[Score], Tensor]:
        pictures = self.adapter.decode(latents).cpu()
        reward = self.reward if scorer == "reward" else self._student_or_reward
        return list(reward(pictures, prompts)), pictures

    @cached_property
    def _student_or_reward(self) -> Reward:
        """Return the scorer for candidates. Only the scoring thread may call this property."""
        student = self.student()
        if student is not None:
            return student
        print("this job has no student: the reward itself scores what is explored, which takes longer", flush=True)
        return self.reward

    # --- in a sequence-parallel group ----------------------------------------------------------------------

    def _group_report(self) -> dict[str, Any]:
        """Return the group fields of a pull."""
        return {} if self.elastic is None else {"group": self.elastic.report()}

    def _hand_out(self, work: Work, x: Tensor, step: int) -> None:
        """Start the other workers of the group on the same images, from these latents on."""
        if self.elastic is not None and self.elastic.degree > 1:
            assert self.holds is not None
            message = {"work": reply_to_dict(work), "digest": self.holds[1], "step": step}
            self.elastic.hand_out(json.dumps(message).encode())
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
        message = json.loads(handed)
        work = reply_from_dict(message["work"])
        assert isinstance(work, Work)
        try:
            self._hold(work.attempts[0].weights, message["digest"])
            made = _Pictures.of(work, self.adapter)
            x = torch.empty(len(made.seeds), *self.adapter.latent_shape(), device=self._device)
            with self.usage.measure(PHASE_OF[work.attempts[0].request.kind]), self._precision(work):
                self.elastic.share(x)
                for step in range(message["step"], made.plan.steps):
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
        replies = [self._committed(wait=False)]
        if not drain and time.perf_counter() - self._called >= self.heartbeat_seconds:
            leases = {str(made.work.lease): made.trajectories[0].step for made in self._pending}
            leases[str(work.lease)] = trajectories[0].step
            replies.append(self._call({"call": "heartbeat", "leases": leases}))
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
        elif self._is_commit_due(work, trajectories[0].step):
            with self.usage.measure(Phase.SYNC):
                self._begin_commit(work, trajectories)
        return not drain

    def _hand_back(self, work: Work, trajectories: list[Trajectory]) -> None:
        """Make the in-flight state durable, then give the lease back. The next worker resumes from this step."""
        if work.attempts[0].request.kind is Kind.TRAIN and self.resume != "restart":
            with self.usage.measure(Phase.SYNC):
                self._committed(wait=True)
                if self._last_commit != (work.lease, trajectories[0].step):
                    self._begin_commit(work, trajectories)
                    self._committed(wait=True)
        self._call({"call": "give_back", "lease": work.lease})

    # --- commits ------------------------------------------------------------------------------------------

    def _is_commit_due(self, work: Work, step: int) -> bool:
        """Return True if a commit is due and no commit is in progress.

        The trainer's worker only commits on drain, because a preemption does not take the trainer's disk.
        """
        if not work.commit_every or not self.may_load or self._commit is not None:
            return False
        lease, committed = self._last_commit
        since = step - (committed if lease == work.lease else work.attempts[0].step)
        return work.attempts[0].request.kind is Kind.TRAIN and since >= work.commit_every

    def _begin_commit(self, work: Work, trajectories: list[Trajectory]) -> None:
        """Send the current state of the lease.

        A thread may read trajectories, because code replaces and never changes them.
        """
        step = trajectories[0].step
        if self.overlap_commits:
            answer = self._committer.submit(self._send_commit, work, trajectories, self._commit_ms)
        else:
            answer = Future()
            answer.set_result(self._send_commit(work, trajectories, self._commit_ms))
        self._commit = _Commit(lease=work.lease, step=step, answer=answer)
        self._last_commit = (work.lease, step)

    def _send_commit(self, work: Work, trajectories: list[Trajectory], commit_ms: float | None) -> tuple[Reply, float]:
        begun = time.perf_counter()
        states, blobs = [], {}
        for attempt, trajectory in zip(work.attempts, trajectories, strict=True):
            name = _blob_name(attempt.request, trajectory.step)
            states.append([request_to_list(attempt.request), trajectory.step, name])
            blobs[name] = trajectory.to_bytes()
        head = {"call": "commit", "lease": work.lease, "states": states, "commit_ms": commit_ms}
        answer, _ = self.transport.call(self._signed(head), blobs)
        return reply_from_dict(answer), (time.perf_counter() - begun) / self.clock.wall_seconds(1)

    def _committed(self, *, wait: bool) -> Reply | None:
        """Return the answer to the commit in progress, or None if the answer is not there yet.

        Raises the error of the call.
        """
        if self._commit is None or not (wait or self._commit.answer.done()):
            return None
        commit, self._commit = self._commit, None
        reply, self._commit_ms = commit.answer.result()
        return reply

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
            leases = {str(pending.work.lease): pending.trajectories[0].step for pending in self._pending}
            if held is not None:
                leases[str(held.lease)] = held.attempts[0].step
            reply = self._call({"call": "heartbeat", "leases": leases})
            if isinstance(reply, Fenced):
                self._fenced(reply.lease)

    def _finish(self, made: _Made, scores: list[Score], pictures: Tensor) -> None:
        results, blobs = [], {}
        for i, (attempt, score) in enumerate(zip(made.work.attempts, scores, strict=True)):
            name = None
            if attempt.request.kind is Kind.TRAIN:
                name = _blob_name(attempt.request, made.trajectories[i].step)
                blobs[name] = made.trajectories[i].to_bytes()
            elif made.work.pictures[i]:
                name = _blob_name(attempt.request, made.trajectories[i].step)
                blobs[name] = save({"picture": as_bytes(pictures[i])})
            results.append(finished_to_dict(Finished(request=attempt.request, score=score, trajectory=name)))
        head = {"call": "finish", "lease": made.work.lease, "results": results}
        if self.elastic is not None:
            head["pace"] = [request_class(made.work.shape, made.work.dtype), *made.paced]
        if not isinstance(self._call(head, blobs), Fenced):
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
        self._call({"call": "give_back", "lease": work.lease})

    def _fault(self, work: Work, error: BaseException) -> None:
        self._faults_in_a_row += 1
        text = f"{type(error).__name__}: {error}"[:500]
        self._call({"call": "fault", "lease": work.lease, "text": text})
        if self._faults_in_a_row >= MOST_FAULTS:
            raise error

    # --- weights and calls --------------------------------------------------------------------------------

    def _load(self, order: LoadWeights) -> None:
        assert self.source is not None
        with self.source.get(order.weights, order.digest) as data:
            if data is None:
                return  # weights were published again; the next pull names the new digest
            self.holds = None
            set_weights(self.parameters, data)
        self.holds = (order.weights, order.digest)

    def _call(self, head: dict[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Reply:
        whole = self._signed(head) | {"usage": self.usage.take()}
        with contextlib.nullcontext() if wait else self.usage.measure(Phase.SYNC):
            answer, _ = self.transport.call(whole, blobs, wait=wait)
        self._called = time.perf_counter()
        return reply_from_dict(answer)

    def _signed(self, head: dict[str, Any]) -> dict[str, Any]:
        return {**head, "worker": self.name, "boot": self.boot, "node": self.node, "of": self.workers_of_node}


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that a device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch has no exception class for a failed CPU allocation.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def as_bytes(picture: Tensor) -> Tensor:
    """Convert an image in [-1, 1] to contiguous uint8 on the CPU: [C, H, W] or [C, F, H, W].

    Decoders may return non-contiguous images.
    """
    return ((picture.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).contiguous().cpu()


def get_weights(parameters: dict[str, torch.nn.Parameter]) -> bytes:
    """Return the trained weights as safetensors bytes."""
    return save({name: value.detach().contiguous().cpu() for name, value in parameters.items()})


def set_weights(parameters: dict[str, torch.nn.Parameter], data: bytes | memoryview) -> None:
    """Copy safetensors bytes into live parameters, in place and with one copy.

    Raises KeyError if a parameter is missing.
    """
    header_size = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + header_size]))
    missing = parameters.keys() - header.keys()
    if missing:
        raise KeyError(f"these weights lack {sorted(missing)}")
    with torch.no_grad(), warnings.catch_warnings():
        # The code only reads the views, so torch's warning about writable memory does not apply.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for name, parameter in parameters.items():
            entry = header[name]
            begin, end = entry["data_offsets"]
            if end > begin:
                dtype = DTYPES[entry["dtype"]]
                start = 8 + header_size + begin
                flat = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=start)
                parameter.copy_(flat.view(entry["shape"]))


def _blob_name(request: RequestId, step: int) -> str:
    text = json.dumps([*request_to_list(request), step])
    return blake2b(text.encode(), digest_size=12).hexdigest()
