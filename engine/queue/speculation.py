"""Speculative copies: a second execution of a slow request by an idle worker.

The promise: no suspect is copied, because a copy could crash two workers at a time, and a request has two executions
at most. The first result to arrive counts (engine/queue/leases.py).
"""

from collections.abc import Iterable

from engine.protocol.request import Kind
from engine.queue.leases import Lease
from engine.queue.pace import Rules
from engine.queue.task import QueuedRequest


def slowest_requests(
    leases: Iterable[Lease], rules: Rules, kind: Kind, worker: str, now_ms: int, most_images: int | None
) -> list[QueuedRequest] | None:
    """Return the leased requests with the latest predicted end, for a speculative copy by `worker`.

    Return None if a copy from the committed step would not end sooner.
    """
    slowest: list[QueuedRequest] | None = None
    latest = 0.0
    for lease in leases:
        task, pace = lease.of.task, lease.of.pace.step_ms
        if lease.worker == worker or not pace or task.requests[0].kind is not kind:
            continue
        entries = list(lease.requests.values())
        if any(len(entry.leases) > 1 or entry.crashes or entry.hung for entry in entries) or (
            most_images is not None and task.shape > most_images
        ):
            continue
        step = min(entry.attempt.step for entry in entries)
        end_ms = lease.end_ms(now_ms, rules.lease_of(lease.of.pace) // 2)
        if end_ms > latest and now_ms + pace * (task.steps - step + 1) < end_ms:
            slowest, latest = [entry for entry in entries if entry.attempt.step == step], end_ms
    return slowest
