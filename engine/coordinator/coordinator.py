"""Serve the queue's state machine, with a journal on disk, a weight book and a clock.

    call -> handle: decide -> journal.append(record) -> state.apply(record) -> answer

Each call gets one answer, over any transport (in-process, HTTP, Ray). A call with an effect is written to the journal
first and applied second, both before the next call is handled. The call is *acknowledged* only after `sync`. Memory and
journal therefore never disagree, and a worker's acknowledged results are never lost.

The coordinator runs on the on-demand node, beside the trainer. Killed at any moment, the coordinator restarts from its
journal (engine/coordinator/recovery.py), leases included: a worker in the middle of an image notices nothing.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, assert_never

import msgspec

from engine.clock import Clock, run_ms
from engine.coordinator import node_usage
from engine.coordinator.exploration_desk import ExplorationDesk
from engine.coordinator.journal import Journal
from engine.coordinator.membership import alone
from engine.coordinator.node_usage import UsageBook
from engine.coordinator.pulls import Pulls
from engine.coordinator.recovery import recover
from engine.coordinator.regrouping import Regrouping
from engine.coordinator.run_state import RunState
from engine.coordinator.weight_book import WeightBook, digest_of
from engine.events import Capacity
from engine.protocol.codec import Blobs, encode_record
from engine.protocol.messages import (
    Answer,
    BeginLineage,
    Call,
    Collect,
    Commit,
    Done,
    Explore,
    Fault,
    FetchStates,
    FetchWeights,
    Finish,
    GiveBack,
    Heartbeat,
    Known,
    Late,
    LeaseCall,
    NodeLost,
    Notice,
    Order,
    Peek,
    Publish,
    Published,
    Pull,
    Result,
    Results,
    States,
    Stop,
    Submit,
    WeightsBytes,
    Withdraw,
    WorkerDied,
)
from engine.protocol.records import Record, ResultsAccepted, StatesCommitted, WeightsPublished, stored
from engine.protocol.request import ALONE, Kind, Reply, Wait, Work
from engine.queue.pace import Rules
from engine.queue.queue import PRIORITY, Queue
from engine.storage.progress import ProgressLog

Answered = tuple[Answer, Mapping[str, bytes]]


class Coordinator:
    """Message handler over the run's state, the journal and the weights; see the module docstring.

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
        self.usage = UsageBook(clock.now_ms())
        self.exploration = ExplorationDesk(clock, rules.lease_ms)
        self._pulls = Pulls()
        self.state: RunState = recover(journal, book, rules, clock.now_ms())
        self.groups = Regrouping(
            lambda: self.queue.demand(clock.now_ms()),
            sp_degree=sp_degree,
            run_ms=partial(run_ms, clock),
            first=self.state.first_lease,
        )

    @property
    def queue(self) -> Queue:
        return self.state.queue

    @property
    def lineage(self) -> int:
        return self.state.lineage

    # --- calls ------------------------------------------------------------------------------------------

    def handle(self, call: Call, blobs: Blobs) -> Answered:
        """Answer one call. Raises OSError if the disk is full, KeyError if a blob is missing."""
        now_ms = self._clock.now_ms()
        self._note_usage(call)
        match call:
            case Pull() | Heartbeat() | Finish() | Commit() | GiveBack() | Fault():
                return self._reply(call, blobs, now_ms), {}
            case FetchStates():
                return States(), {name: self.journal.blob(name) for name in call.names}
            case FetchWeights():
                return WeightsBytes(), {"weights": self._book.read(call.weights)}
            case Peek():
                live = self.queue.live
                return Known(lineage=self.lineage, version=live.version if live else None), {}
            case Collect():
                return self._collect(call, now_ms)
            case WorkerDied() | NodeLost() | Notice():
                self._observe(call, now_ms)
                return Done(), {}
            case BeginLineage() | Submit() | Explore() | Publish() | Withdraw() | Stop():
                return self._obey(call, blobs, now_ms), {}
            case _:
                assert_never(call)

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
        if self._clock.wall_seconds(now_ms - self.usage.reported_ms) >= node_usage.EVERY_WALL_SECONDS:
            for event in self.usage.events(now_ms):
                self._progress.write(self.lineage, event)

    # --- workers ----------------------------------------------------------------------------------------

    def _reply(self, call: LeaseCall, blobs: Blobs, now_ms: int) -> Reply:
        match call:
            case Pull():
                return self._pull(call, now_ms)
            case Heartbeat():
                reply = self.queue.heartbeat(call.worker, call.node, call.leases, now_ms=now_ms)
                if isinstance(reply, Wait) and self.groups.members.must_come(call.worker):
                    return alone(call.worker)
                return reply
            case Finish():
                return self._finish(call, blobs, now_ms)
            case Commit():
                return self._commit(call, blobs, now_ms)
            case GiveBack():
                self.changes += 1
                return self.queue.give_back(call.worker, call.lease, now_ms=now_ms)
            case Fault():
                self.changes += 1
                reply = self.queue.fault(call.worker, call.node, call.lease, call.text, now_ms=now_ms)
                self._record_poison(now_ms)
                return reply
            case _:
                assert_never(call)

    def _pull(self, call: Pull, now_ms: int) -> Reply:
        kinds: Sequence[Kind] = call.kinds or PRIORITY
        if Kind.EXPLORE in kinds:
            self.exploration.add_explorer(call.worker, call.node)
            self._deal(now_ms)
        if not self._may_work(call, now_ms):
            kinds = []
        missed = len(self.queue.events)
        reply = self.queue.pull(
            call.worker,
            call.node,
            boot=call.boot,
            seq=call.seq,
            now_ms=now_ms,
            holds=(call.holds.weights, call.holds.digest) if call.holds else None,
            kinds=kinds,
            room=call.room,
        )
        if len(self.queue.events) != missed:
            self._record_poison(now_ms)
            self.changes += 1
        if isinstance(reply, Work):
            self.groups.members.busy(call.worker)
            self._record_lease(reply.lease)
        elif isinstance(reply, Wait) and (order := self.groups.members.order(call.worker)):
            if order.epoch != ALONE:
                self.changes += 1  # the other members wait for the same regroup
            return order
        return reply

    def _may_work(self, call: Pull, now_ms: int) -> bool:
        """Return True if the pulling worker may get work.

        The worker must lead its group, and the group must be the wanted group.
        """
        if not self._pulls.add(call.worker, call.boot, call.seq):
            return False
        if call.group is None:
            return True
        if not self.queue.takes_part(call.node):
            return True  # the pull's answer will be drain or exit
        if self.groups.pulled(call.worker, call.boot, call.group, now_ms=now_ms):
            self.changes += 1
        return self.groups.members.leads(call.worker)

    def _finish(self, call: Finish, blobs: Blobs, now_ms: int) -> Reply:
        self._renew(call, now_ms)
        # Record only results with a valid lease. Otherwise a restart would accept results of revoked leases.
        held = set(self.queue.held(call.worker, call.lease))
        results = [msgspec.structs.replace(r, node=call.node) for r in call.results if r.request in held]
        accepted = ResultsAccepted(results=tuple(results))
        if results:
            self._record(accepted, {r.trajectory: blobs[r.trajectory] for r in results if r.trajectory is not None})
        finished = [result.finished() for result in results]
        reply = self.queue.finish(call.worker, call.node, call.lease, finished, now_ms=now_ms)
        if isinstance(reply, Wait):
            if call.pace is not None:
                self.groups.measured(call.pace.request_class, call.pace.degree, call.pace.seconds)
            self.state.apply(accepted, now_ms)
            self.exploration.add_candidates(sum(result.request.kind is Kind.EXPLORE for result in results))
            if not self.queue.wanted(Kind.TRAIN):
                self.exploration.begin_training_phase(now_ms)
            self.changes += 1
        return reply

    def _commit(self, call: Commit, blobs: Blobs, now_ms: int) -> Reply:
        self._renew(call, now_ms)
        held = set(self.queue.held(call.worker, call.lease))
        states = [state for state in call.states if state.request in held]
        if states:
            committed = StatesCommitted(states=tuple(states))
            self._record(committed, {state.blob: blobs[state.blob] for state in states})
            self.state.apply(committed, now_ms)
        steps = {state.request: (state.step, state.blob) for state in states}
        return self.queue.commit(call.worker, call.node, call.lease, steps, now_ms=now_ms, cost_ms=call.commit_ms)

    def _renew(self, call: Finish | Commit, now_ms: int) -> None:
        """Renew the worker's lease, even if the disk has no room for the results in the message."""
        self.queue.heartbeat(call.worker, call.node, {call.lease: 0}, now_ms=now_ms)

    def _observe(self, call: WorkerDied | NodeLost | Notice, now_ms: int) -> None:
        """Record news of a worker or node from another process."""
        self.changes += 1
        match call:
            case WorkerDied():
                self.queue.died(call.worker, call.boot, call.reason, now_ms=now_ms)
                if self._pulls.died(call.worker, call.boot):
                    self.groups.gone([call.worker], f"{call.worker} died", now_ms=now_ms)
            case NodeLost():
                self.queue.unreachable(call.node, call.reason, now_ms=now_ms)
                workers = self.groups.members.workers_of(call.node)
                self.groups.gone(workers, f"{call.node} is lost", now_ms=now_ms)
            case Notice():
                self.queue.notice(call.node, call.deadline_ms, now_ms=now_ms)
            case _:
                assert_never(call)

    def _note_usage(self, call: Call) -> None:
        """Add the usage since the caller's last call. The trainer's calls name no worker."""
        if isinstance(call, WorkerDied | NodeLost | Notice) or not call.usage:
            return
        worker = call.worker if isinstance(call, LeaseCall) else f"{call.node}/trainer"
        self.usage.add(call.node, worker, call.usage, call.of)
        self.exploration.add_usage(call.usage)

    def _deal(self, now_ms: int) -> None:
        """Submit the next candidates of the open exploration, if workers would be idle."""
        exploration = self.state.exploration
        task = self.exploration.next_task(exploration, self.queue, now_ms)
        if exploration is None or task is None:
            return
        try:
            self._record_and_apply(Submit(task=task), now_ms)
        except OSError:  # the disk is full: the next pull submits the same candidates
            exploration.take_back(task.requests)
            raise

    # --- the trainer ------------------------------------------------------------------------------------

    def _obey(self, order: Order, blobs: Blobs, now_ms: int) -> Answer:
        """Obey an order of the trainer. Refuse an order that arrives after a newer order."""
        if (order.boot, order.seq) < self.state.newest_order:
            return Late()
        self.state.newest_order = (order.boot, order.seq)
        answer: Answer = Done()
        match order:
            case Publish():
                answer = self._publish(order, blobs["weights"], now_ms)
            case Stop():
                self.queue.stop(order.reason)
            case Submit():
                self._record_and_apply(stored(order), now_ms)
            case Explore():
                self._record_and_apply(stored(order), now_ms)
                self._deal(now_ms)
            case BeginLineage() | Withdraw():
                self._record_and_apply(stored(order), now_ms)
                self._compact()
            case _:
                assert_never(order)
        self.changes += 1
        return answer

    def _publish(self, order: Publish, data: bytes, now_ms: int) -> Published:
        digest = digest_of(data)
        self._book.write(order.weights, data)
        record = WeightsPublished(weights=order.weights, digest=digest, boot=order.boot, seq=order.seq)
        self._record_and_apply(record, now_ms)
        if not order.weights.average:
            self.exploration.end_training_phase(self._clock.now_ms())
        return Published(digest=digest)

    def _collect(self, call: Collect, now_ms: int) -> Answered:
        """Return the results of a batch from index `have` on, in order of arrival, with their trajectories."""
        found = self.state.results(call.kind, call.batch, call.have)
        self._record_poison(now_ms)
        poisoned = [text for request, text in self.queue.poisoned.items() if request.kind == call.kind]
        exploration = self.state.exploration
        answer = Results(
            results=tuple(map(Result.of, found)),
            stop=self.queue.stop_reason,
            poisoned=tuple(poisoned[call.poisoned :]),
            nodes=tuple(self.queue.live_nodes(now_ms, 2 * self._rules.lease_ms)),
            to_come=None if exploration is None else exploration.open,
            exploring_seconds=self.exploration.exploring_seconds,
        )
        names = [result.trajectory for result in found if result.trajectory is not None]
        return answer, {name: self.journal.blob(name) for name in names}

    # --- journal ----------------------------------------------------------------------------------------

    def _record(self, record: Record, blobs: Blobs | None = None) -> None:
        self.journal.append(encode_record(record), blobs)

    def _record_and_apply(self, record: Record, now_ms: int) -> None:
        self._record(record)
        for weights in self.state.apply(record, now_ms):
            self._book.drop(weights)

    def _record_lease(self, number: int) -> None:
        """Record the lease without waiting for the disk.

        After a crash, a forgotten lease is revoked: its steps are repeated, and no result is lost.
        """
        with contextlib.suppress(OSError):  # the disk is full: the next call with a durable record raises
            self.journal.append(encode_record(self.queue.lease_record(number)), durable=False)

    def _record_poison(self, now_ms: int) -> None:
        for record in self.state.new_poison():
            self._record_and_apply(record, now_ms)

    def _compact(self) -> None:
        """Rewrite the journal with the current state. Blobs of trained batches are dropped."""
        records = [
            (encode_record(record), {name: self.journal.blob(name) for name in names})
            for record, names in self.state.records()
        ]
        # On a full disk, the obsolete records stay in the journal until the next compaction.
        with contextlib.suppress(OSError):
            self.journal.rewrite(records)
