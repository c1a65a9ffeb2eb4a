"""The trainer's calls to the coordinator.

Every order carries the boot number of the trainer's process and a sequence number. The coordinator refuses an order
that arrives after a later one, so a repeated or delayed order of a dead trainer changes nothing. Every call carries the
usage since the call before.
"""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.diffusion.sampler import Plan, plan_to_dict
from engine.exploration.batch import ExplorationOrder
from engine.protocol.request import Finished, Kind, RequestId, WeightsKey
from engine.protocol.wire import finished_from_dict, task_to_dict, weights_to_list
from engine.queue.task import Task
from engine.trainer.ending import Stopped, Unhealthy
from engine.worker.transport import Transport
from engine.worker.usage import Usage


@dataclass(frozen=True, kw_only=True)
class Collected:
    """New results of a batch. `to_come`: results are still expected. `poisoned`: poisoned requests of the batch."""

    results: list[Finished]
    blobs: Mapping[str, bytes]
    to_come: bool
    poisoned: int


@dataclass(frozen=True, kw_only=True)
class Known:
    """The coordinator's lineage, and the newest published version of it, or None."""

    lineage: int
    version: int | None


class CoordinatorClient:
    """Typed calls over the trainer's transport. Raises what the transport raises."""

    def __init__(self, transport: Transport, node: str, workers_of_node: int, usage: Usage) -> None:
        self.transport = transport
        self._node = node
        self._workers_of_node = workers_of_node
        self._usage = usage
        self._boot, self._orders = time.time_ns(), itertools.count(1)
        self.exploring_seconds = 0.0
        """GPU-seconds of exploration by spot workers since the start of the run, as counted by the coordinator."""
        self.alone_since: float | None = None
        """Time since which the coordinator has reported no spot node (`time.monotonic`); None while a spot node is
        live."""

    def peek(self) -> Known:
        """Return what the coordinator knows of the run."""
        answer = self._order({"call": "peek"})
        return Known(lineage=int(answer["lineage"]), version=answer["version"])

    def begin_lineage(self, lineage: int) -> None:
        """Have the coordinator forget all requests of earlier lineages."""
        self._order({"call": "hello", "lineage": lineage})

    def submit(
        self,
        requests: Sequence[RequestId],
        plan: Plan,
        *,
        weights: WeightsKey,
        shape: int,
        images: int = 0,
    ) -> None:
        """Put requests into the queue. `images`: the number of first results whose images come back too."""
        if not requests:
            return
        task = Task(
            requests=tuple(requests),
            weights=weights,
            sampler=json.dumps(plan_to_dict(plan)),
            steps=plan.steps,
            shape=shape,
            dtype="float32",
            pictures=images,
        )
        self._order({"call": "submit", "task": task_to_dict(task)})

    def explore(self, order: ExplorationOrder) -> None:
        """Have spot workers explore candidates while they would be idle."""
        self._order({"call": "explore", "order": order.to_dict()})

    def publish(self, weights: WeightsKey, data: bytes) -> str:
        """Make a weight version available to workers. Returns the digest of its bytes."""
        published = self._order({"call": "publish", "weights": weights_to_list(weights)}, {"weights": data})
        return str(published["digest"])

    def withdraw(self, batches: Sequence[tuple[Kind, int]]) -> None:
        """Remove batches and their results from the coordinator."""
        self._order({"call": "withdraw", "batches": [[str(kind), batch] for kind, batch in batches]})

    def stop(self, reason: str) -> None:
        """End the run: workers exit."""
        self._order({"call": "stop", "reason": reason})

    def collect(self, kind: Kind, batch: int, have: int, *, wait: bool, poisoned: int = 0) -> Collected:
        """Return results of a batch after the first `have`. Raises Stopped or Unhealthy: no wait outlives the run."""
        head = {"call": "collect", "kind": str(kind), "batch": batch, "have": have, "poisoned": poisoned}
        answer, blobs = self.transport.call(head | self._usage_report(), wait=wait)
        if answer["stop"]:
            raise Stopped(answer["stop"])
        if answer["poisoned"] and kind in (Kind.TRAIN, Kind.EVALUATE):
            raise Unhealthy(f"a picture could not be made or scored on three workers: {answer['poisoned'][0]}")
        self.exploring_seconds = answer["exploring_seconds"]
        has_spot = bool(set(answer["nodes"]) - {self._node})
        self.alone_since = None if has_spot else self.alone_since or time.monotonic()
        return Collected(
            results=[finished_from_dict(result) for result in answer["results"]],
            blobs=blobs,
            to_come=bool(answer["to_come"]),
            poisoned=len(answer["poisoned"]),
        )

    def _order(self, head: dict[str, Any], blobs: dict[str, bytes] | None = None) -> dict[str, Any]:
        order = {"boot": self._boot, "seq": next(self._orders)}
        answer, _ = self.transport.call(head | order | self._usage_report(), blobs)
        return answer

    def _usage_report(self) -> dict[str, Any]:
        return {"node": self._node, "of": self._workers_of_node, "usage": self._usage.take()}
