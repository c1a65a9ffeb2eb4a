"""Possible bugs of the queue and the coordinator, planted one at a time.

Each changes a few lines of the real classes and has a sentence on the missing behaviour. The simulator must find every
one of them. If one survives, the simulator is not hostile enough.
"""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from engine.coordinator import coordinator as coordinator_module
from engine.coordinator.coordinator import Coordinator
from engine.coordinator.journal import Journal
from engine.coordinator.run_log import RunLog
from engine.coordinator.run_state import RunState
from engine.coordinator.worker_calls import WorkerCalls
from engine.protocol.codec import encode_record
from engine.protocol.messages import Commit, Finish
from engine.protocol.records import LeaseRecord, ResultsAccepted, StatesCommitted
from engine.protocol.request import Exit, Fenced, Finished, Reply, RequestId, Wait
from engine.queue import queue as queue_module
from engine.queue import suspects
from engine.queue.backlog import Backlog
from engine.queue.queue import Queue
from engine.queue.speculation import slowest_requests
from engine.queue.state import QueueState
from engine.queue.weights import PublishedWeights
from tests.mutants.planted_bug import PlantedBug

MUTANTS: dict[str, PlantedBug] = {}


def mutant(where: Any, name: str, forgets: str) -> Callable[[Any], Any]:
    """Register a function that replaces `where.name`; the planted bug has the name of the function."""

    def plant(instead: Any) -> Any:
        title = instead.__name__.strip("_")
        MUTANTS[title] = PlantedBug(name=title, forgets=forgets, patches=((where, name, instead),))
        return instead

    return plant


def _nothing(*_: Any, **__: Any) -> None:
    """Replace a method and do nothing."""


def forgotten(title: str, where: Any, name: str, forgets: str, instead: Any = _nothing) -> None:
    MUTANTS[title] = PlantedBug(name=title, forgets=forgets, patches=((where, name, instead),))


# --- fences


@mutant(WorkerCalls, "_finish", "whether the one who says that it is finished still holds the lease")
def no_fence_on_finish(self: WorkerCalls, call: Finish, blobs: Any, now_ms: int) -> Reply:
    results = [result for result in call.results if result.request in self._queue.state.requests]
    accepted = ResultsAccepted(results=tuple(results))
    if results:
        self._log.record(accepted, {r.trajectory: blobs[r.trajectory] for r in results if r.trajectory is not None})
    self._log.state.apply(accepted, now_ms)
    return Wait()


@mutant(WorkerCalls, "_commit", "whether the one who commits still holds the lease")
def no_fence_on_commit(self: WorkerCalls, call: Commit, blobs: Any, now_ms: int) -> Reply:
    states = [state for state in call.states if state.request in self._queue.state.requests]
    committed = StatesCommitted(states=tuple(states))
    if states:
        self._log.record(committed, {state.blob: blobs[state.blob] for state in states})
    self._log.state.apply(committed, now_ms)
    return self._queue._pending(call.node)


@mutant(Queue, "_calling_worker", "that a newer process of this worker has called in")
def old_boot_accepted(
    self: Queue, worker: str, name: str, boot: int, now_ms: int, real: Any = Queue._calling_worker
) -> Any:
    known = self.state.members.workers.get(worker)
    return real(self, worker, name, max(boot, known.boot if known else 0), now_ms)


@mutant(Queue, "died", "of which process of a worker the death was told")
def death_of_an_old_boot_counts(
    self: Queue, worker: str, boot: int, reason: str, *, now_ms: int, real: Any = Queue.died
) -> None:
    known = self.state.members.workers.get(worker)
    real(self, worker, known.boot if known else boot, reason, now_ms=now_ms)


@mutant(Queue, "held", "which requests left the lease since it was given")
def what_left_a_lease_is_taken(self: Queue, worker: str, number: int) -> Any:
    return tuple(self.state.requests) if self.may_finish(worker, number) else ()


@mutant(QueueState, "leave", "the second maker of a request, when the first one finished it")
def tail_copy_accepted_twice(self: QueueState, item: Any) -> None:
    if item.slot is not None:
        self.backlog.remove(item)
    for number in item.leases[:1]:
        del self.leases.open[number].requests[item.attempt.request]
        if not self.leases.open[number].requests:
            self.end_lease(number)
    item.leases = []


@mutant(Queue, "withdraw", "that somebody still makes what nobody wants any more")
def withdraw_leaves_leases_alive(self: Queue, requests: Any) -> None:
    for request in requests:
        self.finished.pop(request, None)
        self.poisoned.pop(request, None)
        item = self.state.requests.pop(request, None)
        if item is not None and item.slot is not None:
            self.state.backlog.remove(item)


# --- exactly once


