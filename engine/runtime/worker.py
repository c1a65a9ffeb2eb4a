"""A worker: pulls work, makes pictures, scores them, says it is done. The same class in every runtime.

    pull -> load weights | denoise, looking up between steps -> score (in a thread, beside the next work) -> finish

It only calls in. Told to drain, it commits what is in flight and takes nothing new, so that a reclaim with notice
loses no step. Fenced, it drops the work at once. It always runs the full shape that the work names, padded with
copies, so that a picture's bits do not depend on who made it.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, assert_never

import torch
from safetensors.torch import load, save
from torch import Tensor

from engine.clock import Clock
from engine.events import Phase
from engine.models.adapter import DiTAdapter, rows
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
    Wait,
    WeightsKey,
    Work,
    request_to_list,
)
from engine.rollout.sampler import Plan, advance, initial, plan_from_dict
from engine.rollout.trajectory import Trajectory
from engine.rollout.wire import Blobs, finished_to_dict, reply_from_dict, weights_to_list
from engine.runtime.coordinator import digest_of
from engine.runtime.transport import Transport
from engine.runtime.usage import Usage

PHASE_OF = {Kind.TRAIN: Phase.ROLLOUT, Kind.EVALUATE: Phase.EVALUATION, Kind.EXPLORE: Phase.EXPLORATION}

WEIGHTS_REMEMBERED = 2
"""Versions a worker keeps as bytes: live weights and the average that is evaluated take turns."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Made:
    """A lease whose pictures are sampled and still have to be scored and sent."""

    work: Work
    trajectories: list[Trajectory]
    scoring: "Future[tuple[list[Score], Tensor]]"


