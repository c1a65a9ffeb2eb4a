"""The trainer's calls to the coordinator.

Every order carries the boot number of the trainer's process and a sequence number. The coordinator refuses an order
that arrives after a later one, so a repeated or delayed order of a dead trainer changes nothing. Every call carries the
usage since the previous call.
"""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from engine.coordinator.weight_book import DIGEST_CHARACTERS
from engine.diffusion.sampler import Plan, plan_to_dict
from engine.protocol.exploration_order import ExplorationOrder
from engine.protocol.messages import (
    Answer,
    BeginLineage,
    Collect,
    Done,
    Explore,
    Known,
    Late,
    LookAhead,
    Order,
    Outlook,
    Peek,
    Publish,
    Published,
    Results,
    Stop,
    Submit,
    TrainerCall,
    WeightsFile,
    Withdraw,
)
from engine.protocol.request import Finished, Kind, RequestId, WeightsKey
from engine.protocol.task import Task
from engine.storage.tensor_files import TensorFile
from engine.trainer.ending import Stopped, Unhealthy
from engine.worker.transport import Transport, ask
from engine.worker.usage import Usage


@dataclass(frozen=True, kw_only=True)
class Collected:
    """New results of a batch. `to_come`: results are still expected. `poisoned`: new poisoned requests of the batch."""

    results: list[Finished]
    blobs: Mapping[str, bytes]
    to_come: bool
    poisoned: Sequence[RequestId]


A = TypeVar("A")


class CoordinatorClient:
    """Typed calls to the coordinator over the trainer's transport. Raises the errors of the transport."""

    def __init__(self, transport: Transport, node: str, workers_of_node: int, usage: Usage) -> None:
        self.transport = transport
        self._node = node
        self._workers_of_node = workers_of_node
        self._usage = usage
        self._boot, self._orders = time.time_ns(), itertools.count(1)
        self.exploring_seconds = 0.0
        """GPU-seconds of exploration by spot workers since the start of the run, as counted by the coordinator."""
        self.alone_since: float | None = time.monotonic()
        """Time since which the coordinator has reported no spot node (`time.monotonic`); None while a spot node is
        live. A new trainer knows of no spot node until its first `collect`."""

    def peek(self) -> Known:
        """Return the coordinator's lineage, and the newest published weight version or None."""
        return self._ask(Peek(), Known)

    def look_ahead(self, batch: int) -> Outlook:
        """Return the rollouts of a batch that wait or are under way."""
        return self._ask(LookAhead(batch=batch), Outlook)

    def begin_lineage(self, lineage: int) -> None:
        """Have the coordinator forget all requests of earlier lineages."""
        self._order(BeginLineage(lineage=lineage))

    def submit(
        self,
        requests: Sequence[RequestId],
        plan: Plan,
        *,
        weights: WeightsKey,
        shape: int,
        images: int = 0,
    ) -> None:
        """Put requests into the queue. `images`: the first so many requests also return their images."""
        if not requests:
            return
        task = Task(
            requests=tuple(requests),
            weights=weights,
            sampler=json.dumps(plan_to_dict(plan)),
            steps=plan.steps,
            shape=shape,
            dtype="float32",
            images=images,
        )
        self._order(Submit(task=task))

    def explore(self, order: ExplorationOrder) -> None:
        """Have spot workers explore candidates while they would be idle."""
        self._order(Explore(order=order))

    def publish(self, weights: WeightsKey, file: TensorFile) -> str:
        """Make a weight version available to workers. Returns the digest of its bytes.

        `file`: on the coordinator's disk. The coordinator has taken it over when this method returns.
        """
        weights_file = WeightsFile(path=str(file.path), digest=file.digest[:DIGEST_CHARACTERS], size=file.size)
        return self._ask(self._numbered(Publish(weights=weights, file=weights_file)), Published).digest

    def withdraw(self, batches: Sequence[tuple[Kind, int]]) -> None:
        """Remove batches and their results from the coordinator."""
        self._order(Withdraw(batches=tuple(batches)))

    def stop(self, reason: str) -> None:
        """End the run: workers exit."""
        self._order(Stop(reason=reason))

    def collect(self, kind: Kind, batch: int, have: int, *, wait: bool, poisoned: int = 0) -> Collected:
        """Return the results of a batch after the first `have` results. `wait`: wait for a new result.

        Raises Stopped when the run has been ordered to stop. Raises Unhealthy if a request to train or evaluate is
        poisoned.
        """
        call = Collect(kind=kind, batch=batch, have=have, poisoned=poisoned)
        answer, blobs = self._call(call, wait=wait)
        if wait:
            self._usage.meter.waited()
        results = _expect(answer, Results)
        if results.stop:
            raise Stopped(results.stop)
        if results.poisoned and kind in (Kind.TRAIN, Kind.EVALUATE):
            raise Unhealthy(f"an image could not be made or scored on three workers: {results.poisoned[0]}")
        self.exploring_seconds = results.exploring_seconds
        self.alone_since = None if results.nodes else self.alone_since or time.monotonic()
        return Collected(
            results=[result.finished() for result in results.results],
            blobs=blobs,
            to_come=bool(results.to_come),
            poisoned=results.poisoned_requests,
        )

    def _order(self, order: Order) -> None:
        """Send a numbered order. A late order of a replaced trainer changes nothing."""
        answer, _ = self._call(self._numbered(order))
        if not isinstance(answer, Done | Late):
            raise TypeError(f"the coordinator answered {answer}")

    def _numbered(self, order: Order) -> Order:
        return msgspec.structs.replace(order, boot=self._boot, seq=next(self._orders))

    def _ask(self, call: TrainerCall, expected: type[A]) -> A:
        answer, _ = self._call(call)
        return _expect(answer, expected)

    def _call(self, call: TrainerCall, *, wait: bool = False) -> tuple[Answer, dict[str, bytes]]:
        usage = tuple(self._usage.take())
        reported = msgspec.structs.replace(call, node=self._node, of=self._workers_of_node, usage=usage)
        return ask(self.transport, reported, wait=wait)


def _expect(answer: Answer, expected: type[A]) -> A:
    """Return the answer if it has the expected class. Raises TypeError for another class."""
    if not isinstance(answer, expected):
        raise TypeError(f"the coordinator answered {answer}")
    return answer
