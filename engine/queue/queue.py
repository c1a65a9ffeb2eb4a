"""The pull queue: a state machine that leases rollout requests to workers.

No I/O, no torch, no Ray and no clock. Workers only call in. The queue answers every call with the pending order
(work, load weights, drain, exit). The promises:

- every request of a manifest finishes exactly once, even if workers are killed, frozen, delayed or repeat a call;
- the queue issues each lease number once and rejects calls with a revoked number;
- a worker samples an attempt only with the weights named in the attempt;
- training rollouts come before evaluation, and evaluation comes before exploration; when no request waits, an idle
  worker makes a speculative copy of the lease with the latest predicted end, and the first result to arrive counts;
- a poisoned request (every worker crashes on the request) is reported and no longer retried; requests leased together
  with the poisoned request are cleared.

Methods return every change the coordinator must remember. The coordinator makes the change durable *before* answering
(engine/coordinator/coordinator.py). After a crash, the `restore_...` methods load the same facts.
All times are milliseconds of the run's clock and are passed in by the caller.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.events import Capacity, Market, NodeMissed, NodeSeen, NodeServed, NodeState, ProgressEvent, Warned
from engine.parallel.forecast import Demand, Requests
from engine.protocol.request import (
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
)
from engine.protocol.task import LeaseRecord, Task
from engine.queue.pace import STEPS_PER_LEASE, Pace, Rules, commit_interval

PRIORITY = (Kind.TRAIN, Kind.EVALUATE, Kind.CONTROL, Kind.EXPLORE)

MISSED = "missed its lease"
GIVEN_UP = "reported by the launcher"

MOST_DEATHS = 3
"""After crashes of this many workers at the same step, a request is reported as poisoned and not retried."""


@dataclass(slots=True, eq=False)
class _Submitted:
    """A task with the values needed for each of its requests."""

    number: int
    task: Task
    pace: Pace
    shown: frozenset[RequestId]


_Place = tuple[int, int, RequestId | None]
"""The place of a waiting request: (task, committed step, the request itself if it must run alone, else None).
A lease takes requests from a single place."""


@dataclass(slots=True, eq=False)
class _Item:
    attempt: Attempt
    of: _Submitted
    leases: list[int] = field(default_factory=list)
    place: _Place | None = None
    deaths: int = 0
    died_at: int = -1
    """The committed step at the last crash. A crash at a later step resets the count: the request made progress."""


@dataclass(slots=True, eq=False)
class _Lease:
    worker: str
    node: str
    boot: int
    seq: int
    """Sequence number of the pull answered with this lease."""
    of: _Submitted
    requests: dict[RequestId, _Item]
    first_step: int
    granted_ms: int
    heard_ms: int
    expires_ms: int
    step: int
    """The last denoising step reported by the worker."""
    copy: bool = False

    def made_by(self, now_ms: int) -> int:
        """Return the estimated current step of the images, from the last reported step and the time since the grant."""
        pace, steps = self.of.pace.step_ms, self.of.task.steps
        guess = self.first_step + int((min(now_ms, self.expires_ms) - self.granted_ms) / pace) if pace else 0
        return max(self.step, min(steps, guess))

    def end_ms(self, now_ms: int, silence_ms: int) -> float:
        """Return the predicted finish time in ms.

        The step time is the worker's own, but at least the average of this kind of work. A worker silent for longer
        than `silence_ms` is expected to stay silent for the same time again.
        """
        pace, made = self.of.pace.step_ms, self.step - self.first_step
        own = max(pace, (self.heard_ms - self.granted_ms) / made) if made else pace
        silent = now_ms - self.heard_ms
        since = self.heard_ms if silent <= silence_ms else now_ms + silent
        return since + own * (self.of.task.steps - self.step)


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker by name. `boot` distinguishes the successive processes of the worker."""

    name: str
    node: str
    boot: int
    seq: int = -1
    work: Work | None = None
    """The answer to pull number `seq`, if the answer was work."""
    leases: set[int] = field(default_factory=set)
    suspects: list[tuple[RequestId, bool]] = field(default_factory=list)
    """The requests of the revoked leases, and whether each was alone in its lease. If the worker's process turns out
    to have died while the node lives, these requests are blamed for the crash."""
    missed: tuple[int, _Lease] | None = None
    """The last lease revoked after missed heartbeats, with the lease number."""
    told_room: int | None = None


