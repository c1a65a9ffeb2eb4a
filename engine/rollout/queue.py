"""The pull queue: who may make which picture, with which weights, and who still may speak for it.

A state machine without I/O: no torch, no Ray, no clock of its own. Workers only call in, and every call is
answered with the order that is pending (work, load weights, drain, exit). The promises:

- every request of a manifest is finished exactly once, whatever is killed, frozen, delayed or repeated;
- a lease number is given out once; who holds an older one is fenced;
- an attempt is made with the weights it names, and no other;
- training rollouts come before evaluation, evaluation before exploration; when nothing is left to begin, the lease
  that will end last is made a second time by an idle worker, and the first of the two to finish counts;
- a request that brings down worker after worker is reported instead of being tried for ever, and takes nobody with it.

What changes the future is returned to the caller, who makes it durable *before* it answers
(engine/runtime/coordinator.py); the `restore_...` methods take the same facts back after a crash.
All times are milliseconds of the run's clock, passed in by the caller.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from engine.events import Capacity, Market, NodeMissed, NodeSeen, NodeServed, NodeState, ProgressEvent, Warned
from engine.parallel.forecast import Demand, Requests
from engine.rollout.pace import STEPS_PER_LEASE, Pace, Rules, commit_interval
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
    Scorer,
    Wait,
    WeightsKey,
    Work,
    request_class,
)

PRIORITY = (Kind.TRAIN, Kind.EVALUATE, Kind.CONTROL, Kind.EXPLORE)

MISSED = "missed its lease"
GIVEN_UP = "reported by the launcher"

MOST_DEATHS = 3
"""A request that brought down this many workers, at the same step, is reported instead of being tried for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A set of requests that belong together and how they are made: what the trainer submits.

    `sampler` is the plan as JSON (engine/rollout/sampler.py) and `steps` its number of denoising steps;
    `pictures`: how many of the first requests send their picture back. All requests are of one kind.
    Raises ValueError if a student would score anything but exploration: what is trained or reported is the reward.
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
        # Here, not in `submit`: what the queue refuses must not be in the journal already.
        if self.scorer not in get_args(Scorer):
            raise ValueError(f"a task's scorer is {self.scorer!r}; use one of {', '.join(get_args(Scorer))}")
        others = {str(request.kind) for request in self.requests} - {str(Kind.EXPLORE)}
        if self.scorer == "student" and others:
            raise ValueError(
                f"a task of kind {', '.join(sorted(others))} names the student as its scorer; only exploration may, "
                "because a student ranks seeds and its scores are not the reward; use scorer='reward'"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRecord:
    """What must be remembered of a lease so that its holder still speaks for it after a coordinator's restart."""

    number: int
    worker: str
    node: str
    boot: int
    seq: int
    weights: WeightsKey
    requests: tuple[RequestId, ...]
    lease_ms: int
    copy: bool


@dataclass(slots=True, eq=False)
class _Submitted:
    """One task, with what is looked up for each of its requests."""

    number: int
    task: Task
    pace: Pace
    shown: frozenset[RequestId]


_Place = tuple[int, int, RequestId | None]
"""Where a request waits: (task, committed step, itself if it must be made alone). One place = one lease can take it."""


@dataclass(slots=True, eq=False)
class _Item:
    attempt: Attempt
    of: _Submitted
    leases: list[int] = field(default_factory=list)
    place: _Place | None = None
    deaths: int = 0
    died_at: int = -1
    """The committed step at the last death: who got further since is not the cause."""


@dataclass(slots=True, eq=False)
class _Lease:
    worker: str
    node: str
    boot: int
    seq: int
    """The pull that it answered."""
    of: _Submitted
    requests: dict[RequestId, _Item]
    first_step: int
    granted_ms: int
    heard_ms: int
    expires_ms: int
    step: int
    """The last step that was heard of."""
    copy: bool = False

    def made_by(self, now_ms: int) -> int:
        """The step its pictures stand at, by what was heard and by how long it was held."""
        pace, steps = self.of.pace.step_ms, self.of.task.steps
        guess = self.first_step + int((min(now_ms, self.expires_ms) - self.granted_ms) / pace) if pace else 0
        return max(self.step, min(steps, guess))

    def end_ms(self, now_ms: int, silence_ms: int) -> float:
        """When it will be finished: as fast as it was heard to go, but no faster than others of its kind.

        Who was silent for longer than `silence_ms` may be so for as long again.
        """
        pace, made = self.of.pace.step_ms, self.step - self.first_step
        own = max(pace, (self.heard_ms - self.granted_ms) / made) if made else pace
        silent = now_ms - self.heard_ms
        since = self.heard_ms if silent <= silence_ms else now_ms + silent
        return since + own * (self.of.task.steps - self.step)


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker by name; `boot` tells its processes apart."""

    name: str
    node: str
    boot: int
    seq: int = -1
    work: Work | None = None
    """The answer to pull number `seq`, if it was work."""
    leases: set[int] = field(default_factory=set)
    suspects: list[tuple[RequestId, bool]] = field(default_factory=list)
    """What it held when it was last given up, and whether alone in its lease: to blame if the process turns out to have
    died while its node lives."""
    missed: tuple[int, _Lease] | None = None
    """The last lease that it lost by silence, with its number."""
    told_room: int | None = None


@dataclass(slots=True, eq=False)
class _Node:
    first_ms: int
    seen_ms: int
    market: Market | None = None
    notice_ms: int | None = None
    """The deadline that its own agent heard of."""
    told_ms: int | None = None
    """The deadline that the launcher's newest snapshot names."""
    lost_ms: int | None = None
    called: bool = False
    served: bool = False

    @property
    def deadline_ms(self) -> int | None:
        return self.notice_ms if self.notice_ms is not None else self.told_ms


class Queue:
    """See the module's story. Every method is idempotent."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.events: list[ProgressEvent] = []
        """What the launcher should hear of; the caller takes them away."""
        self.finished: dict[RequestId, Finished] = {}
        self.poisoned: dict[RequestId, str] = {}
        self.stop_reason: str | None = None
        self.live: WeightsKey | None = None
        self._digests: dict[WeightsKey, str] = {}
        self._items: dict[RequestId, _Item] = {}
        self._waiting: dict[Kind, OrderedDict[_Place, OrderedDict[RequestId, _Item]]] = {k: OrderedDict() for k in Kind}
        self._paces: dict[tuple[Kind, str, int, str, Scorer], Pace] = {}
        self._tasks_seen = 0
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._workers: dict[str, _Worker] = {}
        self._nodes: dict[str, _Node] = {}
        self._losses = 0
        self._capacity_generation = -1
        self._ticked_ms: int | None = None
        self._commit_ms = 0.0
        self._preemption_ms = float(rules.preemption_ms)

    # --- the trainer's side ---------------------------------------------------------------------------

    def submit(self, task: Task) -> None:
        """Want these requests. What is finished already, or waits already with the same weights, stays.

        The same request at other weights is a new attempt: its old one is fenced and begins anew.
        """
        if not task.requests:
            return
        work = (task.requests[0].kind, task.sampler, task.shape, task.dtype, task.scorer)
        pace = self._paces.setdefault(work, Pace())
        shown = frozenset(task.requests[: task.pictures])
        of = _Submitted(number=self._tasks_seen, task=task, pace=pace, shown=shown)
        self._tasks_seen += 1
        for request in task.requests:
            if request in self.finished:
                continue
            item = self._items.get(request)
            if item is not None and item.attempt.weights == task.weights:
                continue
            if item is not None:
                self._leave(item)
            self.poisoned.pop(request, None)
            self._items[request] = _Item(attempt=Attempt(request=request, weights=task.weights), of=of)
            self._wait(self._items[request])

    def publish(self, weights: WeightsKey, digest: str) -> None:
        """Workers will be told to load these. Live weights become the current ones."""
        self._digests[weights] = digest
        if not weights.average:
            self.live = weights

    def withdraw(self, requests: Iterable[RequestId]) -> None:
        """No longer wanted: exploration that was cut short, batches that are trained. Leases are fenced."""
        for request in requests:
            self.finished.pop(request, None)
            self.poisoned.pop(request, None)
            item = self._items.pop(request, None)
            if item is not None:
                self._leave(item)

    def forget_weights(self, keep: Iterable[WeightsKey]) -> list[WeightsKey]:
        """Drop the weights that nobody will ask for; returns what was dropped."""
        needed = set(keep) | {item.attempt.weights for item in self._items.values()}
        dropped = [key for key in self._digests if key not in needed and key != self.live]
        for key in dropped:
            del self._digests[key]
        return dropped

    def wanted(self, kind: Kind) -> int:
        """How many requests of a kind are not finished yet."""
        return sum(1 for request in self._items if request.kind == kind)

    def waits(self, kind: Kind) -> bool:
        """Whether a request of a kind waits for a worker."""
        return bool(self._waiting[kind])

    def stop(self, reason: str) -> None:
        """Every worker is told to exit at its next call."""
        self.stop_reason = self.stop_reason or reason

    # --- the workers' side ----------------------------------------------------------------------------

    def pull(
        self,
        worker: str,
        node: str,
        *,
        boot: int,
        seq: int,
        now_ms: int,
        holds: tuple[WeightsKey, str] | None,
        kinds: Sequence[Kind] = PRIORITY,
        room: int | None = None,
    ) -> Reply:
        """The next order for a worker.

        `boot` numbers the worker's processes, `seq` a process's pulls: an order whose answer got lost is given again.
        `holds`: the weights it has, with their digest. `room`: the most pictures it can take in one forward pass.
        """
        member = self._meet(worker, node, boot, now_ms)
        if member is None:
            return Exit(reason="a newer process of this worker has called in")
        if seq < member.seq:
            return Wait()
        if seq == member.seq and member.work is not None and member.work.lease in self._leases:
            return member.work
        for number in [n for n in member.leases if self._leases[n].seq >= seq]:
            self._requeue(number, now_ms)  # the answer was lost, and a restart forgot it
        member.seq = seq
        reply = self._order(member, now_ms, holds, kinds, room)
        member.work = reply if isinstance(reply, Work) else None
        return reply

    def heartbeat(self, worker: str, node: str, leases: Mapping[int, int], *, now_ms: int) -> Reply:
        """Renew leases; `leases` maps number to the step its pictures stand at."""
        self._see(node, now_ms)
        for number, step in leases.items():
            lease = self._leases.get(number)
            if lease is None or lease.worker != worker:
                self._came_late(worker, number, now_ms)
                return Fenced(lease=number)
            self._hear(lease, step, now_ms)
        return self._pending(node)

    def may_finish(self, worker: str, number: int) -> bool:
        """Whether this worker still speaks for this lease: asked before its bytes are made durable."""
        lease = self._leases.get(number)
        return lease is not None and lease.worker == worker

    def held(self, worker: str, number: int) -> Sequence[RequestId]:
        """What this worker still speaks for: a request that was withdrawn or begun anew left the lease."""
        return tuple(self._leases[number].requests) if self.may_finish(worker, number) else ()

    def finish(self, worker: str, node: str, number: int, results: Sequence[Finished], *, now_ms: int) -> Reply:
        """These pictures are made. Call only after their bytes are durable."""
        self._see(node, now_ms)
        if not self.may_finish(worker, number):
            self._came_late(worker, number, now_ms)
            return Fenced(lease=number)
        lease = self._leases[number]
        lease.of.pace.learn((now_ms - lease.granted_ms) / max(1, lease.of.task.steps - lease.first_step))
        if results and not self._nodes[node].served:
            self._nodes[node].served = True
            self.events.append(NodeServed(node=node, worker=worker))
        for result in results:
            if result.request in lease.requests:
                self._done(result)
        if number in self._leases:  # a part was finished: the rest is still being worked on
            self._hear(lease, lease.step, now_ms)
        return Wait()

    def commit(
        self,
        worker: str,
        node: str,
        number: int,
        states: Mapping[RequestId, tuple[int, str]],
        *,
        now_ms: int,
        cost_ms: float | None = None,
    ) -> Reply:
        """In-flight state was made durable: whoever goes on starts from `(step, blob)`.

        `cost_ms`: what this worker's last commit took. A commit renews its lease.
        """
        self._see(node, now_ms)
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
        lease = self._leases[number]
        for request, (step, blob) in states.items():
            item = lease.requests.get(request)
            if item is not None:
                self._commit_state(item, step, blob)
        if states:
            self._hear(lease, max(step for step, _ in states.values()), now_ms)
        if cost_ms is not None:
            self._commit_ms = 0.8 * self._commit_ms + 0.2 * cost_ms if self._commit_ms else cost_ms
        return self._pending(node)

    def give_back(self, worker: str, number: int, *, now_ms: int) -> Reply:
        """A worker returns what it cannot finish; nothing is lost that was committed."""
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
        self._requeue(number, now_ms)
        return Wait()

    def fault(self, worker: str, node: str, number: int, text: str, *, now_ms: int) -> Reply:
        """A worker could not make these pictures."""
        self._see(node, now_ms)
        spoke = self.may_finish(worker, number)
        lease = self._leases[number] if spoke else self._came_late(worker, number, now_ms)
        if lease is None:
            return Fenced(lease=number)
        requests = list(lease.requests)
        if spoke:
            self._requeue(number, now_ms)
        self.events.append(Warned(text=f"{worker} failed: {text}"))
        for request in reversed(requests):
            self._blame(request, text, alone=len(requests) == 1)
        if not spoke:
            return Fenced(lease=number)
        return Wait()

    # --- what is known of workers and nodes ---------------------------------------------------------------

    def died(self, worker: str, boot: int, reason: str, *, now_ms: int) -> None:
        """Somebody saw this process die (a closed connection, an actor's death): its leases are given away at once.

        It may be wrong. Who still lives is fenced at its next call and pulls again.
        """
        member = self._workers.get(worker)
        if member is not None and member.boot == boot:
            self._give_away(member.leases, member.node, reason, now_ms)

    def capacity(self, snapshot: Capacity, *, now_ms: int) -> None:
        """The launcher's view. An older generation than the last one is ignored."""
        if snapshot.generation < self._capacity_generation:
            return
        self._capacity_generation = snapshot.generation
        for fact in snapshot.nodes:
            node = self._node(fact.node, now_ms)
            node.market = fact.market
            node.told_ms = fact.deadline_ms if fact.state is NodeState.DRAINING else None
            if fact.state is NodeState.LOST:
                self.lost(fact.node, GIVEN_UP, now_ms=now_ms)
            else:
                node.lost_ms = None

    def notice(self, node: str, deadline_ms: int, *, now_ms: int) -> None:
        """The node's own agent heard that the cloud takes it back: its workers are told to drain."""
        self._node(node, now_ms).notice_ms = deadline_ms

    def lost(self, node: str, reason: str, *, now_ms: int) -> None:
        """This node is gone: its leases are given away at once, and who calls in from there is sent home."""
        member = self._node(node, now_ms)
        if member.lost_ms is None:
            member.lost_ms = now_ms
            self._losses += member.market is Market.SPOT
            self.unreachable(node, reason, now_ms=now_ms)

    def unreachable(self, node: str, reason: str, *, now_ms: int) -> None:
        """The engine itself saw the node die: its leases are given away. It may turn out to be wrong and come back."""
        numbers = {number for number, lease in self._leases.items() if lease.node == node}
        self._give_away(numbers, node, reason, now_ms)
        for member in self._workers.values():
            if member.node == node:
                member.suspects = []  # the cloud's doing

    def tick(self, now_ms: int) -> None:
        """Expire leases. After a pause of our own (a frozen coordinator) every lease gets the gap as grace."""
        gap = 0 if self._ticked_ms is None else now_ms - self._ticked_ms
        self._ticked_ms = now_ms
        self._preemption_ms = self._mean_life(now_ms)
        if gap > self.rules.lease_ms // 2:
            for lease in self._leases.values():
                lease.expires_ms += gap
            return
        late = {number for number, lease in self._leases.items() if lease.expires_ms < now_ms}
        for number in late:
            lease = self._leases[number]
            self._workers[lease.worker].missed = (number, lease)
        for node in sorted({self._leases[number].node for number in late}):
            self._give_away({n for n in late if self._leases[n].node == node}, node, MISSED, now_ms)
            late &= self._leases.keys()

    def takes_part(self, node: str) -> bool:
        """Whether its workers may be given work: it is neither lost nor draining."""
        known = self._nodes.get(node)
        return known is None or (known.lost_ms is None and known.deadline_ms is None)

    def demand(self, now_ms: int) -> Demand:
        """What there is to do, for whoever plans how workers share it."""
        waiting: list[Requests] = []
        in_flight: dict[str, Requests] = {}
        pictures: dict[str, int] = {}
        for places in self._waiting.values():
            for (_, step, _), bucket in places.items():
                task = next(iter(bucket.values())).of.task
                leases = math.ceil(len(bucket) / task.shape)
                waiting.append(Requests(request_class=task.request_class, steps=task.steps - step, count=leases))
                pictures[task.request_class] = task.shape
        for lease in self._leases.values():
            task = lease.of.task
            left = task.steps - lease.made_by(now_ms)
            pictures[task.request_class] = task.shape
            # Of two leases of a worker one is made while the other is scored.
            if lease.worker not in in_flight or in_flight[lease.worker].steps < left:
                in_flight[lease.worker] = Requests(request_class=task.request_class, steps=left)
        return Demand(waiting=waiting, in_flight=in_flight, pictures=pictures)

    def live_nodes(self, now_ms: int, within_ms: int) -> list[str]:
        """Nodes that work or called in lately, and are neither draining nor lost."""
        working = {lease.node for lease in self._leases.values()}
        return [
            name
            for name, node in self._nodes.items()
            if node.called
            and node.lost_ms is None
            and node.deadline_ms is None
            and (name in working or now_ms - node.seen_ms <= within_ms)
        ]

    # --- after a crash ------------------------------------------------------------------------------------

    def restore_finished(self, result: Finished) -> None:
        """Take a durable result back."""
        self._done(result)

    def restore_state(self, request: RequestId, step: int, blob: str) -> None:
        """Take a durable in-flight state back."""
        item = self._items.get(request)
        if item is not None:
            self._commit_state(item, step, blob)

    def restore_poisoned(self, request: RequestId, text: str) -> None:
        """Take a verdict back."""
        item = self._items.get(request)
        if item is not None:
            self._leave(item)
            self.poisoned[request] = text

    def restore_lease(self, record: LeaseRecord, *, now_ms: int) -> None:
        """Take a lease back: its holder worked on while nobody listened. What was leased again since left it."""
        member = self._workers.get(record.worker)
        if member is None:
            member = self._workers[record.worker] = _Worker(name=record.worker, node=record.node, boot=record.boot)
            self._node(record.node, now_ms)
        if record.boot < member.boot:
            return
        if record.boot > member.boot:
            for number in sorted(member.leases, reverse=True):
                self._requeue(number, now_ms)
            member.boot, member.seq = record.boot, -1
        member.seq = max(member.seq, record.seq)
        wanted = (self._items[request] for request in record.requests if request in self._items)
        items = [i for i in wanted if i.attempt.weights == record.weights and i.attempt.request not in self.poisoned]
        if not record.copy:
            for item in items:
                self._leave(item)
        items = [item for item in items if len(item.leases) < 2]
        if items:
            step = min(item.attempt.step for item in items)
            lease = self._grant(record.number, member, items, step, now_ms, copy=record.copy)
            lease.seq, lease.expires_ms = record.seq, now_ms + record.lease_ms

    def begin_leases(self, first: int) -> None:
        """Lease numbers go on from here: above any that an earlier coordinator gave."""
        self._next_lease = max(self._next_lease, first)

    def lease_record(self, number: int) -> LeaseRecord:
        """What `restore_lease` wants to know. Raises KeyError for a lease that is over."""
        lease = self._leases[number]
        return LeaseRecord(
            number=number,
            worker=lease.worker,
            node=lease.node,
            boot=lease.boot,
            seq=lease.seq,
            weights=lease.of.task.weights,
            requests=tuple(lease.requests),
            lease_ms=self.rules.lease_of(lease.of.pace),
            copy=lease.copy,
        )

    def lease_records(self) -> list[LeaseRecord]:
        """Every lease there is, oldest first."""
        return [self.lease_record(number) for number in sorted(self._leases)]

    def committed(self, requests: Iterable[RequestId]) -> list[tuple[RequestId, int, str]]:
        """Durable in-flight states of these requests: (request, step, blob)."""
        items = [self._items[request] for request in requests if request in self._items]
        return [(i.attempt.request, i.attempt.step, i.attempt.state) for i in items if i.attempt.state is not None]

    def forget_all_weights(self) -> None:
        """A new lineage begins: versions of the old one mean something else."""
        self.live = None
        self._digests.clear()

    def check(self, number: int | None = None) -> None:
        """AssertionError if what we know contradicts itself: of one lease that is open, or of everything."""
        numbers = self._leases if number is None else [n for n in (number,) if n in self._leases]
        for known in numbers:
            lease = self._leases[known]
            weights = lease.of.task.weights
            assert lease.requests, f"lease {known} holds nothing"
            assert known in self._workers[lease.worker].leases, f"lease {known} is unknown to its worker"
            for request, item in lease.requests.items():
                assert self._items[request] is item, f"lease {known} holds an attempt at {request} that is over"
                assert known in item.leases, f"{request} does not know its lease {known}"
                assert item.place is None, f"{request} is leased and waits"
                assert item.attempt.weights is weights or item.attempt.weights == weights, f"{request}: two versions"
        if number is not None:
            return
        for request, item in self._items.items():
            states = (bool(item.leases), item.place is not None, request in self.poisoned)
            assert sum(states) == 1, f"{request}: leased, waiting, poisoned = {states}"
            assert len(item.leases) <= 2, f"{request} is made by {len(item.leases)} workers"
            assert request not in self.finished, f"{request} is finished and wanted"
            if item.place is not None:
                assert self._waiting[request.kind][item.place][request] is item
                assert item.place == self._place_of(item), f"{request} waits in the wrong place"
        assert all(bucket for places in self._waiting.values() for bucket in places.values()), "an empty place"
        held = [number for member in self._workers.values() for number in member.leases]
        assert sorted(held) == sorted(self._leases), "workers and leases disagree"
        assert all(n < self._next_lease for n in self._leases), "a lease number of the future"

    # --- orders -----------------------------------------------------------------------------------------

    def _order(
        self,
        member: _Worker,
        now_ms: int,
        holds: tuple[WeightsKey, str] | None,
        kinds: Sequence[Kind],
        room: int | None,
    ) -> Reply:
        node = self._nodes[member.node]
        if self.stop_reason is not None:
            return Exit(reason=self.stop_reason)
        if node.lost_ms is not None:
            return Exit(reason="this node was given up")
        if node.deadline_ms is not None:
            return Drain(deadline_ms=node.deadline_ms)
        too_large = 0
        for kind in PRIORITY:
            if kind not in kinds:
                continue
            items, copy = self._first_waiting(kind, room), False
            if items is None and kind not in (Kind.CONTROL, Kind.EXPLORE):
                items, copy = self._slowest(kind, member.name, now_ms, room), True
            if items is None:
                too_large = too_large or self._too_large(kind, room)
                continue
            load = self._load(items[0].attempt.weights, holds)
            return load if load is not None else self._work(member, items, now_ms, copy=copy)
        if too_large and member.told_room != room:
            member.told_room = room
            text = f"{member.name} has room for {room} pictures a forward pass, and what waits needs {too_large}"
            self.events.append(
                Warned(text=f"{text}; lower the shape of runtime, evaluation or exploration if nobody can take it")
            )
        return self._load(self.live, holds) or Wait()

    def _first_waiting(self, kind: Kind, room: int | None) -> list[_Item] | None:
        """What a lease would take: as many as the shape holds of the first place that this worker can serve."""
        for bucket in self._waiting[kind].values():
            first = next(iter(bucket.values()))
            task = first.of.task
            if first.attempt.weights in self._digests and (room is None or task.shape <= room):
                if len(bucket) <= task.shape:
                    return list(bucket.values())
                items = iter(bucket.values())
                return [next(items) for _ in range(task.shape)]
        return None

    def _slowest(self, kind: Kind, worker: str, now_ms: int, room: int | None) -> list[_Item] | None:
        """The work that will end last, if making it again from what is committed would end sooner."""
        found: list[_Item] | None = None
        latest = 0.0
        for lease in self._leases.values():
            task, pace = lease.of.task, lease.of.pace.step_ms
            if lease.worker == worker or not pace or task.requests[0].kind is not kind:
                continue
            items = list(lease.requests.values())
            if any(len(item.leases) > 1 or item.deaths for item in items) or (room is not None and task.shape > room):
                continue  # a suspect is never made twice at once: it would bring down two workers at a time
            step = min(item.attempt.step for item in items)
            end_ms = lease.end_ms(now_ms, self.rules.lease_of(lease.of.pace) // 2)
            if end_ms > latest and now_ms + pace * (task.steps - step + 1) < end_ms:
                found, latest = [item for item in items if item.attempt.step == step], end_ms
        return found

    def _too_large(self, kind: Kind, room: int | None) -> int:
        """The shape of work that waits only because this worker has no room for it; 0: there is none."""
        if room is None:
            return 0
        firsts = (next(iter(bucket.values())) for bucket in self._waiting[kind].values())
        return next((first.of.task.shape for first in firsts if first.of.task.shape > room), 0)

    def _load(self, weights: WeightsKey | None, holds: tuple[WeightsKey, str] | None) -> LoadWeights | None:
        if weights is None or weights not in self._digests:
            return None
        digest = self._digests[weights]
        return None if holds == (weights, digest) else LoadWeights(weights=weights, digest=digest)

    def _work(self, member: _Worker, items: list[_Item], now_ms: int, *, copy: bool) -> Work:
        number, of = self._next_lease, items[0].of
        self._next_lease += 1
        lease = self._grant(number, member, items, items[0].attempt.step, now_ms, copy=copy)
        return Work(
            lease=number,
            attempts=tuple(item.attempt for item in items),
            sampler=of.task.sampler,
            shape=of.task.shape,
            dtype=of.task.dtype,
            expires_ms=lease.expires_ms,
            commit_every=self._commit_every(of, lease.first_step),
            pictures=tuple(item.attempt.request in of.shown for item in items),
            scorer=of.task.scorer,
        )

    def _commit_every(self, of: _Submitted, first_step: int) -> int:
        """Steps between commits; 0: on notice only."""
        task, step_ms = of.task, of.pace.slowest_ms or of.pace.step_ms
        if task.requests[0].kind is not Kind.TRAIN:
            return 0
        if self.rules.commit_every is not None:
            every = self.rules.commit_every
        elif not self._commit_ms or not step_ms:
            every = max(1, task.steps // 2)  # once a rollout, to see what it costs
        else:
            every = commit_interval(self._commit_ms, self._preemption_ms, step_ms)
        return every if first_step + every < task.steps else 0

    def _mean_life(self, now_ms: int) -> float:
        """Mean time to preemption: what was assumed counts as one node's life beside those that were seen."""
        spot = [node for node in self._nodes.values() if node.market is Market.SPOT]
        lived = sum((now_ms if node.lost_ms is None else node.lost_ms) - node.first_ms for node in spot)
        return (self.rules.preemption_ms + lived) / (1 + self._losses)

    # --- leases -----------------------------------------------------------------------------------------

    def _grant(self, number: int, member: _Worker, items: list[_Item], step: int, now_ms: int, *, copy: bool) -> _Lease:
        of = items[0].of
        for item in items:
            if item.place is not None:
                self._stop_waiting(item)
            item.leases.append(number)
        lease = self._leases[number] = _Lease(
            worker=member.name,
            node=member.node,
            boot=member.boot,
            seq=member.seq,
            of=of,
            requests={item.attempt.request: item for item in items},
            first_step=step,
            granted_ms=now_ms,
            heard_ms=now_ms,
            expires_ms=now_ms + self.rules.lease_of(of.pace),
            step=step,
            copy=copy,
        )
        member.leases.add(number)
        return lease

    def _hear(self, lease: _Lease, step: int, now_ms: int) -> None:
        """Its worker called in: renew, and learn how long its steps take."""
        if step > lease.step:
            lease.of.pace.hear((now_ms - lease.heard_ms) / (step - lease.step))
            lease.step, lease.heard_ms = step, now_ms
        lease.expires_ms = now_ms + self.rules.lease_of(lease.of.pace)

    def _came_late(self, worker: str, number: int, now_ms: int) -> _Lease | None:
        """A lease that was given away for silence is spoken of after all: the next ones last longer, up to twice.

        Without that, work whose one step takes longer than a lease would be given away for ever.
        """
        member = self._workers.get(worker)
        if member is None or member.missed is None or member.missed[0] != number:
            return None
        lease, member.missed = member.missed[1], None
        pace = lease.of.pace
        pace.hear(min(now_ms - lease.heard_ms, 2 * self.rules.lease_of(pace) / STEPS_PER_LEASE))
        return lease

    def _end(self, number: int) -> _Lease:
        lease = self._leases.pop(number)
        self._workers[lease.worker].leases.discard(number)
        return lease

    def _leave(self, item: _Item) -> None:
        """Out of the queue, and out of its leases: who holds one no longer speaks for it."""
        if item.place is not None:
            self._stop_waiting(item)
        for number in item.leases:
            lease = self._leases[number]
            del lease.requests[item.attempt.request]
            if not lease.requests:
                self._end(number)
        item.leases = []

    def _done(self, result: Finished) -> None:
        item = self._items.pop(result.request, None)
        if item is not None:
            self._leave(item)
            self.poisoned.pop(result.request, None)
            self.finished[result.request] = result

    def _commit_state(self, item: _Item, step: int, blob: str) -> None:
        if step <= item.attempt.step:
            return
        waits = item.place is not None
        if waits:
            self._stop_waiting(item)
        item.attempt = Attempt(request=item.attempt.request, weights=item.attempt.weights, step=step, state=blob)
        if waits:
            self._wait(item, first=True)

    def _requeue(self, number: int, now_ms: int) -> int:
        """Give a lease's requests back to the queue, first in line.

        Returns the denoising steps that must be done again: those since the last commit, by what was heard of the
        lease and by how long it was held (an estimate: the dead do not tell).
        """
        lease = self._end(number)
        made, lost = lease.made_by(now_ms), 0
        for item in reversed(lease.requests.values()):
            item.leases.remove(number)
            if item.leases:
                continue  # somebody else makes it too
            lost += max(0, made - item.attempt.step)
            self._wait(item, first=True)
        return lost

    def _give_away(self, numbers: Iterable[int], node: str, reason: str, now_ms: int) -> None:
        ordered = sorted(numbers)
        held = [(self._leases[number].worker, list(self._leases[number].requests)) for number in ordered]
        lost = sum(self._requeue(number, now_ms) for number in reversed(ordered))
        for worker, requests in held:
            self._workers[worker].suspects += [(request, len(requests) == 1) for request in requests]
        if ordered or reason == GIVEN_UP:
            fenced = sum(len(requests) for _, requests in held)
            self.events.append(NodeMissed(node=node, reason=reason, lost_steps=lost, fenced_requests=fenced))

    def _blame(self, request: RequestId, text: str, *, alone: bool) -> None:
        """A worker came down with this request. Who got further than the last time is not the cause.

        Nothing is reported that was not made `alone` at last: deaths are heard of late, so that the third of one that
        is innocent may be of a lease that was given out before the first was known.
        """
        item = self._items.get(request)
        if item is None or request in self.poisoned:
            return
        waits = item.place is not None
        if waits:
            self._stop_waiting(item)
        item.deaths = 1 if item.attempt.step > item.died_at else item.deaths + 1
        item.died_at = item.attempt.step
        if item.deaths >= MOST_DEATHS and alone and not item.leases:
            self.poisoned[request] = text
            self.events.append(Warned(text=f"{request.prompt!r} brought down {item.deaths} workers and waits: {text}"))
        elif waits:
            self._wait(item, first=True)

    # --- waiting ----------------------------------------------------------------------------------------

    def _place_of(self, item: _Item) -> _Place:
        """Suspects are made one at a time: a third death then tells which it was, and the others are cleared."""
        alone = item.attempt.request if item.deaths >= MOST_DEATHS - 1 else None
        return (item.of.number, item.attempt.step, alone)

    def _wait(self, item: _Item, *, first: bool = False) -> None:
        request = item.attempt.request
        places = self._waiting[request.kind]
        item.place = self._place_of(item)
        bucket = places.get(item.place)
        if bucket is None:
            bucket = places[item.place] = OrderedDict()
        bucket[request] = item
        if first:
            bucket.move_to_end(request, last=False)
            places.move_to_end(item.place, last=False)

    def _stop_waiting(self, item: _Item) -> None:
        request = item.attempt.request
        assert item.place is not None
        bucket = self._waiting[request.kind][item.place]
        del bucket[request]
        if not bucket:
            del self._waiting[request.kind][item.place]
        item.place = None

    # --- members ----------------------------------------------------------------------------------------

    def _node(self, name: str, now_ms: int) -> _Node:
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = _Node(first_ms=now_ms, seen_ms=now_ms)
        return node

    def _see(self, name: str, now_ms: int) -> _Node:
        node = self._node(name, now_ms)
        node.seen_ms = now_ms
        return node

    def _pending(self, name: str) -> Reply:
        """The order that every answer carries."""
        if self.stop_reason is not None:
            return Exit(reason=self.stop_reason)
        deadline_ms = self._nodes[name].deadline_ms
        return Wait() if deadline_ms is None else Drain(deadline_ms=deadline_ms)

    def _meet(self, worker: str, name: str, boot: int, now_ms: int) -> _Worker | None:
        """The worker that calls; None for a process that a newer one has replaced."""
        node = self._see(name, now_ms)
        if not node.called:
            node.called = True
            self.events.append(NodeSeen(node=name, worker=worker))
        member = self._workers.get(worker)
        if member is None:
            member = self._workers[worker] = _Worker(name=worker, node=name, boot=boot)
        elif boot < member.boot:
            return None
        elif boot > member.boot:
            # Its node lives and its process died: of what it held, not of the cloud.
            self._give_away(member.leases, name, "its worker started anew", now_ms)
            suspects = member.suspects
            member.boot, member.seq, member.work, member.suspects = boot, -1, None, []
            for request, alone in reversed(suspects):
                self._blame(request, f"{worker} died while it made this", alone=alone)
        else:
            member.suspects = []
        return member
