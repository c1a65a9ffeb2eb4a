"""Backlog of the pull queue: the requests that wait for a worker, by kind and slot.

    kind -> slots, the next first -> requests of the slot, the next first

    A slot holds the requests of one task at one committed step: the requests that a lease may take together (task.py).

The promises: a request waits at most once, requests of one lease come from one slot and so resume at one step, and no
slot is empty.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator

from engine.parallel.forecast import Requests
from engine.protocol.request import Kind, RequestId, WeightsKey
from engine.queue.suspects import must_run_alone
from engine.queue.task import QueuedRequest, Slot


class Backlog:
    """The waiting requests. The module docstring lists the promises."""

    def __init__(self) -> None:
        self._slots: dict[Kind, OrderedDict[Slot, OrderedDict[RequestId, QueuedRequest]]] = {
            kind: OrderedDict() for kind in Kind
        }

    def add(self, entry: QueuedRequest, *, first: bool = False) -> None:
        """Let a request wait. `first`: in front of all requests of its kind."""
        request = entry.attempt.request
        slots = self._slots[request.kind]
        entry.slot = self.slot_of(entry)
        bucket = slots.get(entry.slot)
        if bucket is None:
            bucket = slots[entry.slot] = OrderedDict()
        bucket[request] = entry
        if first:
            bucket.move_to_end(request, last=False)
            slots.move_to_end(entry.slot, last=False)

    def remove(self, entry: QueuedRequest) -> None:
        """Remove a waiting request."""
        request = entry.attempt.request
        assert entry.slot is not None
        bucket = self._slots[request.kind][entry.slot]
        del bucket[request]
        if not bucket:
            del self._slots[request.kind][entry.slot]
        entry.slot = None

    def slot_of(self, entry: QueuedRequest) -> Slot:
        """Return the slot where a request has to wait. A suspect that must run alone gets its own slot."""
        return (entry.of.number, entry.attempt.step, entry.attempt.request if must_run_alone(entry) else None)

    def __len__(self) -> int:
        return sum(len(bucket) for slots in self._slots.values() for bucket in slots.values())

    def has(self, entry: QueuedRequest) -> bool:
        """Return True if this very request waits in its slot."""
        request, slot = entry.attempt.request, entry.slot
        bucket = None if slot is None else self._slots[request.kind].get(slot)
        return bucket is not None and bucket.get(request) is entry

    def holds(self, kind: Kind) -> bool:
        """Return True if a request of this kind waits."""
        return bool(self._slots[kind])

    def items(self, kind: Kind) -> Iterator[tuple[RequestId, QueuedRequest]]:
        """Yield the waiting requests of a kind, in the order of leases."""
        for bucket in self._slots[kind].values():
            yield from bucket.items()

    def next_batch(
        self, kind: Kind, most_images: int | None, published: Collection[WeightsKey]
    ) -> list[QueuedRequest] | None:
        """Return the requests of the next lease: up to `shape` requests of the first slot that fits the worker.

        `most_images`: the most images of a forward pass that fit into the worker's memory; None: no limit is known.
        Requests whose weights are not published are left out.
        """
        for bucket in self._slots[kind].values():
            first = next(iter(bucket.values()))
            task = first.of.task
            if first.attempt.weights in published and (most_images is None or task.shape <= most_images):
                if len(bucket) <= task.shape:
                    return list(bucket.values())
                entries = iter(bucket.values())
                return [next(entries) for _ in range(task.shape)]
        return None

    def too_large(self, kind: Kind, most_images: int | None) -> int:
        """Return the batch shape of waiting work too large for this worker, or 0 if there is no such work."""
        if most_images is None:
            return 0
        firsts = (next(iter(bucket.values())) for bucket in self._slots[kind].values())
        return next((first.of.task.shape for first in firsts if first.of.task.shape > most_images), 0)

    def demand(self) -> Iterator[tuple[Requests, int]]:
        """Yield the waiting leases of each slot, with the batch shape of the slot's task."""
        for slots in self._slots.values():
            for (_, step, _), bucket in slots.items():
                task = next(iter(bucket.values())).of.task
                leases = math.ceil(len(bucket) / task.shape)
                yield Requests(request_class=task.request_class, steps=task.steps - step, count=leases), task.shape

    def check(self) -> None:
        """Raise AssertionError if the backlog contradicts itself."""
        for kind, slots in self._slots.items():
            for slot, bucket in slots.items():
                assert bucket, "an empty slot"
                for request, entry in bucket.items():
                    assert request.kind is kind, f"{request} waits among requests of another kind"
                    assert entry.slot == slot, f"{request} waits twice"
                    assert slot == self.slot_of(entry), f"{request} waits in the wrong slot"
