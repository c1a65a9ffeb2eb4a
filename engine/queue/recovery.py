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
    entry = state.requests.get(request)
    if entry is not None:
        state.commit(entry, step, blob)


def restore_poisoned(state: QueueState, request: RequestId, text: str) -> None:
    """Restore a poisoned request and its error text."""
    entry = state.requests.get(request)
    if entry is not None:
        state.leave(entry)
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
    listed_entries = (state.requests[request] for request in record.requests if request in state.requests)
    entries = [
        i for i in listed_entries if i.attempt.weights == record.weights and i.attempt.request not in state.poisoned
    ]
    if not record.copy:
        for entry in entries:
            state.leave(entry)
    entries = [entry for entry in entries if len(entry.leases) < 2]
    if entries:
        step = min(entry.attempt.step for entry in entries)
        lease = state.grant(record.number, worker, entries, step, now_ms, copy=record.copy)
        lease.images = len(record.requests)
        lease.seq, lease.expires_ms = record.seq, now_ms + record.lease_ms


def committed_states(state: QueueState, requests: Iterable[RequestId]) -> list[tuple[RequestId, int, str]]:
    """Return the durable in-flight states of these requests: (request, step, blob)."""
    entries = [state.requests[request] for request in requests if request in state.requests]
    return [(i.attempt.request, i.attempt.step, i.attempt.state) for i in entries if i.attempt.state is not None]
