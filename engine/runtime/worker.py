"""A worker: pulls work, makes pictures, scores them, says it is done. The same class in every runtime.

    pull -> load weights | denoise, looking up between steps -> score (in a thread, beside the next work) -> finish

It only calls in. Beside the steps, in a thread, it commits what is in flight every so many steps. Told to drain, it
commits where it stands and takes nothing new, so that a reclaim with notice loses no step. Fenced, it drops the work
at once. It always runs the full shape that the work names, padded with copies, so that a picture's bits do not
depend on who made it; a shape that does not fit into memory it gives back, and says how much room there is.
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
from engine.events import Phase
from engine.models.adapter import Conditioning, DiTAdapter, rows
from engine.models.half import half_precision
from engine.parallel.communicator import TornGroup
from engine.parallel.elastic import Elastic
from engine.rewards.reward import Reward
from engine.rollout.request import (
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
    request_to_list,
)
from engine.rollout.sampler import Plan, advance, initial, plan_from_dict
from engine.rollout.trajectory import Trajectory
from engine.rollout.wire import Blobs, finished_to_dict, reply_from_dict, reply_to_dict, weights_to_list
from engine.runtime.transport import Transport
from engine.runtime.usage import Usage
from engine.runtime.weight_source import FromCoordinator, WeightSource

PHASE_OF = {
    Kind.TRAIN: Phase.ROLLOUT,
    Kind.EVALUATE: Phase.EVALUATION,
    Kind.CONTROL: Phase.EXPLORATION,
    Kind.EXPLORE: Phase.EXPLORATION,
}

IDLE_KINDS = (Kind.CONTROL, Kind.EXPLORE)
"""What nobody waits for while a batch is rolled out."""

MOST_FAULTS = 10
"""So many failures in a row end the process: its agent starts another."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What weights may be, by safetensors' names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Made:
    """A lease whose pictures are sampled and still have to be scored and sent."""

    work: Work
    trajectories: list[Trajectory]
    scoring: "Future[tuple[list[Score], Tensor]]"
    paced: tuple[int, float]
    """How many workers shared it, and seconds of a step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pictures:
    """What every worker that makes a lease's pictures must know of them."""

    plan: Plan
    filled: list[int]
    """Which attempt each row is: the full shape, padded with copies of the last."""
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
    """State that was sent to be made durable, and the answer once it is there, with what it took (run's clock ms)."""

    lease: int
    step: int
    answer: "Future[tuple[Reply, float]]"


