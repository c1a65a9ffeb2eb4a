"""The pull queue: who may make which picture, with which weights, and who still may speak for it.

A state machine without I/O: no torch, no Ray, no clock of its own. Workers only call in, and every call is
answered with the order that is pending (work, load weights, drain, exit). The promises:

- every request of a manifest is finished exactly once, whatever is killed, frozen, delayed or repeated;
- a lease number is given out once; who holds an older one is fenced;
- an attempt is made with the weights it names, and no other;
- training rollouts come before evaluation, evaluation before exploration.

What changes the future is returned to the caller as records, which it makes durable *before* it answers
(engine/runtime/coordinator.py); `restore` takes the same records back after a crash.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.events import Capacity, NodeMissed, NodeSeen, NodeState, ProgressEvent, Warned
from engine.rollout.request import (
    Attempt,
    Drain,
    Exit,
    Fenced,
    Finished,
    Kind,
    LoadWeights,
    Reply,
    RequestId,
    Wait,
    WeightsKey,
    Work,
)

PRIORITY = (Kind.TRAIN, Kind.EVALUATE, Kind.EXPLORE)

MISSED = "missed its lease"
GIVEN_UP = "reported by the launcher"

MAX_FAULTS = 3
"""A request that brought down this many workers is reported instead of being tried for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A set of requests that belong together and how they are made: what the trainer submits.

    `sampler` is the plan as JSON (engine/rollout/sampler.py) and `steps` its number of denoising steps;
    `pictures`: how many of the first requests send their picture back.
    """

    requests: tuple[RequestId, ...]
    weights: WeightsKey
    sampler: str
    steps: int
    shape: int
    dtype: str
    pictures: int = 0


@dataclass(slots=True)
class _Item:
    attempt: Attempt
    task: Task
    lease: int | None = None
    faults: int = 0


@dataclass(slots=True)
class _Lease:
    worker: str
    node: str
    requests: list[RequestId]
    granted_ms: int
    expires_ms: int
    step: int
    """The last step that was heard of."""

    def made_by(self, now_ms: int, pace_ms: float, steps: int) -> int:
        """The step its pictures stand at, by what was heard and by how long it was held."""
        guess = int((min(now_ms, self.expires_ms) - self.granted_ms) / pace_ms) if pace_ms else 0
        return max(self.step, min(steps, guess))


@dataclass(slots=True)
class _Node:
    seen_ms: int
    workers: set[str] = field(default_factory=set)
    deadline_ms: int | None = None
    lost: bool = False


class Queue:
    """See the module's story. Every method is idempotent; `now_ms` is the caller's clock."""

    def __init__(self, *, lease_ms: int) -> None:
        self.lease_ms = lease_ms
        self.events: list[ProgressEvent] = []
        """What the launcher should hear of; the caller takes them away."""
        self.finished: dict[RequestId, Finished] = {}
        self.poisoned: dict[RequestId, str] = {}
        self.stop_reason: str | None = None
        self.live: WeightsKey | None = None
        self._digests: dict[WeightsKey, str] = {}
        self._items: dict[RequestId, _Item] = {}
        self._waiting: dict[Kind, OrderedDict[RequestId, None]] = {kind: OrderedDict() for kind in Kind}
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._nodes: dict[str, _Node] = {}
        self._capacity_generation = -1
        self._ticked_ms: int | None = None
        self._pace_ms: dict[Kind, float] = {}
        """How long a step of a lease takes, from those that were finished."""

    # --- the trainer's side ---------------------------------------------------------------------------

    def submit(self, task: Task) -> None:
        """Want these requests. What is finished already, or waits already with the same weights, stays.

        The same request at other weights is a new attempt: its old one is fenced and begins anew.
        """
        for request in task.requests:
            if request in self.finished:
                continue
            item = self._items.get(request)
            if item is not None and item.attempt.weights == task.weights:
                continue
            self._take_from_lease(item, request)
            self.poisoned.pop(request, None)
            self._items[request] = _Item(attempt=Attempt(request=request, weights=task.weights), task=task)
            self._waiting[request.kind][request] = None

    def publish(self, weights: WeightsKey, digest: str) -> None:
        """Workers will be told to load these. Live weights become the current ones."""
        self._digests[weights] = digest
        if not weights.average:
            self.live = weights

    def withdraw(self, requests: Iterable[RequestId]) -> None:
        """No longer wanted: exploration that was cut short, batches that are trained. Leases are fenced."""
        for request in requests:
            item = self._items.pop(request, None)
            self.finished.pop(request, None)
            self.poisoned.pop(request, None)
            self._waiting[request.kind].pop(request, None)
            self._take_from_lease(item, request)

    def forget_weights(self, keep: Iterable[WeightsKey]) -> list[WeightsKey]:
        """Drop the weights that nobody will ask for; returns what was dropped."""
        needed = set(keep) | {item.attempt.weights for item in self._items.values()}
        dropped = [key for key in self._digests if key not in needed and key != self.live]
        for key in dropped:
            del self._digests[key]
        return dropped

    def wanted(self, kind: Kind) -> int:
        """How many requests of a kind are not finished yet."""
        return sum(1 for item in self._items.values() if item.attempt.request.kind == kind)

    def stop(self, reason: str) -> None:
        """Every worker is told to exit at its next call."""
        self.stop_reason = self.stop_reason or reason

    # --- the workers' side ----------------------------------------------------------------------------

    def pull(
        self,
        worker: str,
        node: str,
        *,
        now_ms: int,
        holds: tuple[WeightsKey, str] | None,
        kinds: Sequence[Kind] = PRIORITY,
        known: Sequence[int] = (),
    ) -> Reply:
        """The next order for a worker.

        `holds`: the weights it has, with their digest. `known`: the leases it is working on; one that it does
        not know was given to a predecessor that died, or in a reply that got lost, and goes back to the queue.
        """
        member = self._meet(worker, node, now_ms)
        unknown = {n for n, lease in self._leases.items() if lease.worker == worker and n not in known}
        if unknown:
            self._give_back(unknown, node, "its worker started anew", now_ms)
        if self.stop_reason is not None:
            return Exit(reason=self.stop_reason)
        if member.lost:
            return Exit(reason="this node was given up")
        if member.deadline_ms is not None:
            return Drain(deadline_ms=member.deadline_ms)
        first = next(self._eligible(kinds), None)
        if first is None:
            return self._load(self.live, holds) or Wait()
        load = self._load(first.attempt.weights, holds)
        if load is not None:
            return load
        return self._lease(worker, node, first, now_ms)

    def heartbeat(self, worker: str, node: str, leases: Mapping[int, int], *, now_ms: int) -> Reply:
        """Renew leases; `leases` maps number to the step its pictures stand at."""
        member = self._meet(worker, node, now_ms)
        for number, step in leases.items():
            lease = self._leases.get(number)
            if lease is None or lease.worker != worker:
                return Fenced(lease=number)
            lease.expires_ms = now_ms + self.lease_ms
            lease.step = step
        if self.stop_reason is not None:
            return Exit(reason=self.stop_reason)
        if member.deadline_ms is not None:
            return Drain(deadline_ms=member.deadline_ms)
        return Wait()

    def may_finish(self, worker: str, number: int) -> bool:
        """Whether this worker still speaks for this lease: asked before its bytes are made durable."""
        lease = self._leases.get(number)
        return lease is not None and lease.worker == worker

    def held(self, worker: str, number: int) -> Sequence[RequestId]:
        """What this worker still speaks for: a request that was withdrawn or begun anew left the lease."""
        return tuple(self._leases[number].requests) if self.may_finish(worker, number) else ()

    def finish(self, worker: str, node: str, number: int, results: Sequence[Finished], *, now_ms: int) -> Reply:
        """These pictures are made. Call only after their bytes are durable."""
        self._meet(worker, node, now_ms)
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
        lease = self._leases[number]
        for result in results:
            if result.request in lease.requests:
                lease.requests.remove(result.request)
                self._learn_pace(lease, result.request, now_ms)
                self._done(result)
        if not lease.requests:
            del self._leases[number]
        return Wait()

    def commit(
        self, worker: str, node: str, number: int, states: Mapping[RequestId, tuple[int, str]], *, now_ms: int
    ) -> Reply:
        """In-flight state was made durable: whoever goes on starts from `(step, blob)`."""
        member = self._meet(worker, node, now_ms)
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
        for request, (step, blob) in states.items():
            if request in self._leases[number].requests:
                self._commit_state(request, step, blob)
        if member.deadline_ms is not None:
            return Drain(deadline_ms=member.deadline_ms)
        return Wait()

    def give_back(self, worker: str, number: int, *, now_ms: int) -> Reply:
        """A draining worker returns what it cannot finish; nothing is lost that was committed."""
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
        self._requeue(number, now_ms)
        return Wait()

    def fault(self, worker: str, node: str, number: int, text: str, *, now_ms: int) -> Reply:
        """A worker could not make these pictures. Three faults and a request is reported, not retried."""
        self._meet(worker, node, now_ms)
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
        for request in list(self._leases[number].requests):
            self._blame(request, text)
        self._requeue(number, now_ms)
        self.events.append(Warned(text=f"{worker} failed: {text}"))
        return Wait()

    # --- what is known of nodes -------------------------------------------------------------------------

    def capacity(self, snapshot: Capacity, *, now_ms: int) -> None:
        """The launcher's view. An older generation than the last one is ignored."""
        if snapshot.generation < self._capacity_generation:
            return
        self._capacity_generation = snapshot.generation
        for node in snapshot.nodes:
            match node.state:
                case NodeState.LOST:
                    self.lost(node.node, GIVEN_UP, now_ms=now_ms)
                case NodeState.DRAINING if node.deadline_ms is not None:
                    self.notice(node.node, node.deadline_ms, now_ms=now_ms)
                case _:
                    pass

    def notice(self, node: str, deadline_ms: int, *, now_ms: int) -> None:
        """The cloud will take this node back: its workers are told to drain."""
        member = self._nodes.setdefault(node, _Node(seen_ms=now_ms))
        member.deadline_ms = deadline_ms

    def lost(self, node: str, reason: str, *, now_ms: int) -> None:
        """This node is gone: its leases are given away at once."""
        member = self._nodes.setdefault(node, _Node(seen_ms=now_ms))
        if member.lost:
            return
        member.lost = True
        self._give_back({n for n, lease in self._leases.items() if lease.node == node}, node, reason, now_ms)

    def tick(self, now_ms: int) -> None:
        """Expire leases. After a pause of our own (a frozen coordinator) every lease gets the gap as grace."""
        gap = 0 if self._ticked_ms is None else now_ms - self._ticked_ms
        self._ticked_ms = now_ms
        if gap > self.lease_ms // 2:
            for lease in self._leases.values():
                lease.expires_ms += gap
            return
        for node in {lease.node for lease in self._leases.values() if lease.expires_ms < now_ms}:
            late = {n for n, lease in self._leases.items() if lease.node == node and lease.expires_ms < now_ms}
            self._give_back(late, node, MISSED, now_ms)

    def live_nodes(self, now_ms: int, within_ms: int) -> list[str]:
        """Nodes that called in lately and are neither draining nor lost."""
        return [
            name
            for name, node in self._nodes.items()
            if not node.lost and node.deadline_ms is None and now_ms - node.seen_ms <= within_ms
        ]

    # --- after a crash ------------------------------------------------------------------------------------

    def restore_finished(self, result: Finished) -> None:
        """Take a durable result back."""
        self._done(result)

    def restore_state(self, request: RequestId, step: int, blob: str) -> None:
        """Take a durable in-flight state back."""
        self._commit_state(request, step, blob)

    def begin_leases(self, first: int) -> None:
        """Lease numbers go on from here: above any that an earlier coordinator gave."""
        self._next_lease = max(self._next_lease, first)

    def committed(self, requests: Iterable[RequestId]) -> list[tuple[RequestId, int, str]]:
        """Durable in-flight states of these requests: (request, step, blob)."""
        items = [self._items[request] for request in requests if request in self._items]
        return [(i.attempt.request, i.attempt.step, i.attempt.state) for i in items if i.attempt.state is not None]

    def forget_all_weights(self) -> None:
        """A new lineage begins: versions of the old one mean something else."""
        self.live = None
        self._digests.clear()

    # --- inside -----------------------------------------------------------------------------------------

    def _meet(self, worker: str, node: str, now_ms: int) -> _Node:
        member = self._nodes.get(node)
        if member is None:
            member = self._nodes[node] = _Node(seen_ms=now_ms)
        if not member.workers:
            self.events.append(NodeSeen(node=node, worker=worker))
        member.workers.add(worker)
        member.seen_ms = now_ms
        return member

    def _eligible(self, kinds: Sequence[Kind]) -> Iterator[_Item]:
        for kind in PRIORITY:
            if kind in kinds:
                for request in self._waiting[kind]:
                    yield self._items[request]

    def _load(self, weights: WeightsKey | None, holds: tuple[WeightsKey, str] | None) -> LoadWeights | None:
        if weights is None or weights not in self._digests:
            return None
        digest = self._digests[weights]
        return None if holds == (weights, digest) else LoadWeights(weights=weights, digest=digest)

    def _lease(self, worker: str, node: str, first: _Item, now_ms: int) -> Reply:
        attempt, task = first.attempt, first.task
        if attempt.weights not in self._digests:
            return Wait()
        taken: list[_Item] = []
        for request in self._waiting[attempt.request.kind]:
            item = self._items[request]
            if item.task is task and item.attempt.step == attempt.step:
                taken.append(item)
            if len(taken) == task.shape:
                break
        number = self._next_lease
        self._next_lease += 1
        for item in taken:
            item.lease = number
            del self._waiting[item.attempt.request.kind][item.attempt.request]
        requests = [item.attempt.request for item in taken]
        expires_ms = now_ms + self.lease_ms
        self._leases[number] = _Lease(
            worker=worker,
            node=node,
            requests=requests,
            granted_ms=now_ms,
            expires_ms=expires_ms,
            step=attempt.step,
        )
        shown = set(task.requests[: task.pictures])
        return Work(
            lease=number,
            attempts=tuple(item.attempt for item in taken),
            sampler=task.sampler,
            shape=task.shape,
            dtype=task.dtype,
            expires_ms=expires_ms,
            pictures=tuple(request in shown for request in requests),
        )

    def _take_from_lease(self, item: _Item | None, request: RequestId) -> None:
        """Who holds it no longer speaks for it; a lease with nothing left is fenced as a whole."""
        if item is None or item.lease is None:
            return
        lease = self._leases[item.lease]
        lease.requests.remove(request)
        if not lease.requests:
            del self._leases[item.lease]

    def _learn_pace(self, lease: _Lease, request: RequestId, now_ms: int) -> None:
        item = self._items[request]
        pace = (now_ms - lease.granted_ms) / max(1, item.task.steps - item.attempt.step)
        known = self._pace_ms.get(request.kind, pace)
        self._pace_ms[request.kind] = 0.8 * known + 0.2 * pace

    def _done(self, result: Finished) -> None:
        request = result.request
        if request not in self._items:
            return
        del self._items[request]
        self._waiting[request.kind].pop(request, None)
        self.finished[request] = result

    def _commit_state(self, request: RequestId, step: int, blob: str) -> None:
        item = self._items.get(request)
        if item is not None and step > item.attempt.step:
            item.attempt = replace(item.attempt, step=step, state=blob)

    def _requeue(self, number: int, now_ms: int) -> int:
        """Give a lease's requests back to the queue, first in line.

        Returns the denoising steps that must be done again: those since the last commit, by what was heard of the
        lease and by how long it was held (an estimate: the dead do not tell).
        """
        lease = self._leases.pop(number)
        lost = 0
        for request in reversed(lease.requests):
            item = self._items.get(request)
            if item is None:
                continue
            item.lease = None
            pace = self._pace_ms.get(request.kind, 0.0)
            lost += max(0, lease.made_by(now_ms, pace, item.task.steps) - item.attempt.step)
            if request not in self.poisoned:
                self._waiting[request.kind][request] = None
                self._waiting[request.kind].move_to_end(request, last=False)
        return lost

    def _give_back(self, numbers: set[int], node: str, reason: str, now_ms: int) -> None:
        requests = sum(len(self._leases[number].requests) for number in numbers)
        for number in sorted(numbers):
            for request in self._leases[number].requests:
                self._blame(request, reason)
        lost = sum(self._requeue(number, now_ms) for number in sorted(numbers, reverse=True))
        if numbers or reason == GIVEN_UP:
            self.events.append(NodeMissed(node=node, reason=reason, lost_steps=lost, fenced_requests=requests))

    def _blame(self, request: RequestId, text: str) -> None:
        # Only a worker's own death or error counts: a node that the cloud takes back is not the request's fault.
        item = self._items.get(request)
        if item is None or text in (GIVEN_UP, MISSED):
            return
        item.faults += 1
        if item.faults >= MAX_FAULTS:
            self.poisoned[request] = text