@dataclass(kw_only=True)
class Worker:
    """Serves one device. `may_load`: false for the trainer's own model, whose weights only the trainer sets."""

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
    draining: Callable[[], bool] = lambda: False
    """The node agent's word that the cloud takes the node back; heard between steps without asking anyone."""

    usage: Usage = field(init=False)
    holds: tuple[WeightsKey, str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.usage = Usage(self.clock)
        self._known: list[int] = []
        self._pending: list[_Made] = []
        self._bytes: dict[str, bytes] = {}
        self._scorer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="score")
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
        holds = [*weights_to_list(self.holds[0]), self.holds[1]] if self.holds else None
        ask = {"call": "pull", "holds": holds, "kinds": [str(kind) for kind in self.kinds], "known": self._known}
        reply = self._call(ask, wait=wait and not self._pending)
        match reply:
            case Work():
                self._known.append(reply.lease)
                self._do(reply)
            case LoadWeights():
                if not self.may_load:
                    return Wait()
                with self.usage.measure(Phase.SYNC):
                    self._load(reply)
            case Wait() | Drain() | Exit():
                self._settle(block=True)
            case Regroup() | Fenced():
                raise RuntimeError(f"the coordinator answered a pull with {reply}, which this worker cannot follow")
            case _:
                assert_never(reply)
        return reply

    def assume(self, weights: WeightsKey, digest: str) -> None:
        """The model already has these weights: the trainer sets its own."""
        self.holds = (weights, digest)

    # --- making pictures --------------------------------------------------------------------------------

    def _do(self, work: Work) -> None:
        kind = work.attempts[0].request.kind
        try:
            with self.usage.measure(PHASE_OF[kind]):
                trajectories = self._denoise(work)
                if trajectories is None:
                    self._known.remove(work.lease)
                    return
                latents = torch.stack([trajectory.x for trajectory in trajectories])
                scoring = self._scorer.submit(self._score, latents, [a.request.prompt for a in work.attempts])
                made = _Made(work=work, trajectories=trajectories, scoring=scoring)
            self._pending.append(made)
            self._settle(block=True, keep=1 if self.overlap_scoring else 0)
        except (ValueError, RuntimeError, ArithmeticError) as error:
            self._fault(work, error)

    def _denoise(self, work: Work) -> list[Trajectory] | None:
        """All pictures of a lease, step by step; None when the work was taken away or handed back."""
        plan = plan_from_dict(json.loads(work.sampler))
        attempts = work.attempts
        filled = [min(i, len(attempts) - 1) for i in range(work.shape)]
        seeds = [attempts[i].request.seed for i in filled]
        prompts = list(dict.fromkeys(attempt.request.prompt for attempt in attempts))
        place = torch.tensor([prompts.index(attempts[i].request.prompt) for i in filled])
        trajectories = self._begin(work, seeds)
        device = next(self.adapter.transformer.parameters()).device
        conditioning = rows(self.adapter.encode(prompts), place.to(device))
        x = torch.stack([trajectories[i].x for i in filled]).to(device)
        cast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=work.dtype == "bfloat16")
        for step in range(trajectories[0].step, plan.steps):
            with cast:
                x, log_probs = advance(self.adapter, plan, conditioning, seeds, x, step)
            trajectories = self._record(plan, work, trajectories, x, log_probs)
            if step + 1 < plan.steps and not self._go_on(work, trajectories):
                return None
        return trajectories

    def _begin(self, work: Work, seeds: Sequence[int]) -> list[Trajectory]:
        if work.attempts[0].step == 0:
            noise = initial(seeds[: len(work.attempts)], self.adapter.latent_shape())
            return [Trajectory.begin(x) for x in noise]
        names = [attempt.state for attempt in work.attempts]
        _, states = self.transport.call({"call": "states", "names": names})
        return [Trajectory.from_bytes(states[str(a.state)]) for a in work.attempts]

    def _record(
        self, plan: Plan, work: Work, trajectories: list[Trajectory], x: Tensor, log_probs: Tensor
    ) -> list[Trajectory]:
        if work.attempts[0].request.kind is not Kind.TRAIN:
            return [
                Trajectory(step=t.step + 1, x=row, latents=t.latents, log_probs=t.log_probs)
                for t, row in zip(trajectories, x, strict=False)
            ]
        return [t.then(plan, row, p) for t, row, p in zip(trajectories, x.cpu(), log_probs.cpu(), strict=False)]

    def _score(self, latents: Tensor, prompts: list[str]) -> tuple[list[Score], Tensor]:
        pictures = self.adapter.decode(latents)
        return list(self.reward(pictures, prompts)), pictures

    # --- looking up between steps -------------------------------------------------------------------------

    def _go_on(self, work: Work, trajectories: list[Trajectory]) -> bool:
        """Whether to take the next step. Hands the work back when the node drains."""
        self._settle(block=False)
        drain = self.draining()
        if not drain and time.perf_counter() - self._called < self.heartbeat_seconds:
            return True
        leases = {str(made.work.lease): made.trajectories[0].step for made in self._pending}
        leases[str(work.lease)] = trajectories[0].step
        reply = self._call({"call": "heartbeat", "leases": leases})
        match reply:
            case Fenced():
                return self._fenced(reply.lease) != work.lease
            case Exit():
                return False
            case Drain():
                drain = True
            case _:
                pass
        if drain:
            self._hand_back(work, trajectories)
        return not drain

    def _hand_back(self, work: Work, trajectories: list[Trajectory]) -> None:
        """Make in-flight state durable, then give the lease back: whoever takes it goes on from this step."""
        if work.attempts[0].request.kind is Kind.TRAIN:
            named = [
                (a.request, t, _blob_name(a.request, t.step)) for a, t in zip(work.attempts, trajectories, strict=True)
            ]
            states = [[request_to_list(request), t.step, name] for request, t, name in named]
            blobs = {name: t.to_bytes() for _, t, name in named}
            self._call({"call": "commit", "lease": work.lease, "states": states}, blobs)
        self._call({"call": "give_back", "lease": work.lease})

    def _settle(self, *, block: bool, keep: int = 0) -> None:
        """Send what is scored; with `block`, wait until at most `keep` leases are left to score."""
        for made in list(self._pending):
            if block and len(self._pending) > keep:
                self._wait_for(made)
            if not made.scoring.done() or made not in self._pending:
                continue
            self._pending.remove(made)
            try:
                scores, pictures = made.scoring.result()
            except Exception as error:  # the user's reward may raise anything; it is reported, not swallowed
                self._fault(made.work, error)
                continue
            self._finish(made, scores, pictures)

    def _wait_for(self, made: _Made) -> None:
        """Until it is scored, or fenced. A reward may take longer than a lease: the leases are kept alive meanwhile."""
        phase = PHASE_OF[made.work.attempts[0].request.kind]
        while made in self._pending:
            with self.usage.measure(phase):
                wait_for([made.scoring], timeout=self.heartbeat_seconds)
            if made.scoring.done():
                return
            leases = {str(pending.work.lease): pending.trajectories[0].step for pending in self._pending}
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
        self._call({"call": "finish", "lease": made.work.lease, "results": results}, blobs)
        self._known.remove(made.work.lease)
        self._faults_in_a_row = 0

    def _fenced(self, lease: int) -> int:
        for made in list(self._pending):
            if made.work.lease == lease:
                self._pending.remove(made)
                self._known.remove(lease)
        return lease

    def _fault(self, work: Work, error: BaseException) -> None:
        self._faults_in_a_row += 1
        self._known.remove(work.lease)
        text = f"{type(error).__name__}: {error}"[:500]
        self._call({"call": "fault", "lease": work.lease, "text": text})
        if self._faults_in_a_row >= 10:
            raise error

    # --- weights and calls --------------------------------------------------------------------------------

    def _load(self, order: LoadWeights) -> None:
        data = self._bytes.get(order.digest)
        if data is None:
            _, blobs = self.transport.call({"call": "weights", "weights": weights_to_list(order.weights)})
            data = blobs["weights"]
            if digest_of(data) != order.digest:
                return  # published anew in the meantime; the next pull says so
            while len(self._bytes) >= WEIGHTS_REMEMBERED:
                self._bytes.pop(next(iter(self._bytes)))
            self._bytes[order.digest] = data
        set_weights(self.parameters, data)
        self.holds = (order.weights, order.digest)

    def _call(self, head: dict[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Reply:
        usage = self.usage.take()
        whole = {**head, "worker": self.name, "node": self.node, "of": self.workers_of_node, "usage": usage}
        begun = time.perf_counter()
        answer, _ = self.transport.call(whole, blobs, wait=wait)
        self._called = time.perf_counter()
        reply = reply_from_dict(answer)
        if not wait:
            self.usage.add(Phase.SYNC, self._called - begun)
        return reply


def as_bytes(picture: Tensor) -> Tensor:
    """A picture in [-1, 1] as uint8, laid out in one piece whatever its decoder left: [C, H, W] or [C, F, H, W]."""
    return ((picture.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).contiguous().cpu()


def get_weights(parameters: dict[str, torch.nn.Parameter]) -> bytes:
    """Trained weights as safetensors bytes."""
    return save({name: value.detach().contiguous().cpu() for name, value in parameters.items()})


def set_weights(parameters: dict[str, torch.nn.Parameter], data: bytes) -> None:
    """Copy safetensors bytes into live parameters, in place. Raises KeyError when one is missing."""
    with torch.no_grad():
        tensors = load(data)
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _blob_name(request: RequestId, step: int) -> str:
    text = json.dumps([*request_to_list(request), step])
    return blake2b(text.encode(), digest_size=12).hexdigest()
