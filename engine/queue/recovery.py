"""Recovery of the pull queue: restore the facts of the journal after a coordinator restart.

The promise: a worker that kept sampling while the coordinator was down still holds its lease, unless a newer process of
the worker has called in or the weights of the requests have changed.
"""

from collections.abc import Iterable

from engine.protocol.records import LeaseRecord
from engine.protocol.request import RequestId
from engine.queue.members import WorkerRecord
from engine.queue.state import QueueState


def restore_state(state: QueueState, request: RequestId, step: int, blob: str) -> None:
    """Restore a durable in-flight state."""
    item = state.requests.get(request)
    if item is not None:
        state.commit(item, step, blob)


def restore_poisoned(state: QueueState, request: RequestId, text: str) -> None:
    """Restore a poisoned request and its error text."""
    item = state.requests.get(request)
    if item is not None:
        state.leave(item)
        state.poisoned[request] = text


def restore_lease(state: QueueState, record: LeaseRecord, now_ms: int) -> None:
    """Restore a lease. A request leased again by a later record leaves the earlier lease."""
    worker = state.members.workers.get(record.worker)
    if worker is None:
        worker = WorkerRecord(name=record.worker, node=record.node, boot=record.boot)
        state.members.workers[record.worker] = worker
        state.members.node(record.node, now_ms)
    if record.boot < worker.boot:
        return
    if record.boot > worker.boot:
        for number in sorted(worker.leases, reverse=True):
            state.requeue(number, now_ms)
        worker.restart(record.boot)
    worker.seq = max(worker.seq, record.seq)
    wanted = (state.requests[request] for request in record.requests if request in state.requests)
    items = [i for i in wanted if i.attempt.weights == record.weights and i.attempt.request not in state.poisoned]
    if not record.copy:
        for item in items:
            state.leave(item)
    items = [item for item in items if len(item.leases) < 2]
    if items:
        step = min(item.attempt.step for item in items)
        lease = state.grant(record.number, worker, items, step, now_ms, copy=record.copy)
        lease.images = len(record.requests)
        lease.seq, lease.expires_ms = record.seq, now_ms + record.lease_ms


def committed_states(state: QueueState, requests: Iterable[RequestId]) -> list[tuple[RequestId, int, str]]:
    """Return the durable in-flight states of these requests: (request, step, blob)."""
    items = [state.requests[request] for request in requests if request in state.requests]
    return [(i.attempt.request, i.attempt.step, i.attempt.state) for i in items if i.attempt.state is not None]