@dataclass(kw_only=True)
class Worker:
    """Serves one device. `may_load`: false for the trainer's own model, whose weights only the trainer sets.

    Scoring and commits run in threads of their own, so `transport` must take calls from several threads; with both
    `overlap_...` false it is called from one, in an order that repeats.
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
    """A denoising step takes at least so long."""
    boot: int = field(default_factory=time.time_ns)
    """Tells this process from an earlier one of the same name."""
    source: WeightSource | None = None
    """Where weights come from; None asks the coordinator."""
    student: Callable[[], Reward | None] = lambda: None
    """Loads the reward's student, the first time that work asks for it; None: the reward scores in its place."""
    draining: Callable[[], bool] = lambda: False
    """The node agent's word that the cloud takes the node back; heard between steps without asking anyone."""
    trace: Callable[[Work, int], None] = lambda work, step: None
    """Called after every step, with the number of steps that are done."""
    resume: Literal["exact", "close", "restart"] = "close"
    """What becomes of pictures that were interrupted (engine/config.py)."""
    finished: Callable[[], None] = lambda: None
    """Called when a lease was finished and its results are durable."""
    heard: Callable[[Regroup], None] = lambda order: None
    """Called with every order to regroup before it is carried out."""
    elastic: Elastic | None = None
    """Its part in the sequence-parallel groups of its node; None: it always works alone."""

    usage: Usage = field(init=False)
    holds: tuple[WeightsKey, str] | None = field(default=None, init=False)
    room: int | None = field(default=None, init=False)
    """Most pictures that one forward pass may have; None until one did not fit."""

    def __post_init__(self) -> None:
        self.usage = Usage(self.clock)
        self.source = self.source or FromCoordinator(self.transport)
        self._pulls = 0
        self._pending: list[_Made] = []
        self._commit: _Commit | None = None
        self._last_commit = (0, 0)
        """Lease and step of the newest commit that was sent."""
        self._commit_ms: float | None = None
        self._paced = (1, 0.0)
        self._scorer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="score")
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._called = time.perf_counter()
        self._faults_in_a_row = 0

    # --- the loop ---------------------------------------------------------------------------------------

    def serve(self) -> str:
        """Work until told to exit; returns the reason."""
        while True:
            reply = self.serve_once(wait=True)
            if isinstance(reply, Exit):
                return reply.reason
            if isinstance(reply, Drain):
                # Nothing more to do but to be told when the node is wanted again, or is gone.
                time.sleep(min(0.2, self.heartbeat_seconds))

    def serve_once(self, *, wait: bool) -> Reply:
        """Pull once and do what is asked; returns the order that was followed."""
        if self.draining():
            return self._wind_up()
        if self.elastic is not None and self.elastic.follows:
            handed = self.elastic.handed(self.heartbeat_seconds if wait else 0.0)
            if handed is not None:
                return self._follow(handed)
            wait = False  # nothing is to be done, or the group is over: what is new?
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
        """The model already has these weights: the trainer sets its own."""
        self.holds = (weights, digest)

    def _wind_up(self) -> Reply:
        """Our own agent heard the notice: send what is scored and take nothing, whatever the coordinator knows."""
        if self.elastic is not None:
            self.elastic.leave()
        self._settle(block=True)
        reply = self._call({"call": "heartbeat", "leases": {}})
        return reply if isinstance(reply, Exit) else Drain(deadline_ms=0)

    # --- making pictures --------------------------------------------------------------------------------

    def _do(self, work: Work) -> None:
        kind = work.attempts[0].request.kind
        if kind in IDLE_KINDS and self._device.type == "cpu":
            # Scoring would share its core with this: what the trainer waits for goes first.
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
            self._tore()  # or the others would wait for this pass
            if not is_out_of_memory(error):
                self._fault(work, error)
                return
            text = str(error)
        # Only here, where the error and the tensors of its frames are gone, does freeing give anything back.
        self._make_room(work, text)

    def _denoise(self, work: Work) -> list[Trajectory] | None:
        """All pictures of a lease, step by step; None when the work was taken away or handed back."""
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
                        torch.cuda.synchronize(x.device)  # what is only queued is neither timed nor stopped in time
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
        """How many workers share what this one makes."""
        return 1 if self.elastic is None else self.elastic.degree

    @property
    def _device(self) -> torch.device:
        return next(self.adapter.transformer.parameters()).device

    def _begin(self, work: Work, seeds: Sequence[int]) -> list[Trajectory]:
        """Where the pictures stand: at what was committed, if the job lets us go on from it."""
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
                replace(t, step=t.step + 1, x=row)  # nobody goes on from it, and nothing else of it is looked at
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
        """Looked up in the scoring thread alone."""
        student = self.student()
        if student is not None:
            return student
        print("this job has no student: the reward itself scores what is explored, which takes longer", flush=True)
        return self.reward

    # --- in a sequence-parallel group ----------------------------------------------------------------------

    def _group_report(self) -> dict[str, Any]:
        """For a pull."""
        return {} if self.elastic is None else {"group": self.elastic.report()}

    def _hand_out(self, work: Work, x: Tensor, step: int) -> None:
        """Let the others of our group make these pictures along with us, from these latents on."""
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
        """Compute along with the first of our group, which records, commits, scores and decides."""
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

    # --- looking up between steps -------------------------------------------------------------------------

    def _go_on(self, work: Work, trajectories: list[Trajectory]) -> bool:
        """Whether to take the next step. Hands the work back when the node drains."""
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
                case Drain() | Regroup():  # the node is taken back, or we are wanted in another group
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
        """Make in-flight state durable, then give the lease back: whoever takes it goes on from this step."""
        if work.attempts[0].request.kind is Kind.TRAIN and self.resume != "restart":
            with self.usage.measure(Phase.SYNC):
                self._committed(wait=True)
                if self._last_commit != (work.lease, trajectories[0].step):
                    self._begin_commit(work, trajectories)
                    self._committed(wait=True)
        self._call({"call": "give_back", "lease": work.lease})

    # --- commits ------------------------------------------------------------------------------------------

    def _is_commit_due(self, work: Work, step: int) -> bool:
        """One commit at a time; the trainer's own worker has a disk that no reclaim takes, and commits on drain."""
        if not work.commit_every or not self.may_load or self._commit is not None:
            return False
        lease, committed = self._last_commit
        since = step - (committed if lease == work.lease else work.attempts[0].step)
        return work.attempts[0].request.kind is Kind.TRAIN and since >= work.commit_every

    def _begin_commit(self, work: Work, trajectories: list[Trajectory]) -> None:
        """Send where this lease stands. Trajectories are never changed, only replaced, so a thread may read them."""
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
        """The answer to the commit that is under way, once it is there; raises what its call raised."""
        if self._commit is None or not (wait or self._commit.answer.done()):
            return None
        commit, self._commit = self._commit, None
        reply, self._commit_ms = commit.answer.result()
        return reply

    # --- scoring ------------------------------------------------------------------------------------------

    def _settle(self, *, block: bool, keep: int = 0, held: Work | None = None) -> None:
        """Send what is scored; with `block`, wait until at most `keep` leases are left to score.

        `held`: work that was granted and begins only afterwards.
        """
        for made in list(self._pending):
            if block and len(self._pending) > keep:
                self._wait_for(made, held)
            if not made.scoring.done() or made not in self._pending:
                continue
            self._pending.remove(made)
            try:
                scores, pictures = made.scoring.result()
            except Exception as error:  # the user's reward may raise anything; it is reported, not swallowed
                if is_out_of_memory(error):
                    self._make_room(made.work, str(error))
                else:
                    self._fault(made.work, error)
                continue
            self._finish(made, scores, pictures)

    def _wait_for(self, made: _Made, held: Work | None) -> None:
        """Until it is scored, or fenced. A reward may take longer than a lease: the leases are kept alive meanwhile."""
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
        """This shape does not fit: nobody's fault, but we are not to be given it again."""
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
                return  # published anew in the meantime; the next pull says so
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
    """Whether a device or this machine had too little memory for what was tried."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch has no class of its own for an allocation that fails on a CPU.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def as_bytes(picture: Tensor) -> Tensor:
    """A picture in [-1, 1] as uint8, laid out in one piece whatever its decoder left: [C, H, W] or [C, F, H, W]."""
    return ((picture.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).contiguous().cpu()


def get_weights(parameters: dict[str, torch.nn.Parameter]) -> bytes:
    """Trained weights as safetensors bytes."""
    return save({name: value.detach().contiguous().cpu() for name, value in parameters.items()})


def set_weights(parameters: dict[str, torch.nn.Parameter], data: bytes | memoryview) -> None:
    """Copy safetensors bytes into live parameters, in place and once. Raises KeyError when one is missing."""
    header_size = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + header_size]))
    missing = parameters.keys() - header.keys()
    if missing:
        raise KeyError(f"these weights lack {sorted(missing)}")
    with torch.no_grad(), warnings.catch_warnings():
        # The views are only read, so it does not matter that torch cannot protect them.
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
