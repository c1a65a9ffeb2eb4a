"""Serve the queue's state machine, with a journal on disk, a weight book and a clock.

Each call gets one answer, over any transport (in-process, HTTP, Ray). A call with an effect is written to the journal
first and applied second, both before the next call is handled. The call is *acknowledged* only after `sync`. Memory and
journal therefore never disagree, and a worker's acknowledged results are never lost.

The coordinator runs on the on-demand node, beside the trainer. Killed at any moment, the coordinator restarts from its
journal, leases included: a worker in the middle of an image notices nothing. Every start issues lease numbers from a
range of its own.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from engine.clock import Clock
from engine.config import RuntimeConfig
from engine.coordinator.journal import Journal
from engine.coordinator.membership import ALONE, alone
from engine.coordinator.regrouping import Regrouping
from engine.coordinator.weight_book import WeightBook, digest_of
from engine.events import Capacity, NodeUsage, Phase, WorkerSpan
from engine.exploration.batch import BatchExploration, ExplorationOrder
from engine.exploration.budget import PHASES, candidates_that_fit, seconds_until_trained
from engine.protocol.request import (
    Finished,
    Kind,
    Reply,
    RequestId,
    Wait,
    WeightsKey,
    Work,
    request_from_list,
    request_to_list,
)
from engine.protocol.wire import (
    Blobs,
    finished_from_dict,
    finished_to_dict,
    reply_to_dict,
    task_from_dict,
    task_to_dict,
    weights_from_list,
    weights_to_list,
)
from engine.queue.leases import LeaseRecord
from engine.queue.pace import Rules
from engine.queue.queue import PRIORITY, Queue
from engine.queue.task import Task
from engine.storage.progress import ProgressLog

LEASES_PER_MS = 10_000
LEASES_PER_START = 1_000_000
"""Gap between the first lease numbers of two starts. Every start of a coordinator issues numbers above all earlier
ones. The time of day ensures uniqueness on a new machine with an empty journal. The journal's newest number ensures
uniqueness after a clock was set back."""

USAGE_EVERY_WALL_SECONDS = 1.0

Head = dict[str, Any]


class Coordinator:
    """Message handler over the queue, the journal and the weights; see the module docstring.

    Not thread-safe: make one call at a time.
    """

    def __init__(
        self,
        journal: Journal,
        book: WeightBook,
        *,
        clock: Clock,
        rules: Rules,
        progress: ProgressLog | None = None,
        sp_degree: int | Literal["auto"] = 1,
    ) -> None:
        """Restore the state from the journal.

        `sp_degree`: number of workers of a node that share an image's sequence.
        """
        self._clock = clock
        self._rules = rules
        self._progress = progress
        self._book = book
        self.journal = journal
        self.changes = 0
        """Change counter. Grows whenever a repeated call might get a new answer instead of `Wait`."""
        self.lineage = 0
        self._pulls: dict[str, tuple[int, int]] = {}
        """Boot and number of each worker's last pull."""
        self._unheard: dict[str, tuple[int, int]] = {}
        """Boot and number of the last pull of each dead worker. The server repeats a waiting pull internally, but a
        dead worker cannot receive the answer, and so gets no work."""
        self._first_lease = 0
        self._heard = [0, 0]
        """Boot and number of the trainer's newest order. A late order with a smaller number changes nothing."""
        self._tasks: list[Task] = []
        self._digests: dict[WeightsKey, str] = {}
        self._order: dict[tuple[Kind, int], list[RequestId]] = defaultdict(list)
        self._usage: dict[str, _NodeBook] = defaultdict(_NodeBook)
        self._usage_told_ms = clock.now_ms()
        self._poisoned_known: set[RequestId] = set()
        self._exploration: BatchExploration | None = None
        self._idle = _IdleTime()
        self.queue = Queue(rules)
        self._restore()
        self.groups = Regrouping(
            lambda: self.queue.demand(clock.now_ms()),
            sp_degree=sp_degree,
            run_ms=partial(_run_ms, clock),
            first=self._first_lease,
        )

    # --- one call ---------------------------------------------------------------------------------------

    def call(self, head: Mapping[str, Any], blobs: Blobs) -> tuple[Head, dict[str, bytes]]:
        """Answer one message. Raises ValueError if the call is unknown, OSError if the disk is full."""
        now_ms = self._clock.now_ms()
        self._note_usage(head, now_ms)
        match head["call"]:
            case "pull":
                return reply_to_dict(self._pull(head, now_ms)), {}
            case "heartbeat":
                leases = {int(number): step for number, step in head["leases"].items()}
                reply = self.queue.heartbeat(head["worker"], head["node"], leases, now_ms=now_ms)
                if isinstance(reply, Wait) and self.groups.members.must_come(head["worker"]):
                    reply = alone(head["worker"])
                return reply_to_dict(reply), {}
            case "finish":
                return reply_to_dict(self._finish(head, blobs, now_ms)), {}
            case "commit":
                return reply_to_dict(self._commit(head, blobs, now_ms)), {}
            case "give_back":
                self.changes += 1
                return reply_to_dict(self.queue.give_back(head["worker"], head["lease"], now_ms=now_ms)), {}
            case "fault":
                self.changes += 1
                reply = self.queue.fault(head["worker"], head["node"], head["lease"], head["text"], now_ms=now_ms)
                self._remember_poison()
                return reply_to_dict(reply), {}
            case "died":
                worker = head["worker"]
                self.queue.died(worker, head["boot"], head["reason"], now_ms=now_ms)
                if head["boot"] >= self._pulls.get(worker, (0, 0))[0]:  # else a newer process has already called
                    self._unheard[worker] = self._pulls.get(worker, (0, 0))
                    self.groups.gone([worker], f"{worker} died", now_ms=now_ms)
            case "node_lost":
                self.queue.unreachable(head["node"], head["reason"], now_ms=now_ms)
                workers = self.groups.members.workers_of(head["node"])
                self.groups.gone(workers, f"{head['node']} is lost", now_ms=now_ms)
            case "notice":
                self.queue.notice(head["node"], head["deadline_ms"], now_ms=now_ms)
            case "states":
                return {"do": "states"}, {name: self.journal.blob(name) for name in head["names"]}
            case "weights":
                return {"do": "weights"}, {"weights": self._book.read(weights_from_list(head["weights"]))}
            case _:
                return self._call_of_trainer(head, blobs, now_ms)
        self.changes += 1
        return {"do": "done"}, {}

    def _call_of_trainer(self, head: Mapping[str, Any], blobs: Blobs, now_ms: int) -> tuple[Head, dict[str, bytes]]:
        match head["call"]:
            case "peek":
                return self._known(), {}
            case "collect":
                return self._collect(head, now_ms)
        said = [head.get("boot", 0), head.get("seq", 0)]
        if said < self._heard:
            return {"do": "late"}, {}
        self._heard = said
        match head["call"]:
            case "hello":
                self._record({"op": "hello", "lineage": head["lineage"], "said": said})
                self._hello(head["lineage"])
                self._compact()
            case "submit":
                task = task_from_dict(head["task"])
                self._record({"op": "submit", "task": head["task"], "said": said})
                self._submit(task)
            case "explore":
                order = ExplorationOrder.from_dict(head["order"])
                self._record({"op": "explore", "order": order.to_dict(), "said": said})
                self._explore(order)
                self._deal(now_ms)
            case "publish":
                digest = self._publish(weights_from_list(head["weights"]), blobs["weights"])
                self.changes += 1
                return {"do": "published", "digest": digest}, {}
            case "withdraw":
                self._record({"op": "withdraw", "batches": head["batches"], "said": said})
                self._withdraw([(Kind(kind), batch) for kind, batch in head["batches"]])
                self._compact()
            case "stop":
                self.stop(head["reason"])
            case other:
                raise ValueError(f"the coordinator does not know the call {other!r}")
        self.changes += 1
        return {"do": "done"}, {}

    def set_capacity(self, snapshot: Capacity) -> None:
        """Apply the launcher's snapshot of the nodes."""
        self.queue.capacity(snapshot, now_ms=self._clock.now_ms())
        self.changes += 1

    def stop(self, reason: str) -> None:
        """Order every process to exit.

        The trainer learns of the stop first, from its next `collect`; the workers follow.
        """
        self.queue.stop(reason)
        self.changes += 1

    def tick(self) -> None:
        """Expire leases, regroup workers and write events to the progress log. Call often."""
        now_ms = self._clock.now_ms()
        before = len(self.queue.events)
        self.queue.tick(now_ms)
        ends = self.queue.stop_reason is not None  # no regroup while workers exit
        regrouped = not ends and self.groups.tick(self.queue.takes_part, now_ms=now_ms)
        if regrouped or len(self.queue.events) != before:
            self.changes += 1
        if self._progress is None:
            return
        self._progress.flush()
        for events in (self.queue.events, self.groups.events):
            while events:
                self._progress.write(self.lineage, events[0])
                events.pop(0)
        if self._clock.wall_seconds(now_ms - self._usage_told_ms) >= USAGE_EVERY_WALL_SECONDS:
            self._tell_usage(now_ms)

    # --- workers ----------------------------------------------------------------------------------------

    def _pull(self, head: Mapping[str, Any], now_ms: int) -> Reply:
        holds = head["holds"]
        kinds = [Kind(kind) for kind in head["kinds"]] if head.get("kinds") else PRIORITY
        if Kind.EXPLORE in kinds:
            self._idle.explorers[head["worker"]] = head["node"]
            self._deal(now_ms)
        if not self._may_work(head, now_ms):
            kinds = []
        missed = len(self.queue.events)
        reply = self.queue.pull(
            head["worker"],
            head["node"],
            boot=head["boot"],
            seq=head["seq"],
            now_ms=now_ms,
            holds=(weights_from_list(holds[:2]), holds[2]) if holds else None,
            kinds=kinds,
            room=head.get("room"),
        )
        if len(self.queue.events) != missed:
            self._remember_poison()
            self.changes += 1
        if isinstance(reply, Work):
            self.groups.members.busy(head["worker"])
            self._remember_lease(reply.lease)
        elif isinstance(reply, Wait) and (order := self.groups.members.order(head["worker"])):
            if order.epoch != ALONE:
                self.changes += 1  # the other members wait for the same regroup
            return order
        return reply

    def _may_work(self, head: Mapping[str, Any], now_ms: int) -> bool:
        """Return True if the pulling worker may get work.

        The worker must lead its group, and the group must be the wanted group.
        """
        worker = head["worker"]
        pull = self._pulls[worker] = (head["boot"], head["seq"])
        if self._unheard.get(worker) == pull:
            return False
        if "group" not in head:
            return True
        if not self.queue.takes_part(head["node"]):
            return True  # the pull's answer will be drain or exit
        if self.groups.pulled(worker, head["boot"], head["group"], now_ms=now_ms):
            self.changes += 1
        return self.groups.members.leads(worker)

    def _finish(self, head: Mapping[str, Any], blobs: Blobs, now_ms: int) -> Reply:
        self._renew(head, now_ms)
        # Record only results with a valid lease. Otherwise a restart would accept results of revoked leases.
        held = set(self.queue.held(head["worker"], head["lease"]))
        results = [result for result in map(finished_from_dict, head["results"]) if result.request in held]
        results = [replace(result, node=head["node"]) for result in results]
        if results:
            kept = {name: blobs[name] for name in (r.trajectory for r in results) if name is not None}
            self._record({"op": "finish", "results": [finished_to_dict(result) for result in results]}, kept)
        reply = self.queue.finish(head["worker"], head["node"], head["lease"], results, now_ms=now_ms)
        if isinstance(reply, Wait):
            if "pace" in head:
                self.groups.measured(*head["pace"])
            self._in_order(results)
            self._explored(results)
            if not self.queue.wanted(Kind.TRAIN):
                self._idle.begins(now_ms)
            self.changes += 1
        return reply

    def _commit(self, head: Mapping[str, Any], blobs: Blobs, now_ms: int) -> Reply:
        self._renew(head, now_ms)
        held = set(self.queue.held(head["worker"], head["lease"]))
        named = {request_from_list(raw): (step, name) for raw, step, name in head["states"]}
        states = {request: state for request, state in named.items() if request in held}
        if states:
            kept = [[request_to_list(request), step, name] for request, (step, name) in states.items()]
            self._record({"op": "commit", "states": kept}, {name: blobs[name] for _, name in states.values()})
        cost_ms = head.get("commit_ms")
        return self.queue.commit(head["worker"], head["node"], head["lease"], states, now_ms=now_ms, cost_ms=cost_ms)

    def _renew(self, head: Mapping[str, Any], now_ms: int) -> None:
        """Renew the worker's lease, even if the disk has no room for the results in the message."""
        self.queue.heartbeat(head["worker"], head["node"], {head["lease"]: 0}, now_ms=now_ms)

    def _note_usage(self, head: Mapping[str, Any], now_ms: int) -> None:
        """Add the usage spans of a worker since its last call. `of` is the number of workers of its node."""
        if head.get("usage"):
            worker = head.get("worker", f"{head['node']}/trainer")
            self._usage[head["node"]].add(worker, head["usage"], head["of"])
            self._idle.exploring_ms += sum(
                end - begin for name, begin, end in head["usage"] if name == Phase.EXPLORATION
            )

    def _tell_usage(self, now_ms: int) -> None:
        self._usage_told_ms = now_ms
        for node, book in self._usage.items():
            event = book.tell(node, now_ms)
            if event is not None and self._progress is not None:
                self._progress.write(self.lineage, event)

    # --- exploration ------------------------------------------------------------------------------------

    def _explore(self, order: ExplorationOrder) -> None:
        """Start to issue candidates of the order's batch. A repeated order changes nothing."""
        if self._exploration is None or self._exploration.order != order:
            self._exploration = BatchExploration(order)

    def _deal(self, now_ms: int) -> None:
        """Submit more candidates once every submitted one is leased and no request of higher priority waits."""
        exploration = self._exploration
        if exploration is None or any(self.queue.waits(kind) for kind in PRIORITY):
            return
        nodes = self.queue.live_nodes(now_ms, 2 * self._rules.lease_ms)
        fit = self._idle.fit(nodes, exploration.pending, self._clock, now_ms)
        requests = exploration.more(fit)
        if requests:
            order = exploration.order
            task = Task(
                requests=requests,
                weights=WeightsKey(version=order.version),
                sampler=order.sampler,
                steps=order.steps,
                shape=order.shape,
                dtype=order.dtype,
                scorer=order.scorer,
            )
            self._record({"op": "submit", "task": task_to_dict(task)})
            self._submit(task)

    def _explored(self, results: Sequence[Finished]) -> None:
        """Report finished candidates to the batch's exploration.

        `BatchExploration` ignores candidates of other orders.
        """
        candidates = [result for result in results if result.request.kind is Kind.EXPLORE]
        self._idle.candidates += len(candidates)
        if self._exploration is not None:
            self._exploration.heard(candidates)

    # --- the trainer ------------------------------------------------------------------------------------

    def _known(self) -> Head:
        """Return the facts a starting trainer needs: this machine's lineage and the newest published weight version."""
        live = self.queue.live
        return {"do": "known", "lineage": self.lineage, "version": live.version if live else None}

    def _hello(self, lineage: int) -> None:
        """Begin a lineage with an empty queue."""
        if lineage != self.lineage:
            self.lineage = lineage
            self._withdraw_all()

    def _submit(self, task: Task) -> None:
        self._tasks.append(task)
        self.queue.submit(task)
        if self._exploration is not None:
            self._exploration.took(task.requests)

    def _publish(self, weights: WeightsKey, data: bytes) -> str:
        digest = digest_of(data)
        self._book.write(weights, data)
        record = {"op": "publish", "weights": weights_to_list(weights), "digest": digest, "said": self._heard}
        self._record(record)
        self._digests[weights] = digest
        self.queue.publish(weights, digest)
        if not weights.average:
            self._idle.ends(self._clock)
        return digest

    def _withdraw(self, batches: Sequence[tuple[Kind, int]]) -> None:
        """Forget batches of requests, finished or not, and drop weights no longer needed.

        The next compaction removes the batches from the journal.
        """
        gone = [r for task in self._tasks for r in task.requests if (r.kind, r.batch) in batches]
        self.queue.withdraw(gone)
        for batch in batches:
            self._order.pop(batch, None)
        if self._exploration is not None and (Kind.EXPLORE, self._exploration.order.batch) in batches:
            self._exploration = None
        dropped = set(gone)
        self._tasks = [task for task in self._tasks if not dropped.issuperset(task.requests)]
        live = self.queue.live
        keep = [] if live is None else [live, WeightsKey(version=live.version - 1)]
        for weights in self.queue.forget_weights(keep):
            self._digests.pop(weights, None)
            self._book.drop(weights)

    def _collect(self, head: Mapping[str, Any], now_ms: int) -> tuple[Head, dict[str, bytes]]:
        """Return the results of a batch from index `have` on, in order of arrival, with their trajectories.

        `poisoned`: number of poisoned requests the caller knows already.
        """
        kind, batch = Kind(head["kind"]), head["batch"]
        found = [self.queue.finished[request] for request in self._order[kind, batch][head["have"] :]]
        self._remember_poison()
        poisoned = [text for request, text in self.queue.poisoned.items() if request.kind == kind]
        answer = {
            "do": "results",
            "results": [finished_to_dict(result) for result in found],
            "stop": self.queue.stop_reason,
            "poisoned": poisoned[head.get("poisoned", 0) :],
            "nodes": self.queue.live_nodes(now_ms, 2 * self._rules.lease_ms),
            "to_come": None if self._exploration is None else self._exploration.open,
            "exploring_seconds": self._clock.wall_seconds(round(self._idle.exploring_ms)),
        }
        names = [result.trajectory for result in found if result.trajectory is not None]
        return answer, {name: self.journal.blob(name) for name in names}

    # --- journal ----------------------------------------------------------------------------------------

    def _record(self, record: Head, blobs: Blobs | None = None) -> None:
        self.journal.append(record, blobs)

    def _remember_lease(self, number: int) -> None:
        """Record the lease without waiting for the disk.

        After a crash, a forgotten lease is revoked: its steps are repeated, and no result is lost.
        """
        self._record_lazily(lease_to_dict(self.queue.lease_record(number)))

    def _remember_poison(self) -> None:
        for request in self.queue.poisoned.keys() - self._poisoned_known:
            self._record({"op": "poison", "request": request_to_list(request), "text": self.queue.poisoned[request]})
            if self._exploration is not None:
                self._exploration.settled(request, math.nan)
        self._poisoned_known = set(self.queue.poisoned)

    def _record_lazily(self, record: Head) -> None:
        with contextlib.suppress(OSError):  # the disk is full: the next call with a durable record raises
            self.journal.append(record, durable=False)

    def _in_order(self, results: Iterable[Finished]) -> None:
        for result in results:
            request = result.request
            if self.queue.finished.get(request) is result:
                self._order[request.kind, request.batch].append(request)

    def _restore(self) -> None:
        leases: list[LeaseRecord] = []
        for record in self.journal.replay():
            self._heard = max(self._heard, record.get("said", self._heard))
            match record["op"]:
                case "start":
                    self._first_lease = record["first_lease"]
                case "hello":
                    self._hello(record["lineage"])
                case "withdraw":
                    self._withdraw([(Kind(kind), batch) for kind, batch in record["batches"]])
                case "explore":
                    self._explore(ExplorationOrder.from_dict(record["order"]))
                case "submit":
                    self._submit(task_from_dict(record["task"]))
                case "publish":
                    weights = weights_from_list(record["weights"])
                    self._digests[weights] = record["digest"]
                    self.queue.publish(weights, record["digest"])
                case "finish":
                    results = [finished_from_dict(result) for result in record["results"]]
                    for result in results:
                        self.queue.restore_finished(result)
                    self._in_order(results)
                    self._explored(results)
                case "commit":
                    for raw, step, name in record["states"]:
                        self.queue.restore_state(request_from_list(raw), step, name)
                case "lease":
                    leases.append(lease_from_dict(record))
                case "poison":
                    poisoned = request_from_list(record["request"])
                    self.queue.restore_poisoned(poisoned, record["text"])
                    if self._exploration is not None:
                        self._exploration.settled(poisoned, math.nan)
                case other:
                    raise ValueError(f"the journal holds a record this version does not know: {other!r}")
        now_ms = self._clock.now_ms()
        for lease in leases:
            self.queue.restore_lease(lease, now_ms=now_ms)
        self.queue.tick(now_ms)  # from here on, the queue notices pauses of its own process
        self._poisoned_known = set(self.queue.poisoned)
        known = max([self._first_lease, *(lease.number for lease in leases)])
        self._first_lease = max(known + LEASES_PER_START, now_ms * LEASES_PER_MS)
        self.queue.begin_leases(self._first_lease)
        self._record({"op": "start", "first_lease": self._first_lease})
        self.journal.sync()

    def _withdraw_all(self) -> None:
        for task in self._tasks:
            self.queue.withdraw(task.requests)
        self._tasks, self._digests, self._exploration = [], {}, None
        self._order.clear()
        self.queue.forget_all_weights()

    def _compact(self) -> None:
        """Rewrite the journal with the current state. Blobs of trained batches are dropped."""
        records: list[tuple[Head, dict[str, bytes]]] = [
            ({"op": "start", "first_lease": self._first_lease}, {}),
            ({"op": "hello", "lineage": self.lineage, "said": self._heard}, {}),
        ]
        for weights, digest in self._digests.items():
            records.append(({"op": "publish", "weights": weights_to_list(weights), "digest": digest}, {}))
        if self._exploration is not None:  # before the tasks: each task's requests count as issued candidates
            records.append(({"op": "explore", "order": self._exploration.order.to_dict()}, {}))
        for task in self._tasks:
            records.append(({"op": "submit", "task": task_to_dict(task)}, {}))
        for task in self._tasks:  # after all tasks: a request restarted with new weights is in two tasks
            for request, step, name in self.queue.committed(task.requests):
                raw = [request_to_list(request), step, name]
                records.append(({"op": "commit", "states": [raw]}, {name: self.journal.blob(name)}))
        for request, text in self.queue.poisoned.items():
            records.append(({"op": "poison", "request": request_to_list(request), "text": text}, {}))
        for lease in self.queue.lease_records():
            records.append((lease_to_dict(lease), {}))
        for ordered in self._order.values():
            for request in ordered:
                result = self.queue.finished[request]
                kept = result.trajectory
                blobs = {} if kept is None else {kept: self.journal.blob(kept)}
                records.append(({"op": "finish", "results": [finished_to_dict(result)]}, blobs))
        # On a full disk, the obsolete records stay in the journal until the next compaction.
        with contextlib.suppress(OSError):
            self.journal.rewrite(records)


