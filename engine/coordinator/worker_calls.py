"""Answers to the calls of workers: pull, heartbeat, finish, commit, give back and fault; and reports of deaths."""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from engine.coordinator.exploration_desk import ExplorationDesk
from engine.coordinator.membership import alone
from engine.coordinator.pulls import Pulls
from engine.coordinator.regrouping import Regrouping
from engine.coordinator.run_log import RunLog
from engine.protocol.codec import Blobs
from engine.protocol.messages import (
    Commit,
    Fault,
    Finish,
    GiveBack,
    Heartbeat,
    LeaseCall,
    NodeLost,
    Notice,
    Pull,
    Submit,
    WorkerDied,
)
from engine.protocol.records import ResultsAccepted, StatesCommitted
from engine.protocol.request import ALONE, Kind, Reply, Wait, Work
from engine.queue.priority import PRIORITY
from engine.queue.queue import Queue


class WorkerCalls:
    """Handler of workers' calls, over the run's log, the groups and the exploration."""

    def __init__(self, log: RunLog, groups: Regrouping, exploration: ExplorationDesk) -> None:
        self._log, self._groups, self._exploration = log, groups, exploration
        self._pulls = Pulls()

    @property
    def _queue(self) -> Queue:
        return self._log.state.queue

    def answer(self, call: LeaseCall, blobs: Blobs, now_ms: int) -> Reply:
        """Answer one call. Raises OSError if the disk is full, KeyError if a blob is missing."""
        match call:
            case Pull():
                return self._pull(call, now_ms)
            case Heartbeat():
                reply = self._queue.heartbeat(call.worker, call.node, call.leases, now_ms=now_ms)
                if isinstance(reply, Wait) and self._groups.members.must_come(call.worker):
                    return alone(call.worker)
                return reply
            case Finish():
                return self._finish(call, blobs, now_ms)
            case Commit():
                return self._commit(call, blobs, now_ms)
            case GiveBack():
                self._log.state.changes += 1
                return self._queue.give_back(call.worker, call.lease, now_ms=now_ms)
            case Fault():
                self._log.state.changes += 1
                reply = self._queue.fault(
                    call.worker, call.node, call.lease, call.text, now_ms=now_ms, hangs=call.hangs
                )
                self._log.record_poison(now_ms)
                return reply
            case _:
                assert_never(call)

    def observe(self, call: WorkerDied | NodeLost | Notice, now_ms: int) -> None:
        """Record a worker's death, a node's loss or a preemption notice, as reported by another process."""
        self._log.state.changes += 1
        match call:
            case WorkerDied():
                self._queue.died(call.worker, call.boot, call.reason, now_ms=now_ms)
                if self._pulls.died(call.worker, call.boot):
                    self._groups.gone([call.worker], f"{call.worker} died", now_ms=now_ms)
            case NodeLost():
                self._queue.unreachable(call.node, call.reason, now_ms=now_ms)
                workers = self._groups.members.table.workers_of(call.node)
                self._groups.gone(workers, f"{call.node} is lost", now_ms=now_ms)
            case Notice():
                self._queue.notice(call.node, call.deadline_ms, now_ms=now_ms)
            case _:
                assert_never(call)

    def deal(self, now_ms: int) -> None:
        """Submit the next candidates of the open exploration, if workers would be idle."""
        exploration = self._log.state.exploration
        task = self._exploration.next_task(exploration, self._queue, now_ms)
        if exploration is None or task is None:
            return
        try:
            self._log.record_and_apply(Submit(task=task), now_ms)
        except OSError:  # the disk is full: the next pull submits the same candidates
            exploration.take_back(task.requests)
            raise

    def _pull(self, call: Pull, now_ms: int) -> Reply:
        kinds: Sequence[Kind] = call.kinds or PRIORITY
        if Kind.EXPLORE in kinds:
            self._exploration.add_explorer(call.worker, call.node)
            self.deal(now_ms)
        if not self._may_work(call, now_ms):
            kinds = []
        missed = len(self._queue.events)
        reply = self._queue.pull(
            call.worker,
            call.node,
            boot=call.boot,
            seq=call.seq,
            now_ms=now_ms,
            holds=(call.holds.weights, call.holds.digest) if call.holds else None,
            kinds=kinds,
            most_images=call.most_images,
        )
        if len(self._queue.events) != missed:
            self._log.record_poison(now_ms)
            self._log.state.changes += 1
        if isinstance(reply, Work):
            self._groups.members.busy(call.worker)
            self._log.record_lease(reply.lease)
        elif isinstance(reply, Wait) and (order := self._groups.members.order(call.worker)):
            if order.epoch != ALONE:
                self._log.state.changes += 1  # the other members wait for the same regroup
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
        if not self._queue.takes_part(call.node):
            return True  # the pull's answer will be drain or exit
        if self._groups.pulled(call.worker, call.boot, call.group, now_ms=now_ms):
            self._log.state.changes += 1
        return self._groups.members.leads(call.worker)

    def _finish(self, call: Finish, blobs: Blobs, now_ms: int) -> Reply:
        self._renew(call, now_ms)
        # Record only results with a valid lease. Otherwise a restart would accept results of revoked leases.
        held = set(self._queue.held(call.worker, call.lease))
        results = [msgspec.structs.replace(r, node=call.node) for r in call.results if r.request in held]
        accepted = ResultsAccepted(results=tuple(results))
        if results:
            self._log.record(accepted, {r.trajectory: blobs[r.trajectory] for r in results if r.trajectory is not None})
        finished = [result.finished() for result in results]
        reply = self._queue.finish(call.worker, call.node, call.lease, finished, now_ms=now_ms, hangs=call.hangs)
        if isinstance(reply, Wait):
            if call.pace is not None:
                self._groups.measured(call.pace.request_class, call.pace.degree, call.pace.seconds)
            self._log.state.apply(accepted, now_ms)
            self._exploration.add_candidates(sum(result.request.kind is Kind.EXPLORE for result in results))
            if not self._queue.wanted(Kind.TRAIN):
                self._exploration.begin_training_phase(now_ms)
            self._log.state.changes += 1
        return reply

    def _commit(self, call: Commit, blobs: Blobs, now_ms: int) -> Reply:
        self._renew(call, now_ms)
        held = set(self._queue.held(call.worker, call.lease))
        states = [state for state in call.states if state.request in held]
        if states:
            committed = StatesCommitted(states=tuple(states))
            self._log.record(committed, {state.blob: blobs[state.blob] for state in states})
            self._log.state.apply(committed, now_ms)
        steps = {state.request: (state.step, state.blob) for state in states}
        return self._queue.commit(call.worker, call.node, call.lease, steps, now_ms=now_ms, cost_ms=call.commit_ms)

    def _renew(self, call: Finish | Commit, now_ms: int) -> None:
        """Renew the worker's lease, even if the disk has no room for the results in the message."""
        self._queue.heartbeat(call.worker, call.node, {call.lease: 0}, now_ms=now_ms)
