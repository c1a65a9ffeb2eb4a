"""Lease table of the pull queue: which worker works on which requests, and until when.

    waiting -> leased -> finished
                 \\-> expired or revoked -> waiting

A lease number is issued once. Results that carry an expired or revoked number are rejected, so a request finishes
exactly once even if a frozen worker wakes up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.parallel.forecast import Requests
from engine.protocol.records import LeaseRecord
from engine.protocol.request import RequestId
from engine.queue.pace import Rules
from engine.queue.task import QueuedRequest, Submission


@dataclass(slots=True, eq=False)
class Lease:
    """A worker's time-limited right to work on requests."""

    worker: str
    node: str
    boot: int
    seq: int
    """Sequence number of the pull answered with this lease."""
    of: Submission
    requests: dict[RequestId, QueuedRequest]
    first_step: int
    granted_ms: int
    last_step_ms: int
    """The time of the last call that reported a new step."""
    expires_ms: int
    step: int
    """The last denoising step reported by the worker."""
    copy: bool = False
    images: int = 1
    """Number of requests granted. The worker may still sample those that have left the lease since."""

    def made_by(self, now_ms: int) -> int:
        """Return the estimated current step of the images, from the last reported step and the time since the grant."""
        pace, steps = self.of.pace.step_ms, self.of.task.steps
        guess = self.first_step + int((min(now_ms, self.expires_ms) - self.granted_ms) / pace) if pace else 0
        return max(self.step, min(steps, guess))

    def end_ms(self, now_ms: int, silence_ms: int) -> float:
        """Return the predicted finish time in ms.

        The step time is the worker's own, but at least the average of this kind of work. A worker silent for longer
        than `silence_ms` is expected to stay silent for the same time again.
        """
        pace, steps_made = self.of.pace.step_ms, self.step - self.first_step
        own = max(pace, (self.last_step_ms - self.granted_ms) / steps_made) if steps_made else pace
        silent = now_ms - self.last_step_ms
        since = self.last_step_ms if silent <= silence_ms else now_ms + silent
        return since + own * (self.of.task.steps - self.step)


class LeaseTable:
    """The open leases. The module docstring lists the promises."""

    def __init__(self, rules: Rules) -> None:
        self.open: dict[int, Lease] = {}
        self.next_number = 1
        self._rules = rules

    def issue_number(self) -> int:
        """Return a lease number that was never issued before."""
        self.next_number += 1
        return self.next_number - 1

    def begin(self, first: int) -> None:
        """Continue lease numbers from `first`, above every number issued by an earlier coordinator."""
        self.next_number = max(self.next_number, first)

    def renew(self, lease: Lease, step: int, now_ms: int) -> None:
        """Renew the lease after a call of its worker and update the step-time estimate."""
        if step > lease.step:
            lease.of.pace.observe_step((now_ms - lease.last_step_ms) / (step - lease.step))
            lease.step, lease.last_step_ms = step, now_ms
        lease.expires_ms = now_ms + self._rules.lease_of(lease.of.pace)

    def is_held(self, worker: str, number: int) -> bool:
        """Return True if the worker holds the lease."""
        lease = self.open.get(number)
        return lease is not None and lease.worker == worker

    def extend_all(self, gap_ms: int) -> None:
        """Extend every lease by the time that the coordinator itself stood still."""
        for lease in self.open.values():
            lease.expires_ms += gap_ms

    def expired(self, now_ms: int) -> set[int]:
        """Return the numbers of the leases past their end."""
        return {number for number, lease in self.open.items() if lease.expires_ms < now_ms}

    def of_node(self, node: str) -> set[int]:
        """Return the numbers of the leases held on a node."""
        return {number for number, lease in self.open.items() if lease.node == node}

    def nodes(self) -> set[str]:
        """Return the nodes with a lease."""
        return {lease.node for lease in self.open.values()}

    def demand(self, now_ms: int) -> Iterator[tuple[str, Requests, int]]:
        """Yield the worker, the remaining work and the batch shape of each lease."""
        for lease in self.open.values():
            task = lease.of.task
            steps_left = task.steps - lease.made_by(now_ms)
            yield lease.worker, Requests(request_class=task.request_class, steps=steps_left), task.shape

    def record(self, number: int) -> LeaseRecord:
        """Return the facts that restore a lease. Raises KeyError if the lease has ended."""
        lease = self.open[number]
        return LeaseRecord(
            number=number,
            worker=lease.worker,
            node=lease.node,
            boot=lease.boot,
            seq=lease.seq,
            weights=lease.of.task.weights,
            requests=tuple(lease.requests),
            lease_ms=self._rules.lease_of(lease.of.pace),
            copy=lease.copy,
        )

    def check(self, numbers: Mapping[int, Lease]) -> None:
        """Raise AssertionError if one of these leases contradicts itself."""
        for number, lease in numbers.items():
            weights = lease.of.task.weights
            assert lease.requests, f"lease {number} holds nothing"
            for request, entry in lease.requests.items():
                assert number in entry.leases, f"{request} does not know its lease {number}"
                assert entry.slot is None, f"{request} is leased and waits"
                assert entry.attempt.weights is weights or entry.attempt.weights == weights, f"{request}: two versions"
