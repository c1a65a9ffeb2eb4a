"""Suspects: requests that may crash every worker.

    unsuspected -> suspect (crash) -> runs alone (`CRASHES_TO_POISON - 1` crashes) -> poisoned (crash while alone)

The promise: only a request whose last crash happened alone in a lease is reported as poisoned. Crashes are detected
late, so an innocent request's third crash may belong to a lease granted before the first crash was known.
"""

from engine.queue.task import QueuedRequest

CRASHES_TO_POISON = 3
"""After crashes of this many workers at the same step, a request is reported as poisoned and not retried."""


def must_run_alone(entry: QueuedRequest) -> bool:
    """Return True if a further crash would poison the request, or if a scorer did not return for its lease.

    A further fault then identifies the request, and clears the requests that were leased together with it before.
    """
    return entry.hung or entry.crashes >= CRASHES_TO_POISON - 1


def count_crash(entry: QueuedRequest, *, alone: bool) -> bool:
    """Count a worker's crash on this request. Return True if the request is poisoned.

    A crash at a later step than the last crash resets the count to 1. `alone`: the request was alone in its lease.
    """
    entry.crashes = 1 if entry.attempt.step > entry.crashed_at else entry.crashes + 1
    entry.crashed_at = entry.attempt.step
    return entry.crashes >= CRASHES_TO_POISON and alone and not entry.leases