@mutant(QueueState, "finish", "to take what is finished out of the queue")
def finished_work_is_given_out_again(self: QueueState, result: Finished, real: Any = QueueState.finish) -> None:
    item = self.requests.get(result.request)
    real(self, result)
    if item is not None:
        self.requests[result.request] = item
        self.backlog.add(item)


@mutant(Queue, "finish", "the requests of a lease but the first")
def half_a_lease_is_lost(
    self: Queue, worker: str, node: str, number: int, results: Any, *, now_ms: int, real: Any = Queue.finish
) -> Reply:
    reply: Reply = real(self, worker, node, number, results[:1], now_ms=now_ms)
    if number in self.state.leases.open:
        for request in list(self.state.leases.open[number].requests):
            self.state.leave(self.state.requests.pop(request))
    return reply


@mutant(Queue, "begin_leases", "which lease numbers an earlier coordinator gave")
def lease_number_reused(self: Queue, first: int) -> None:
    self.state.leases.next_number = 1


@mutant(Queue, "pull", "what it answered when its answer is asked for again")
def pull_replay_forgotten(self: Queue, worker: str, node: str, *, real: Any = Queue.pull, **arguments: Any) -> Reply:
    known = self.state.members.workers.get(worker)
    if known is not None and known.boot == arguments["boot"] and known.seq == arguments["seq"]:
        known.seq -= 1
        known.work = None
        for number in known.leases:
            self.state.leases.open[number].seq = -1
    return real(self, worker, node, **arguments)  # type: ignore[no-any-return]


@mutant(Queue, "pull", "that a pull which comes late is answered already")
def late_pull_gets_work(self: Queue, worker: str, node: str, *, real: Any = Queue.pull, **arguments: Any) -> Reply:
    known = self.state.members.workers.get(worker)
    if known is not None and known.boot == arguments["boot"] and arguments["seq"] < known.seq:
        arguments["seq"] = known.seq + 1
    return real(self, worker, node, **arguments)  # type: ignore[no-any-return]


# --- durable


@mutant(RunLog, "record", "to wait for the disk before it answers")
def acknowledged_before_durable(self: RunLog, record: Any, blobs: Any = None) -> None:
    self.journal.append(encode_record(record), blobs, durable=False)


forgotten("restore_forgets_finished", Queue, "restore_finished", "results, when it starts again")
forgotten("restore_forgets_committed", Queue, "restore_state", "in-flight state, when it starts again")
forgotten("restore_forgets_leases", Queue, "restore_lease", "who is at work, when it starts again")
forgotten(
    "compaction_drops_committed", Queue, "committed", "in-flight state, when it rewrites its journal", lambda *_: []
)
forgotten("compaction_drops_leases", Queue, "lease_records", "leases, when it rewrites its journal", lambda _: [])


@mutant(coordinator_module, "recover", "published weights, when it starts again")
def restore_forgets_weights(journal: Journal, *more: Any, real: Any = coordinator_module.recover) -> RunState:
    heads = [head for head in journal.replay() if head["op"] != "publish"]
    journal.replay = lambda: iter(heads)  # type: ignore[method-assign]
    return real(journal, *more)  # type: ignore[no-any-return]


@mutant(RunState, "records", "results of the batches that stay, when it rewrites its journal")
def compaction_drops_finished(self: RunState, real: Any = RunState.records) -> Iterator[Any]:
    return (one for one in real(self) if not isinstance(one[0], ResultsAccepted))


@mutant(Coordinator, "_obey", "that orders of the trainer may come late")
def late_orders_are_obeyed(
    self: Coordinator, order: Any, blobs: Any, now_ms: int, real: Any = Coordinator._obey
) -> Any:
    self.state.newest_order = (0, 0)
    return real(self, order, blobs, now_ms)


# --- versions and steps


@mutant(Queue, "submit", "that committed state belongs to the weights it was made with")
def version_ignored_at_resume(self: Queue, task: Any, real: Any = Queue.submit) -> None:
    before = {r: self.state.requests[r].attempt for r in task.requests if r in self.state.requests}
    real(self, task)
    for request, attempt in before.items():
        if request in self.state.requests and attempt.state is not None:
            self.state.commit(self.state.requests[request], attempt.step, attempt.state)


def _weights_are_ignored(self: Queue, record: LeaseRecord, *, now_ms: int, real: Any = Queue.restore_lease) -> None:
    wanted = [
        self.state.requests[request].attempt.weights for request in record.requests if request in self.state.requests
    ]
    real(self, replace(record, weights=wanted[0]) if wanted else record, now_ms=now_ms)


def _leases_come_last(journal: Journal, *more: Any, real: Any = coordinator_module.recover) -> RunState:
    heads = sorted(journal.replay(), key=lambda head: head["op"] == "lease")
    journal.replay = lambda: iter(heads)  # type: ignore[method-assign]
    return real(journal, *more)  # type: ignore[no-any-return]


