"""State of a run that survives a restart of the coordinator.

    live call  -> decide -> journal.append(record) -> apply(record)
    restart    ->           journal.replay()       -> apply(record), for every record

Only `apply` changes the lineage, tasks, weights, exploration and the order in which results arrived. `apply` also
updates the queue. The promise: after a replay of the journal, the state gives the same answers as before the restart.
`apply` reads no clock and no disk; the caller passes the time in.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import assert_never

from msgspec.structs import replace

from engine.coordinator.judge_account import JudgeAccount
from engine.exploration.batch import BatchExploration
from engine.protocol.messages import BeginLineage, CommittedState, Explore, Result, Submit, Withdraw
from engine.protocol.records import (
    CoordinatorStarted,
    JudgeBilled,
    JudgesFunded,
    LeaseRecord,
    MoneyHeld,
    Record,
    RequestPoisoned,
    ResultsAccepted,
    StatesCommitted,
    WeightsPublished,
)
from engine.protocol.request import Finished, Kind, RequestId, WeightsKey
from engine.protocol.task import Task
from engine.queue.pace import Rules
from engine.queue.queue import Queue


class RunState:
    """Lineage, tasks, weights, results and exploration of the run. The module docstring lists the promises."""

    def __init__(self, rules: Rules) -> None:
        self.queue = Queue(rules)
        self.lineage = 0
        self.first_lease = 0
        """The first lease number of the newest coordinator."""
        self.highest_lease = 0
        """The highest lease number in the journal."""
        self.newest_order = (0, 0)
        """Boot and number of the trainer's newest order. A late order with a smaller number changes nothing."""
        self.judges = JudgeAccount()
        self.exploration: BatchExploration | None = None
        self._tasks: list[Task] = []
        self._digests: dict[WeightsKey, str] = {}
        self._arrivals: dict[tuple[Kind, int], dict[RequestId, None]] = defaultdict(dict)
        """The finished requests of each batch, in order of arrival."""
        self._recorded_poison: set[RequestId] = set()
        self.changes = 0
        """Change counter. Grows whenever a repeated call might get a new answer instead of `Wait`."""

    def apply(self, record: Record, now_ms: int) -> list[WeightsKey]:
        """Apply one record of the journal. Return the weights that no request needs any more."""
        dropped: list[WeightsKey] = []
        if isinstance(record, BeginLineage | Submit | Explore | Withdraw | WeightsPublished):
            self.newest_order = max(self.newest_order, (record.boot, record.seq))
        match record:
            case CoordinatorStarted():
                self.first_lease = record.first_lease
                self.highest_lease = max(self.highest_lease, record.first_lease)
            case BeginLineage():
                self._begin_lineage(record.lineage)
            case Submit():
                self._submit(record.task)
            case Explore():
                # A repeated order changes nothing, even if a restarted trainer expects other early groups.
                order = None if self.exploration is None else self.exploration.order
                if order is None or order != replace(record.order, pool=order.pool):
                    self.exploration = BatchExploration(record.order)
            case Withdraw():
                dropped = self._withdraw(record.batches)
            case WeightsPublished():
                self._digests[record.weights] = record.digest
                self.queue.publish(record.weights, record.digest)
            case ResultsAccepted():
                self._add_results([result.finished() for result in record.results])
            case StatesCommitted():
                for state in record.states:
                    self.queue.restore_state(state.request, state.step, state.blob)
            case LeaseRecord():
                self.highest_lease = max(self.highest_lease, record.number)
                self.queue.restore_lease(record, now_ms=now_ms)
            case RequestPoisoned():
                self._recorded_poison.add(record.request)
                self.queue.restore_poisoned(record.request, record.text)
                if self.exploration is not None:
                    self.exploration.settled(record.request, math.nan)
            case JudgesFunded() | MoneyHeld() | JudgeBilled():
                self.judges.apply(record)
            case _:
                assert_never(record)
        return dropped

    # --- reads ------------------------------------------------------------------------------------------

    def results(self, kind: Kind, batch: int, have: int) -> list[Finished]:
        """Return the results of a batch after the first `have`, in order of arrival."""
        return [self.queue.finished[request] for request in islice(self._arrivals[kind, batch], have, None)]

    def poisoned(self, kind: Kind, batch: int) -> dict[RequestId, str]:
        """Return the error texts of a batch's poisoned requests. Early requests of two batches may be open."""
        poisoned = self.queue.poisoned.items()
        return {request: text for request, text in poisoned if (request.kind, request.batch) == (kind, batch)}

    def new_poison(self) -> list[RequestPoisoned]:
        """Return the records of poisoned requests that the journal does not hold yet."""
        self._recorded_poison &= self.queue.poisoned.keys()
        poisoned = self.queue.poisoned.items()
        return [
            RequestPoisoned(request=request, text=text)
            for request, text in poisoned
            if request not in self._recorded_poison
        ]

    def records(self) -> Iterator[tuple[Record, list[str]]]:
        """Yield the records that restore this state, each with the names of its blobs.

        Records and blobs of withdrawn batches are left out.
        """
        boot, seq = self.newest_order
        yield CoordinatorStarted(first_lease=self.first_lease), []
        yield BeginLineage(lineage=self.lineage, boot=boot, seq=seq), []
        for fact in self.judges.records():
            yield fact, []
        for weights, digest in self._digests.items():
            yield WeightsPublished(weights=weights, digest=digest), []
        if self.exploration is not None:  # before the tasks: each task's requests count as issued candidates
            yield Explore(order=self.exploration.order), []
        early, on_time = ([task for task in self._tasks if _is_early(task) is is_early] for is_early in (True, False))
        for task in early:  # with their results, before the training requests that replace those without a result
            yield Submit(task=task), []
        yield from self._results(early=True)
        for task in on_time:
            yield Submit(task=task), []
        for task in self._tasks:  # after all tasks: a request restarted with new weights is in two tasks
            for request, step, name in self.queue.committed(task.requests):
                state = CommittedState(request=request, step=step, blob=name)
                yield StatesCommitted(states=(state,)), [name]
        for request, text in self.queue.poisoned.items():
            yield RequestPoisoned(request=request, text=text), []
        for lease in self.queue.lease_records():
            yield lease, []
        yield from self._results(early=False)

    def _results(self, *, early: bool) -> Iterator[tuple[Record, list[str]]]:
        """Yield the records of early results, or of all others, in order of arrival."""
        for (kind, _), arrived in self._arrivals.items():
            for request in arrived if (kind is Kind.EARLY) is early else ():
                result = self.queue.finished[request]
                kept = [] if result.trajectory is None else [result.trajectory]
                yield ResultsAccepted(results=(Result.of(result),)), kept

    # --- transitions --------------------------------------------------------------------------------------

    def _begin_lineage(self, lineage: int) -> None:
        """Begin a lineage with an empty queue. The same lineage again keeps the queue."""
        if lineage == self.lineage:
            return
        self.lineage = lineage
        for task in self._tasks:
            self.queue.withdraw(task.requests)
        self._tasks, self._digests, self.exploration = [], {}, None
        self._arrivals.clear()
        self.queue.forget_all_weights()

    def _submit(self, task: Task) -> None:
        self._tasks.append(task)
        self.queue.submit(task)
        if self.exploration is not None:
            self.exploration.took(task.requests)

    def _add_results(self, results: Sequence[Finished]) -> None:
        """Record results. In a live call, the queue has the results already, and only the order of arrival is new."""
        for result in results:
            request = result.request
            self.queue.restore_finished(result)
            if request in self.queue.finished:
                self._arrivals[request.kind, request.batch][request] = None
        if self.exploration is not None:
            # `BatchExploration` ignores candidates of other orders.
            self.exploration.add_results([result for result in results if result.request.kind is Kind.EXPLORE])

    def _withdraw(self, batches: Sequence[tuple[Kind, int]]) -> list[WeightsKey]:
        """Forget batches of requests, finished or not. Return the weights that no request needs any more.

        The next compaction removes the batches from the journal.
        """
        gone = [r for task in self._tasks for r in task.requests if (r.kind, r.batch) in batches]
        self.queue.withdraw(gone)
        for batch in batches:
            self._arrivals.pop(batch, None)
        if self.exploration is not None and (Kind.EXPLORE, self.exploration.order.batch) in batches:
            self.exploration = None
        withdrawn = set(gone)
        self._tasks = [task for task in self._tasks if not withdrawn.issuperset(task.requests)]
        live = self.queue.live
        keep = [] if live is None else [live, WeightsKey(version=live.version - 1)]
        dropped = self.queue.forget_weights(keep)
        for weights in dropped:
            self._digests.pop(weights, None)
        return dropped


def _is_early(task: Task) -> bool:
    """Return True for a task of early rollouts. A task has requests of one kind."""
    return bool(task.requests) and task.requests[0].kind is Kind.EARLY