@dataclass
class _IdleTime:
    """Estimate of the time in which spot workers have nothing better to do.

    The exploration budget is computed from the estimate.

    The estimate is not stored: a restarted coordinator begins with no measurements, like a new run.
    """

    explorers: dict[str, str] = field(default_factory=dict)
    """Node of each exploring worker."""
    phase_seconds: list[float] = field(default_factory=list)
    """Wall seconds of the last training phases, each from the last rollout of a batch to the next weights."""
    since_ms: int | None = None
    """Arrival of the last rollout of the open batch (run's clock); None while rollouts are missing."""
    exploring_ms: float = 0.0
    candidates: int = 0

    def begins(self, now_ms: int) -> None:
        if self.since_ms is None:
            self.since_ms = now_ms

    def ends(self, clock: Clock) -> None:
        if self.since_ms is not None:
            self.phase_seconds = [*self.phase_seconds[1 - PHASES :], clock.wall_seconds(clock.now_ms() - self.since_ms)]
            self.since_ms = None

    def fit(self, nodes: Sequence[str], pending: int, clock: Clock, now_ms: int) -> int:
        """Return the number of candidates to add, given the live nodes and `pending` candidates in progress."""
        elapsed = 0.0 if self.since_ms is None else clock.wall_seconds(now_ms - self.since_ms)
        per_candidate = clock.wall_seconds(round(self.exploring_ms)) / self.candidates if self.candidates else None
        return candidates_that_fit(
            seconds_until_trained(self.phase_seconds, elapsed_seconds=elapsed),
            gpus=sum(node in nodes for node in self.explorers.values()),
            gpu_seconds_per_candidate=per_candidate or None,
            pending=pending,
        )


