"""Order of the kinds of requests: what a worker samples first, and what gives way.

    open batch: rollouts, and early groups left over -> early rollouts of the next batch -> evaluation -> idle kinds

Candidates and control rollouts use GPUs that would be idle. A worker that samples them gives its lease back between two
steps once a rollout waits that the worker may sample. Pure.
"""

from collections.abc import Sequence

from engine.protocol.request import TRAINED, Kind, WeightsKey
from engine.queue.backlog import Backlog
from engine.queue.leases import Lease
from engine.queue.weights import PublishedWeights

PRIORITY = (Kind.TRAIN, Kind.EARLY, Kind.EVALUATE, Kind.CONTROL, Kind.EXPLORE)

_EARLY_FIRST = (Kind.EARLY, Kind.TRAIN, Kind.EVALUATE, Kind.CONTROL, Kind.EXPLORE)

_IDLE = (Kind.CONTROL, Kind.EXPLORE)
"""Kinds for GPUs that would be idle."""


def in_order(
    backlog: Backlog, weights: PublishedWeights, holds: tuple[WeightsKey, str] | None, most_images: int | None
) -> Sequence[Kind]:
    """Return the kinds in the order in which a worker takes them.

    Early groups that the last batch left over belong to the open batch, train first, and need the weights before the
    live weights. So a worker that still holds those weights samples them first, and loads weights once.
    """
    early = backlog.next_batch(Kind.EARLY, most_images, weights.digests)
    if early is None or early[0].attempt.weights == weights.live:
        return PRIORITY
    return PRIORITY if weights.order(early[0].attempt.weights, holds) else _EARLY_FIRST


def gives_way(lease: Lease, backlog: Backlog, weights: PublishedWeights, most_images: int | None) -> bool:
    """Return True if the lease uses a GPU that is not idle: a rollout waits that its worker may sample.

    A lease that is being scored does not give way: its images are made.
    """
    if lease.of.task.requests[0].kind not in _IDLE or lease.step >= lease.of.task.steps:
        return False
    return any(backlog.next_batch(kind, most_images, weights.digests) for kind in TRAINED)