MUTANTS["version_ignored_in_a_restored_lease"] = PlantedBug(
    name="version_ignored_in_a_restored_lease",
    forgets="with which weights a lease was given, and its place in the journal, when it starts again",
    # Each part alone breaks nothing: the order of the journal and the check of the weights guard the same invariant.
    patches=((Queue, "restore_lease", _weights_are_ignored), (coordinator_module, "recover", _leases_come_last)),
)


@mutant(PublishedWeights, "order", "to look at the bytes: the same version may have been published anew")
def digest_ignored(self: PublishedWeights, weights: Any, holds: Any, real: Any = PublishedWeights.order) -> Any:
    return None if holds is not None and holds[0] == weights else real(self, weights, holds)


@mutant(QueueState, "commit", "that a commit may come late")
def commit_goes_backwards(self: QueueState, item: Any, step: int, blob: str, real: Any = QueueState.commit) -> None:
    if step < item.attempt.step:
        item.attempt = replace(item.attempt, step=0)
    real(self, item, step, blob)


@mutant(Backlog, "slot_of", "that images of one lease must stand at one step")
def steps_mixed_in_a_lease(self: Backlog, item: Any) -> Any:
    return (item.of.number, 0, None)


# --- nodes that drain or are lost


forgotten("notice_forgotten", Queue, "notice", "what the node's agent said")
forgotten("lost_node_forgotten", Queue, "lost", "what the launcher said of a lost node")


@mutant(Queue, "_pending", "to say between two steps that the node drains")
def drain_forgotten(self: Queue, name: str) -> Reply:
    return Wait() if self.stop_reason is None else Exit(reason=self.stop_reason)


@mutant(Queue, "capacity", "that snapshots may come in another order")
def older_generation_accepted(self: Queue, snapshot: Any, *, now_ms: int, real: Any = Queue.capacity) -> None:
    self.state.members.generation = -1
    real(self, snapshot, now_ms=now_ms)


@mutant(Queue, "tick", "leases whose worker is silent")
def expired_lease_never_requeued(self: Queue, now_ms: int) -> None:
    self._ticked_ms = now_ms


@mutant(Queue, "tick", "that it stood still itself")
def freeze_gap_not_granted(self: Queue, now_ms: int, real: Any = Queue.tick) -> None:
    self._ticked_ms = None
    real(self, now_ms)


@mutant(Queue, "heartbeat", "to renew a lease when its worker calls in")
def heartbeat_renews_nothing(self: Queue, worker: str, node: str, leases: Any, *, now_ms: int) -> Reply:
    self.state.members.call(node, now_ms)
    for number in leases:
        if not self.may_finish(worker, number):
            return Fenced(lease=number)
    return self._pending(node)


@mutant(Queue, "_order", "how much room a worker has")
def room_ignored(
    self: Queue, member: Any, now_ms: int, holds: Any, kinds: Any, most_images: Any, real: Any = Queue._order
) -> Reply:
    return real(self, member, now_ms, holds, kinds, None)  # type: ignore[no-any-return]


# --- poisoned requests


forgotten("poison_never_reported", suspects, "CRASHES_TO_POISON", "that some requests can never be made", 10**9)


@mutant(QueueState, "record_crash", "to make suspects one at a time before one is reported")
def innocent_reported_with_the_guilty(
    self: QueueState, request: RequestId, text: str, *, alone: bool, real: Any = QueueState.record_crash
) -> None:
    real(self, request, text, alone=True)


@mutant(Backlog, "slot_of", "to make suspects one at a time")
def suspects_never_parted(self: Backlog, item: Any) -> Any:
    return (item.of.number, item.attempt.step, None)


@mutant(
    queue_module,
    "slowest_requests",
    "that a suspect made twice at once brings down two workers at a time, and is never alone",
)
def suspects_are_copied(leases: Any, *arguments: Any, real: Any = slowest_requests) -> Any:
    leases = list(leases)
    spared = [(item, item.crashes) for lease in leases for item in lease.requests.values() if item.crashes]
    for item, _ in spared:
        item.crashes = 0
    found = real(leases, *arguments)
    for item, crashes in spared:
        item.crashes = crashes
    return found


@mutant(QueueState, "record_crash", "that two of three deaths may be the cloud's")
def reported_too_early(
    self: QueueState, request: RequestId, text: str, *, alone: bool, real: Any = QueueState.record_crash
) -> None:
    if request in self.requests:
        self.requests[request].crashes += 1
        self.requests[request].crashed_at = self.requests[request].attempt.step
    real(self, request, text, alone=alone)