@dataclass
class _NodeBook:
    """Usage of one node's workers since the last `NodeUsage` event."""

    phase_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[WorkerSpan] = field(default_factory=list)
    from_ms: int | None = None

    def add(self, worker: str, spans: Sequence[Sequence[Any]], of: int) -> None:
        for phase, begun, ended in spans:
            self.phase_ms[phase] += (ended - begun) / of
            self.spans.append((worker, phase, round(begun), round(ended)))
            self.from_ms = round(begun) if self.from_ms is None else self.from_ms

    def tell(self, node: str, now_ms: int) -> NodeUsage | None:
        """Return the usage event, or None if no phase has a whole millisecond. Fractions stay for the next event."""
        whole = {phase: int(spent) for phase, spent in self.phase_ms.items() if spent >= 1}
        if not whole or self.from_ms is None:
            return None
        event = NodeUsage(
            node=node, from_ms=self.from_ms, to_ms=now_ms, phase_ms=whole, spans=tuple(sorted(self.spans, key=_begin))
        )
        for phase, spent in whole.items():
            self.phase_ms[phase] -= spent
        self.spans, self.from_ms = [], now_ms
        return event


def _begin(span: WorkerSpan) -> int:
    return span[2]


def open_coordinator(
    folder: Path, *, clock: Clock, runtime: RuntimeConfig, progress: ProgressLog | None = None
) -> Coordinator:
    """Open the coordinator with its journal and weights in `folder`."""
    rules = Rules(
        lease_ms=_run_ms(clock, runtime.lease_seconds),
        first_lease_ms=_run_ms(clock, runtime.first_lease_seconds),
        commit_every=_commit_every(runtime),
        preemption_ms=round(runtime.hours_to_preemption * 3_600_000),
    )
    return Coordinator(
        Journal(folder),
        WeightBook(folder / "weights"),
        clock=clock,
        rules=rules,
        progress=progress,
        sp_degree=runtime.sp_degree,
    )