@dataclass(slots=True, eq=False)
class _Node:
    first_ms: int
    seen_ms: int
    market: Market | None = None
    notice_ms: int | None = None
    """The preemption deadline reported by the node's own agent."""
    told_ms: int | None = None
    """The deadline in the launcher's newest capacity snapshot."""
    lost_ms: int | None = None
    called: bool = False
    served: bool = False

    @property
    def deadline_ms(self) -> int | None:
        return self.notice_ms if self.notice_ms is not None else self.told_ms


class Queue:
    """The pull queue. The module docstring lists the promises. Every method is idempotent."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.events: list[ProgressEvent] = []
        """Events for the launcher. The caller removes them after reading."""
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
        """Add the task's requests. Skip requests already finished, and requests already queued with the same weights.

        A request queued with other weights becomes a new attempt: its old leases are revoked and sampling starts from
        step 0.
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
        """Make weights available to workers. Weights without `average` become the live weights."""
        self._digests[weights] = digest
        if not weights.average:
            self.live = weights

    def withdraw(self, requests: Iterable[RequestId]) -> None:
        """Remove requests: exploration cut short, or a batch already trained. Revoke their leases."""
        for request in requests:
            self.finished.pop(request, None)
            self.poisoned.pop(request, None)
            item = self._items.pop(request, None)
            if item is not None:
                self._leave(item)

    def forget_weights(self, keep: Iterable[WeightsKey]) -> list[WeightsKey]:
        """Drop the weights that are not in `keep`, not live and not needed by a queued request.

        Return the dropped keys.
        """
        needed = set(keep) | {item.attempt.weights for item in self._items.values()}
        dropped = [key for key in self._digests if key not in needed and key != self.live]
        for key in dropped:
            del self._digests[key]
        return dropped

    def wanted(self, kind: Kind) -> int:
        """Return the number of unfinished requests of a kind."""
        return sum(1 for request in self._items if request.kind == kind)

    def waits(self, kind: Kind) -> bool:
        """Return True if a request of this kind waits for a worker."""
        return bool(self._waiting[kind])

    def stop(self, reason: str) -> None:
        """Order every worker to exit at its next call."""
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
        """Return the next order for a worker.

        `boot` numbers the worker's processes and `seq` a process's pulls. A repeated `seq` gets the same work again,
        because the first answer may have been lost.

        `holds`: the worker's loaded weights and their digest. `room`: the most images that fit in a forward pass.
        """
        member = self._meet(worker, node, boot, now_ms)
        if member is None:
            return Exit(reason="a newer process of this worker has called in")
        if seq < member.seq:
            return Wait()
        if seq == member.seq and member.work is not None and member.work.lease in self._leases:
            return member.work
        for number in [n for n in member.leases if self._leases[n].seq >= seq]:
            self._requeue(number, now_ms)  # the answer was lost, and a restart lost `work`
        member.seq = seq
        reply = self._order(member, now_ms, holds, kinds, room)
        member.work = reply if isinstance(reply, Work) else None
        return reply

    def heartbeat(self, worker: str, node: str, leases: Mapping[int, int], *, now_ms: int) -> Reply:
        """Renew leases. `leases` maps lease number to the current denoising step."""
        self._see(node, now_ms)
        for number, step in leases.items():
            lease = self._leases.get(number)
            if lease is None or lease.worker != worker:
                self._came_late(worker, number, now_ms)
                return Fenced(lease=number)
            self._hear(lease, step, now_ms)
        return self._pending(node)

    def may_finish(self, worker: str, number: int) -> bool:
        """Return True if the worker holds the lease. Call before making the worker's bytes durable."""
        lease = self._leases.get(number)
        return lease is not None and lease.worker == worker

    def held(self, worker: str, number: int) -> Sequence[RequestId]:
        """Return the requests still covered by the worker's lease.

        Withdrawn and resubmitted requests are no longer covered.
        """
        return tuple(self._leases[number].requests) if self.may_finish(worker, number) else ()

    def finish(self, worker: str, node: str, number: int, results: Sequence[Finished], *, now_ms: int) -> Reply:
        """Record finished images. Call only after the bytes are durable."""
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
        if number in self._leases:  # only a part is finished: the worker still works on the rest
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
        """Record committed in-flight state. The next worker resumes from `(step, blob)`.

        `cost_ms`: duration of the worker's last commit. A commit renews the lease.
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
        """Return a lease's unfinished requests to the queue. Committed steps are kept."""
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
        self._requeue(number, now_ms)
        return Wait()

    def fault(self, worker: str, node: str, number: int, text: str, *, now_ms: int) -> Reply:
        """Record a worker's failure to make the images of a lease. Return the requests to the queue."""
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

    # --- state of workers and nodes ---------------------------------------------------------------------

    def died(self, worker: str, boot: int, reason: str, *, now_ms: int) -> None:
        """Revoke the leases of a dead process at once. The evidence is a closed connection or an actor's death.

        The evidence may be wrong. A worker still alive gets `Fenced` at its next call and pulls again.
        """
        member = self._workers.get(worker)
        if member is not None and member.boot == boot:
            self._give_away(member.leases, member.node, reason, now_ms)

    def capacity(self, snapshot: Capacity, *, now_ms: int) -> None:
        """Apply the launcher's capacity snapshot. Ignore a generation older than the last applied snapshot."""
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
        """Record a preemption notice from the node's agent. The node's workers are then ordered to drain."""
        self._node(node, now_ms).notice_ms = deadline_ms

    def lost(self, node: str, reason: str, *, now_ms: int) -> None:
        """Mark a node as lost and revoke its leases at once. Workers calling from a lost node are ordered to exit."""
        member = self._node(node, now_ms)
        if member.lost_ms is None:
            member.lost_ms = now_ms
            self._losses += member.market is Market.SPOT
            self.unreachable(node, reason, now_ms=now_ms)

    def unreachable(self, node: str, reason: str, *, now_ms: int) -> None:
        """Revoke the leases of a node that the engine itself saw die.

        The engine may be wrong: the node may call in again.
        """
        numbers = {number for number, lease in self._leases.items() if lease.node == node}
        self._give_away(numbers, node, reason, now_ms)
        for member in self._workers.values():
            if member.node == node:
                member.suspects = []  # the node failed, so no request is blamed

    def tick(self, now_ms: int) -> None:
        """Revoke expired leases. If the coordinator itself was frozen, extend every lease by the length of the gap."""
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
        """Return True if the node's workers may get work: the node is neither lost nor draining."""
        known = self._nodes.get(node)
        return known is None or (known.lost_ms is None and known.deadline_ms is None)

    def demand(self, now_ms: int) -> Demand:
        """Return the waiting and in-flight work, as input for planning SP groups."""
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
            # A worker may hold two leases: the images of the first are scored while the second is sampled.
            if lease.worker not in in_flight or in_flight[lease.worker].steps < left:
                in_flight[lease.worker] = Requests(request_class=task.request_class, steps=left)
        return Demand(waiting=waiting, in_flight=in_flight, pictures=pictures)

    def live_nodes(self, now_ms: int, within_ms: int) -> list[str]:
        """Return the nodes with a lease or a recent call. Draining and lost nodes are left out."""
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
        """Restore a durable result."""
        self._done(result)

    def restore_state(self, request: RequestId, step: int, blob: str) -> None:
        """Restore a durable in-flight state."""
        item = self._items.get(request)
        if item is not None:
            self._commit_state(item, step, blob)

    def restore_poisoned(self, request: RequestId, text: str) -> None:
        """Restore a poisoned request and its error text."""
        item = self._items.get(request)
        if item is not None:
            self._leave(item)
            self.poisoned[request] = text

    def restore_lease(self, record: LeaseRecord, *, now_ms: int) -> None:
        """Restore a lease whose worker kept sampling while the coordinator was down.

        A request leased again by a later record leaves the earlier lease.
        """
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
        """Continue lease numbers from `first`, above every number issued by an earlier coordinator."""
        self._next_lease = max(self._next_lease, first)

    def lease_record(self, number: int) -> LeaseRecord:
        """Return the facts for `restore_lease`. Raises KeyError if the lease has ended."""
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
        """Return the records of all leases, oldest first."""
        return [self.lease_record(number) for number in sorted(self._leases)]

    def committed(self, requests: Iterable[RequestId]) -> list[tuple[RequestId, int, str]]:
        """Return the durable in-flight states of these requests: (request, step, blob)."""
        items = [self._items[request] for request in requests if request in self._items]
        return [(i.attempt.request, i.attempt.step, i.attempt.state) for i in items if i.attempt.state is not None]

    def forget_all_weights(self) -> None:
        """Forget all weights at the start of a new lineage.

        Version numbers of the old lineage mean different weights.
        """
        self.live = None
        self._digests.clear()

    def check(self, number: int | None = None) -> None:
        """Raise AssertionError if the state contradicts itself.

        Check a single open lease, or everything if `number` is None.
        """
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
        """Return the requests of the next lease: up to `shape` requests of the first place that fits the worker."""
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
        """Return the leased requests with the latest predicted end, as a speculative copy.

        Return None if a copy from the committed step would not end sooner.
        """
        found: list[_Item] | None = None
        latest = 0.0
        for lease in self._leases.values():
            task, pace = lease.of.task, lease.of.pace.step_ms
            if lease.worker == worker or not pace or task.requests[0].kind is not kind:
                continue
            items = list(lease.requests.values())
            if any(len(item.leases) > 1 or item.deaths for item in items) or (room is not None and task.shape > room):
                continue  # no speculative copy of a suspect, because a copy could crash two workers at a time
            step = min(item.attempt.step for item in items)
            end_ms = lease.end_ms(now_ms, self.rules.lease_of(lease.of.pace) // 2)
            if end_ms > latest and now_ms + pace * (task.steps - step + 1) < end_ms:
                found, latest = [item for item in items if item.attempt.step == step], end_ms
        return found

    def _too_large(self, kind: Kind, room: int | None) -> int:
        """Return the batch shape of waiting work too large for this worker, or 0 if there is no such work."""
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
        """Return the number of steps between commits. 0 means commit on a preemption notice only."""
        task, step_ms = of.task, of.pace.slowest_ms or of.pace.step_ms
        if task.requests[0].kind is not Kind.TRAIN:
            return 0
        if self.rules.commit_every is not None:
            every = self.rules.commit_every
        elif not self._commit_ms or not step_ms:
            every = max(1, task.steps // 2)  # commit once a rollout, to measure the cost of a commit
        else:
            every = commit_interval(self._commit_ms, self._preemption_ms, step_ms)
        return every if first_step + every < task.steps else 0

    def _mean_life(self, now_ms: int) -> float:
        """Return the mean time to preemption in ms.

        The configured prior counts as one node's life beside the observed lives.
        """
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
        """Renew the lease after a call of its worker and update the step-time estimate."""
        if step > lease.step:
            lease.of.pace.hear((now_ms - lease.heard_ms) / (step - lease.step))
            lease.step, lease.heard_ms = step, now_ms
        lease.expires_ms = now_ms + self.rules.lease_of(lease.of.pace)

    def _came_late(self, worker: str, number: int, now_ms: int) -> _Lease | None:
        """Lengthen future leases (up to twice) after a late call for a lease revoked by missed heartbeats.

        Without longer leases, work whose single step takes longer than a lease would be revoked forever. Return the
        revoked lease, or None if the call is not about the worker's last revoked lease.
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
        """Remove the request from the queue and revoke its leases. Results for revoked leases are rejected."""
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
        """Return a lease's requests to the front of the queue.

        Return the number of denoising steps to repeat: the steps since the last commit. The number is an estimate from
        the last reported step and the time since the grant, because a dead worker reports nothing.
        """
        lease = self._end(number)
        made, lost = lease.made_by(now_ms), 0
        for item in reversed(lease.requests.values()):
            item.leases.remove(number)
            if item.leases:
                continue  # another worker holds a lease on the same request
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
        """Record a worker crash on this request. A crash at a later step than the last crash resets the count to 1.

        A request is reported as poisoned only if its last crash happened `alone` in a lease. Crashes are detected late,
        so an innocent request's third crash may belong to a lease granted before the first crash was known.
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
        """Return the place of a request.

        A suspect gets its own place: a third crash then identifies the poisoned request and clears the requests leased
        with it before.
        """
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
        """Return the pending order for a node's workers. Every reply carries the order."""
        if self.stop_reason is not None:
            return Exit(reason=self.stop_reason)
        deadline_ms = self._nodes[name].deadline_ms
        return Wait() if deadline_ms is None else Drain(deadline_ms=deadline_ms)

    def _meet(self, worker: str, name: str, boot: int, now_ms: int) -> _Worker | None:
        """Return the calling worker, or None if a newer process has replaced the calling process."""
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
            # The worker process died and its node lives: blame the leased requests, not the cloud.
            self._give_away(member.leases, name, "its worker started anew", now_ms)
            suspects = member.suspects
            member.boot, member.seq, member.work, member.suspects = boot, -1, None, []
            for request, alone in reversed(suspects):
                self._blame(request, f"{worker} died while it made this", alone=alone)
        else:
            member.suspects = []
        return member
