"""Serve the queue's state machine, with a journal on disk, a weight book and a clock.

    call -> handle: decide -> journal.append(record) -> state.apply(record) -> answer

Each call gets one answer, over any transport (in-process, HTTP, Ray). A call with an effect is written to the journal
first and applied second, both before the next call is handled. The call is *acknowledged* only after `sync`. Memory and
journal therefore never disagree, and a worker's acknowledged results are never lost.

The coordinator runs on the on-demand node, beside the trainer. Killed at any moment, the coordinator restarts from its
journal (engine/coordinator/recovery.py), leases included: a worker in the middle of an image notices nothing.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, assert_never

from engine.clock import Clock, run_ms
from engine.coordinator import node_usage
from engine.coordinator.exploration_desk import ExplorationDesk
from engine.coordinator.journal import Journal
from engine.coordinator.judge_desk import JudgeDesk
from engine.coordinator.judge_turns import JudgeTurns
from engine.coordinator.node_usage import RunTimes, UsageBook
from engine.coordinator.recovery import recover
from engine.coordinator.regrouping import Regrouping
from engine.coordinator.run_log import RunLog
from engine.coordinator.run_state import RunState
from engine.coordinator.weight_book import WeightBook, digest_of
from engine.coordinator.worker_calls import WorkerCalls
from engine.events import Capacity, NodeSeen, NodeState, ProgressEvent
from engine.protocol.codec import Blobs
from engine.protocol.messages import (
    Answer,
    BeginLineage,
    BillJudge,
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
    HoldMoney,
    Known,
    Late,
    LeaseCall,
    LookAhead,
    NodeLost,
    Notice,
    Order,
    Peek,
    Publish,
    Published,
    Pull,
    Result,
    Results,
    Span,
    States,
    Stop,
    Submit,
    TakeTurn,
    Turn,
    WeightsBytes,
    Withdraw,
    WorkerDied,
)
from engine.protocol.records import WeightsPublished, stored
from engine.protocol.request import Kind, WeightsKey
from engine.queue.pace import Rules
from engine.queue.queue import Queue
from engine.storage.judge_fund import JudgeFund
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
        run_clock: Clock | None = None,
        rules: Rules,
        progress: ProgressLog | None = None,
        sp_degree: int | Literal["auto"] = 1,
        fund: JudgeFund | None = None,
    ) -> None:
        """Restore the state from the journal.

        `clock`: of leases and of workers' spans. `run_clock`: of the run, for reported usage; None: the same clock.
        `sp_degree`: number of workers of a node that share an image's sequence. `fund`: the budget of paid judges.
        """
        self._clock = clock
        self._rules = rules
        self._progress = progress
        self._book = book
        self._run_times = RunTimes(clock, run_clock or clock)
        self.usage = UsageBook(clock.now_ms())
        self.exploration = ExplorationDesk(clock, rules.lease_ms)
        self.log = RunLog(journal, book, recover(journal, book, rules, clock.now_ms()))
        self.groups = Regrouping(
            lambda: self.queue.demand(clock.now_ms()),
            sp_degree=sp_degree,
            run_ms=partial(run_ms, clock),
            first=self.state.first_lease,
        )
        self._judges = JudgeDesk(self.log, fund, self._report)
        self._turns = JudgeTurns()
        self._workers = WorkerCalls(self.log, self.groups, self.exploration)

    @property
    def journal(self) -> Journal:
        return self.log.journal

    @property
    def state(self) -> RunState:
        return self.log.state

    @property
    def changes(self) -> int:
        """Return the change counter. It grows whenever a repeated call might get a new answer instead of `Wait`."""
        return self.state.changes

    @property
    def queue(self) -> Queue:
        return self.state.queue

    @property
    def lineage(self) -> int:
        return self.state.lineage

    def handle(self, call: Call, blobs: Blobs) -> Answered:
        """Answer one call. Raises OSError if the disk is full, KeyError if a blob is missing."""
        now_ms = self._clock.now_ms()
        self._run_times.note()
        self._note_usage(call)
        match call:
            case Pull() | Heartbeat() | Finish() | Commit() | GiveBack() | Fault():
                return self._workers.answer(call, blobs, now_ms), {}
            case HoldMoney():
                return self._judges.hold(call, now_ms), {}
            case BillJudge():
                return self._judges.bill(call, now_ms), {}
            case TakeTurn():
                return Turn(seconds=self._turns.take(call.judge, call.gap_seconds)), {}
            case FetchStates():
                return States(), {name: self.journal.blob(name) for name in call.names}
            case FetchWeights():
                return WeightsBytes(), {"weights": self._book.read(call.weights)}
            case Peek():
                live = self.queue.live
                return Known(lineage=self.lineage, version=live.version if live else None), {}
            case Collect():
                return self._collect(call, now_ms)
            case LookAhead():
                return self.queue.outlook(call.batch, now_ms=now_ms), {}
            case WorkerDied() | NodeLost() | Notice():
                self._workers.observe(call, now_ms)
                if isinstance(call, WorkerDied):
                    self._judges.died(call.worker, call.boot, now_ms)
                if isinstance(call, NodeLost):
                    self._judges.lost(call.node, now_ms)
                return Done(), {}
            case BeginLineage() | Submit() | Explore() | Publish() | Withdraw() | Stop():
                return self._obey(call, blobs, now_ms), {}
            case _:
                assert_never(call)

    def weights_file(self, weights: WeightsKey, digest: str) -> Path:
        """Return the file of published weights. Raises KeyError if other or no weights have this key now."""
        if self.queue.weights.digests.get(weights) != digest:
            raise KeyError(f"weights {weights} with digest {digest} are not published")
        return self._book.path(weights)

    def set_capacity(self, snapshot: Capacity) -> None:
        """Apply the launcher's snapshot of the nodes. Raises OSError if the disk is full; the launcher sends the next
        snapshot within seconds."""
        now_ms = self._clock.now_ms()
        self.queue.capacity(snapshot, now_ms=now_ms)
        for node in snapshot.nodes:
            if node.state is NodeState.LOST:
                self._judges.lost(node.node, now_ms)
        self.state.changes += 1

    def stop(self, reason: str) -> None:
        """Order every process to exit.

        The trainer learns of the stop first, from its next `collect`; the workers follow.
        """
        self.queue.stop(reason)
        self.state.changes += 1

    def tick(self) -> None:
        """Expire leases, regroup workers and write events to the progress log. Call often."""
        now_ms = self._clock.now_ms()
        self._run_times.note()
        before = len(self.queue.events)
        self.queue.tick(now_ms)
        ends = self.queue.stop_reason is not None  # no regroup while workers exit
        regrouped = not ends and self.groups.tick(self.queue.takes_part, now_ms=now_ms)
        if regrouped or len(self.queue.events) != before:
            self.state.changes += 1
        if self._progress is None:
            return
        self._progress.flush()
        for events in (self.queue.events, self.groups.events):
            while events:
                self._progress.write(self.lineage, events[0])
                events.pop(0)
        if self._clock.wall_seconds(now_ms - self.usage.reported_ms) >= node_usage.EVERY_WALL_SECONDS:
            self.usage.reported_ms = now_ms
            for event in self.usage.events(self._run_times.note()):
                self._progress.write(self.lineage, event)

    def add_usage(self, node: str, worker: str, spans: Sequence[Span], of: int) -> None:
        """Add the times of a rank on a further node of the trainer, with `of` ranks. The first call shows the node."""
        if node not in self.usage.nodes:
            self._report(NodeSeen(node=node, worker=worker))
        self.usage.add(node, worker, self._run_times.spans(spans), of)

    def _report(self, event: ProgressEvent) -> None:
        if self._progress is not None:
            self._progress.write(self.lineage, event)

    def _note_usage(self, call: Call) -> None:
        """Add the usage since the caller's last call. The trainer's calls name no worker."""
        if isinstance(call, WorkerDied | NodeLost | Notice) or not call.usage:
            return
        worker = call.worker if isinstance(call, LeaseCall) else f"{call.node}/trainer"
        self.usage.add(call.node, worker, self._run_times.spans(call.usage), call.of)
        self.exploration.add_usage(call.usage)

    def _obey(self, order: Order, blobs: Blobs, now_ms: int) -> Answer:
        """Obey an order of the trainer. Refuse an order that arrives after a newer order."""
        if (order.boot, order.seq) < self.state.newest_order:
            return Late()
        if order.boot > self.state.newest_order[0]:  # the first order of this process: an earlier one may hold money
            self._judges.died(f"{order.node}/trainer", order.boot, now_ms)
        self.state.newest_order = (order.boot, order.seq)
        answer: Answer = Done()
        match order:
            case Publish():
                answer = self._publish(order, blobs, now_ms)
            case Stop():
                self.queue.stop(order.reason)
            case Submit():
                self.log.record_and_apply(stored(order), now_ms)
            case Explore():
                self.log.record_and_apply(stored(order), now_ms)
                if order.order.latents and not self.queue.wanted(Kind.TRAIN):
                    self.exploration.begin_training_phase(now_ms)  # the batch was explored: no rollout of it is missing
                self._workers.deal(now_ms)
            case BeginLineage() | Withdraw():
                self.log.record_and_apply(stored(order), now_ms)
                self.log.compact()
            case _:
                assert_never(order)
        self.state.changes += 1
        return answer

    def _publish(self, order: Publish, blobs: Blobs, now_ms: int) -> Published:
        if order.file is not None:
            digest = order.file.digest
            self._book.adopt(order.weights, order.file)
        else:
            digest = digest_of(blobs["weights"])
            self._book.write(order.weights, blobs["weights"])
        record = WeightsPublished(weights=order.weights, digest=digest, boot=order.boot, seq=order.seq)
        self.log.record_and_apply(record, now_ms)
        if not order.weights.average:
            self.exploration.end_training_phase(self._clock.now_ms())
        return Published(digest=digest)

    def _collect(self, call: Collect, now_ms: int) -> Answered:
        """Return the results of a batch from index `have` on, in order of arrival, with their trajectories."""
        results = self.state.results(call.kind, call.batch, call.have)
        self.log.record_poison(now_ms)
        poisoned = self.state.poisoned(call.kind, call.batch)
        new_poisoned = list(poisoned)[call.poisoned :]
        exploration = self.state.exploration
        answer = Results(
            results=tuple(map(Result.of, results)),
            stop=self.queue.stop_reason,
            poisoned=tuple(poisoned[request] for request in new_poisoned),
            poisoned_requests=tuple(new_poisoned),
            nodes=tuple(self.queue.rollout_nodes(now_ms, 2 * self._rules.lease_ms)),
            to_come=None if exploration is None else exploration.open,
            exploring_seconds=self.exploration.exploring_seconds,
        )
        names = [result.trajectory for result in results if result.trajectory is not None]
        return answer, {name: self.journal.blob(name) for name in names}