def _commit_every(runtime: RuntimeConfig) -> int | None:
    if runtime.resume == "restart":
        return 0  # with `restart`, no worker resumes from a commit
    return None if runtime.commit_every == "auto" else runtime.commit_every


def _run_ms(clock: Clock, wall_seconds: float) -> int:
    return round(wall_seconds / clock.wall_seconds(1))


def lease_to_dict(record: LeaseRecord) -> Head:
    return {
        "op": "lease",
        "number": record.number,
        "worker": record.worker,
        "node": record.node,
        "boot": record.boot,
        "seq": record.seq,
        "weights": weights_to_list(record.weights),
        "requests": [request_to_list(request) for request in record.requests],
        "lease_ms": record.lease_ms,
        "copy": record.copy,
    }


def lease_from_dict(raw: Mapping[str, Any]) -> LeaseRecord:
    requests = tuple(request_from_list(request) for request in raw["requests"])
    fields = {name: value for name, value in raw.items() if name not in ("op", "requests", "weights")}
    return LeaseRecord(**fields, requests=requests, weights=weights_from_list(raw["weights"]))


def is_nothing(answer: Mapping[str, Any]) -> bool:
    """Return True if the answer holds no news. The server may then keep a patient caller waiting."""
    if answer["do"] == "results":
        return not answer["results"] and not answer["stop"] and not answer["poisoned"]
    return answer["do"] == "wait"
