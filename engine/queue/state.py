"""State of the pull queue, and the transitions that touch several of its parts.

    submit -> waiting -> leased -> finished
                 ^          |
                 +-- requeue: expired, revoked, given back, failed
                            +-> poisoned (engine/queue/suspects.py)

The promise: an unfinished request is in exactly one of three states: leased, waiting or poisoned. A finished request is
in none of the three.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from engine.events import NodeMissed, ProgressEvent, Warned
from engine.parallel.forecast import Demand, Requests
from engine.protocol.request import Finished, Kind, RequestId
from engine.queue.backlog import Backlog
from engine.queue.leases import Lease, LeaseTable
from engine.queue.members import Members, WorkerRecord
from engine.queue.pace import Rules
from engine.queue.suspects import count_crash
from engine.queue.task import QueuedRequest

REPORTED_LOST = "reported by the launcher"


class QueueState:
    """The queue's state: requests, backlog, leases, and members (nodes and workers).

    The module docstring states what always holds for a request.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.requests: dict[RequestId, QueuedRequest] = {}
        """The unfinished requests."""
        self.finished: dict[RequestId, Finished] = {}
        self.poisoned: dict[RequestId, str] = {}
        """The error text of each poisoned request."""
        self.backlog = Backlog()
        self.leases = LeaseTable(rules)
        self.members = Members()
        self.events: list[ProgressEvent] = []

    def grant(
        self, number: int, worker: WorkerRecord, entries: list[QueuedRequest], step: int, now_ms: int, *, copy: bool
    ) -> Lease:
        """Open a lease on these requests. `copy`: another worker holds a lease on the same requests."""
        of = entries[0].of
        for entry in entries:
            if entry.slot is not None:
                self.backlog.remove(entry)
            entry.leases.append(number)
        lease = self.leases.open[number] = Lease(
            worker=worker.name,
            node=worker.node,
            boot=worker.boot,
            seq=worker.seq,
            of=of,
            requests={entry.attempt.request: entry for entry in entries},
            first_step=step,
            granted_ms=now_ms,
            last_step_ms=now_ms,
            expires_ms=now_ms + self.rules.lease_of(of.pace),
            step=step,
            copy=copy,
            images=len(entries),
        )
        worker.leases.add(number)
        return lease

    def end_lease(self, number: int) -> Lease:
        """Remove a lease from the table and from its worker."""
        lease = self.leases.open.pop(number)
        self.members.workers[lease.worker].leases.discard(number)
        return lease

    def leave(self, entry: QueuedRequest) -> None:
        """Remove the request from the queue and revoke its leases. Results for revoked leases are rejected."""
        if entry.slot is not None:
            self.backlog.remove(entry)
        for number in entry.leases:
            lease = self.leases.open[number]
            del lease.requests[entry.attempt.request]
            if not lease.requests:
                self.end_lease(number)
        entry.leases = []

    def is_made_anew(self, request: RequestId) -> bool:
        """Return True for an early request whose image is wanted, or was made, as a training rollout."""
        fresh = replace(request, kind=Kind.TRAIN)
        return request.kind is Kind.EARLY and (fresh in self.requests or fresh in self.finished)

    def drop_early(self, request: RequestId) -> None:
        """Drop the unfinished early request for the image of a training request: its group is made anew.

        Otherwise a worker could still load old weights and sample an image that nobody trains.
        """
        early = replace(request, kind=Kind.EARLY)
        entry = self.requests.pop(early, None) if request.kind is Kind.TRAIN else None
        if entry is not None:
            self.leave(entry)
            self.poisoned.pop(early, None)

    def finish(self, result: Finished) -> None:
        """Record the result of a request. Ignore a request that the queue does not hold."""
        entry = self.requests.pop(result.request, None)
        if entry is not None:
            self.leave(entry)
            self.poisoned.pop(result.request, None)
            self.finished[result.request] = result

    def commit(self, entry: QueuedRequest, step: int, blob: str) -> None:
        """Record a durable in-flight state. Ignore a step that is not newer than the last committed step."""
        if step <= entry.attempt.step:
            return
        waits = entry.slot is not None
        if waits:
            self.backlog.remove(entry)
        entry.commit(step, blob)
        if waits:
            self.backlog.add(entry, first=True)

    def requeue(self, number: int, now_ms: int) -> int:
        """Return a lease's requests to the front of the queue.

        Return the number of denoising steps to repeat: the steps since the last commit. The number is an estimate from
        the last reported step and the time since the grant, because a dead worker reports nothing.
        """
        lease = self.end_lease(number)
        steps_made, lost = lease.made_by(now_ms), 0
        for entry in reversed(lease.requests.values()):
            entry.leases.remove(number)
            if entry.leases:
                continue  # another worker holds a lease on the same request
            lost += max(0, steps_made - entry.attempt.step)
            self.backlog.add(entry, first=True)
        return lost

    def revoke(self, numbers: Iterable[int], node: str, reason: str, now_ms: int) -> None:
        """Revoke leases of a node and requeue their requests. The requests become suspects of their workers."""
        ordered = sorted(numbers)
        leases = [self.leases.open[number] for number in ordered]
        held = [(lease.worker, list(lease.requests), lease.images == 1) for lease in leases]
        lost = sum(self.requeue(number, now_ms) for number in reversed(ordered))
        for worker, requests, alone in held:
            self.members.workers[worker].suspects += [(request, alone) for request in requests]
        if ordered or reason == REPORTED_LOST:
            fenced = sum(len(requests) for _, requests, _ in held)
            self.events.append(NodeMissed(node=node, reason=reason, lost_steps=lost, fenced_requests=fenced))

    def record_crash(self, request: RequestId, text: str, *, alone: bool) -> None:
        """Record a worker's crash on this request. `alone`: the request was alone in its lease."""
        entry = self.requests.get(request)
        if entry is None or request in self.poisoned:
            return
        waits = entry.slot is not None
        if waits:
            self.backlog.remove(entry)
        if count_crash(entry, alone=alone):
            self.poisoned[request] = text
            self.events.append(
                Warned(text=f"{request.prompt!r} brought down {entry.crashes} workers and waits: {text}")
            )
        elif waits:
            self.backlog.add(entry, first=True)

    def record_hang(self, request: RequestId) -> None:
        """Record that a scorer did not return for a lease with this request: from now on the request runs alone."""
        entry = self.requests.get(request)
        if entry is None or entry.hung:
            return
        waits = entry.slot is not None
        if waits:
            self.backlog.remove(entry)
        entry.hung = True
        if waits:
            self.backlog.add(entry, first=True)

    def demand(self, now_ms: int) -> Demand:
        """Return the waiting and in-flight work, as input for planning SP groups."""
        waiting: list[Requests] = []
        in_flight: dict[str, Requests] = {}
        images: dict[str, int] = {}
        for some, shape in self.backlog.demand():
            waiting.append(some)
            images[some.request_class] = shape
        for worker, requests, shape in self.leases.demand(now_ms):
            images[requests.request_class] = shape
            # A worker may hold two leases: the images of the first are scored while the second is sampled.
            if worker not in in_flight or in_flight[worker].steps < requests.steps:
                in_flight[worker] = requests
        return Demand(waiting=waiting, in_flight=in_flight, images=images)

    def check(self, number: int | None = None) -> None:
        """Raise AssertionError if the state contradicts itself.

        Check a single open lease, or everything if `number` is None.
        """
        table = self.leases.open
        chosen = table if number is None else {n: table[n] for n in (number,) if n in table}
        self.leases.check(chosen)
        for lease_number, lease in chosen.items():
            assert lease_number in self.members.workers[lease.worker].leases, (
                f"lease {lease_number} is unknown to its worker"
            )
            for request, entry in lease.requests.items():
                assert self.requests.get(request) is entry, (
                    f"lease {lease_number} holds an attempt at {request} that is over"
                )
        if number is not None:
            return
        assert all(lease_number < self.leases.next_number for lease_number in table), "a lease number of the future"
        self.members.check(table)
        self.backlog.check()
        waiting = 0
        for request, entry in self.requests.items():
            states = (bool(entry.leases), entry.slot is not None, request in self.poisoned)
            assert sum(states) == 1, f"{request}: leased, waiting, poisoned = {states}"
            assert len(entry.leases) <= 2, f"{request} is made by {len(entry.leases)} workers"
            assert request not in self.finished, f"{request} is finished and wanted"
            if entry.slot is not None:
                waiting += 1
                assert self.backlog.has(entry), f"{request} does not wait in its slot"
        assert waiting == len(self.backlog), "a removed request waits"
