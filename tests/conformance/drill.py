"""The trainer's part of a drill: publish, submit, collect, and the final assertion of every case."""

import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any, TypeVar

from engine.clock import ScaledClock
from engine.coordinator.open import open_coordinator
from engine.diffusion.sampler import plan_to_dict
from engine.diffusion.trajectory import Trajectory
from engine.events import Capacity, Market, NodeCapacity, NodeState
from engine.protocol.request import Finished, Kind, RequestId, WeightsKey
from engine.protocol.task import Task
from tests.conformance.stage import Stage, Step
from tests.conformance.undisturbed import Undisturbed, equal
from tests.engine.heads import finished_from_dict, task_to_dict, weights_to_list

PATIENCE_SECONDS = 90.0
"""Time limit of a wait. A test computer may be slow; a wait ends as soon as its condition holds."""

LOOK_SECONDS = 0.005

Found = TypeVar("Found")


@dataclass
class Batch:
    """The requests of a batch, and the weight version that each must be made with."""

    number: int
    versions: dict[RequestId, int]

    @property
    def requests(self) -> list[RequestId]:
        return list(self.versions)


class Drill:
    """One stage with its nodes, used by several cases."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.line = stage.line()
        self.lease_seconds = stage.config.runtime.lease_seconds
        self.steps_of_all, self.shape = stage.config.sampler.steps, stage.config.runtime.shape
        self.undisturbed = Undisturbed(stage.config)
        self.nodes: list[str] = []
        self.came_back: set[str] = set()
        self.version = -1
        self._names = (f"spot-{number}" for number in itertools.count())
        self._batches = itertools.count()
        self._generation = itertools.count(1)
        self.line.call({"call": "hello", "lineage": 1})
        self.publish()

    # --- nodes ----------------------------------------------------------------------------------------------

    def need(self, count: int, *, spare: int) -> None:
        """Wait until at least this many nodes are up, while others start."""
        while len(self.nodes) < count + spare:
            self._start()
        self.wait(lambda: sum(self.stage.is_ready(node) for node in self.nodes) >= count, "nodes are up")

    def lose(self, node: str) -> None:
        """Give up a node that will not come back, and start another in its place."""
        self.stage.forget(node)
        self.replace(node)

    def replace(self, node: str) -> None:
        """Start another node in place of this one."""
        self.nodes.remove(node)
        self.came_back.discard(node)
        self._start()

    def must_work_again(self, node: str) -> None:
        """Remember that this node must come back by itself; a later test checks it."""
        self.came_back.add(node)

    def ready(self) -> list[str]:
        return [node for node in self.nodes if self.stage.is_ready(node)]

    def send_capacity(self, *nodes: str, state: NodeState, seconds: float | None = None) -> None:
        """Send a capacity snapshot of the launcher about these nodes."""
        deadline_ms = None if seconds is None else time.time_ns() // 1_000_000 + round(seconds * 1000)
        facts = [
            NodeCapacity(node=node, market=Market.SPOT, state=state, workers=1, deadline_ms=deadline_ms)
            for node in nodes
        ]
        self.stage.send_capacity(Capacity(generation=next(self._generation), nodes=tuple(facts)))

    def _start(self) -> None:
        name = next(self._names)
        self.stage.start(name)
        self.nodes.append(name)

    # --- as the trainer -----------------------------------------------------------------------------------------

    def publish(self) -> int:
        """Publish new weights, and return their version."""
        version = self.version + 1
        weights, data = weights_to_list(WeightsKey(version=version)), self.undisturbed.weights(version)
        self.line.call({"call": "publish", "weights": weights}, {"weights": data})
        self.version = version
        return version

    def submit(self, count: int) -> Batch:
        """Submit a new batch of this many images, at the newest weights."""
        number = next(self._batches)
        requests = [
            RequestId(run="drill", lineage=1, batch=number, prompt=str(i % 10), seed=i, kind=Kind.TRAIN)
            for i in range(count)
        ]
        batch = Batch(number=number, versions=dict.fromkeys(requests, self.version))
        self.submit_again(batch, requests)
        return batch

    def submit_again(self, batch: Batch, requests: list[RequestId]) -> None:
        """Submit these requests of a batch again at the newest weights."""
        task = Task(
            requests=tuple(requests),
            weights=WeightsKey(version=self.version),
            sampler=json.dumps(plan_to_dict(self.undisturbed.plan)),
            steps=self.steps_of_all,
            shape=self.shape,
            dtype="float32",
        )
        self.line.call({"call": "submit", "task": task_to_dict(task)})
        batch.versions |= dict.fromkeys(requests, self.version)

    def collect(self, batch: Batch, have: int = 0, *, wait: bool = False) -> tuple[list[Finished], dict[str, Any]]:
        collect = {"call": "collect", "kind": "train", "batch": batch.number, "have": have}
        answer, blobs = self.line.call(collect, wait=wait)
        assert not answer["poisoned"], answer["poisoned"]
        assert answer["stop"] is None
        return [finished_from_dict(raw) for raw in answer["results"]], blobs

    def collect_all(self, batch: Batch, *, seconds: float = PATIENCE_SECONDS) -> tuple[list[Finished], dict[str, Any]]:
        found: list[Finished] = []
        blobs: dict[str, Any] = {}

        def everything_is_there() -> bool:
            more, more_blobs = self.collect(batch, len(found), wait=True)
            found.extend(more)
            blobs.update(more_blobs)
            return len({result.request for result in found}) >= len(batch.versions)

        self.wait(everything_is_there, f"batch {batch.number} is finished", seconds=seconds)
        return found, blobs

    # --- observing ------------------------------------------------------------------------------------------

    def wait(self, is_so: Callable[[], Found], what: str, *, seconds: float = PATIENCE_SECONDS) -> Found:
        """Poll, and return the first true answer."""
        until = time.monotonic() + seconds
        while not (found := is_so()):
            assert time.monotonic() < until, f"waited {seconds:.0f} s in vain until {what}"
            time.sleep(LOOK_SECONDS)
        return found

    def steps(self, batch: Batch) -> list[Step]:
        return [step for step in self.stage.steps() if step.batch == batch.number]

    def in_the_middle(self, batch: Batch, step: int | None = None) -> Step:
        """Wait until a worker is past this step of a lease that is far from finished, and return the worker."""
        first = self.steps_of_all // 2 if step is None else step

        def look() -> Step | None:
            newest = {found.lease: found for found in self.steps(batch)}
            for found in newest.values():
                is_at_work = time.time_ns() - found.at_ns < 200_000_000 and found.node in self.nodes
                if is_at_work and first <= found.step <= self.steps_of_all - 2:
                    self.came_back.discard(found.node)
                    return found
            return None

        return self.wait(look, f"a worker is past step {first}")

    def works(self, node: str) -> None:
        """Wait until this node finishes steps of a new lease."""
        leases = {step.lease for step in self.stage.steps()}

        def has_worked() -> bool:
            return any(step.node == node and step.lease not in leases for step in self.stage.steps())

        batches = []
        until = time.monotonic() + PATIENCE_SECONDS
        while not has_worked():
            assert time.monotonic() < until, f"{node} does not work"
            batches.append(self.submit(self.shape * len(self.nodes)))
            self.collect_all(batches[-1])
        for batch in batches:
            self.assert_whole(batch)

    def repeated(self, batch: Batch, lease: int) -> int:
        """Return the number of repeated steps of a lost lease, for the image that lost most."""
        steps = self.steps(batch)
        lost = [step for step in steps if step.lease == lease]
        reached = max(step.step for step in lost)
        counts = []
        for seed in lost[0].seeds:
            later = [step for step in steps if seed in step.seeds and step.lease > lease]
            assert later, f"no worker took over the work of lease {lease}"
            first = min(later, key=lambda step: (step.lease, step.step))
            counts.append(max(0, reached - first.step + 1))
        return max(counts)

    # --- the final assertion ------------------------------------------------------------------------------------

    def assert_whole(self, batch: Batch) -> None:
        """Assert that each request finished exactly once, bit for bit as undisturbed, and is on disk."""
        found, blobs = self.collect_all(batch)
        assert sorted(result.request for result in found) == sorted(batch.requests)
        for version in sorted(set(batch.versions.values())):
            requests = [request for request, made_at in batch.versions.items() if made_at == version]
            expected = self.undisturbed.results(requests, version)
            for result in (result for result in found if result.request in expected):
                trajectory, reward = expected[result.request]
                made = Trajectory.from_bytes(blobs[str(result.trajectory)])
                assert equal(made, trajectory), f"{result.request} at version {version}"
                assert result.score.reward == reward
        assert [result.request for result in self.collect(batch)[0]] == [result.request for result in found]
        self.stage.check()
        self._assert_durable(found)
        self.line.call({"call": "withdraw", "batches": [["train", batch.number]]})

    def _assert_durable(self, found: list[Finished]) -> None:
        """Assert that a coordinator started from the disk would restore all results."""
        with tempfile.TemporaryDirectory() as folder:
            copyfile(self.stage.journal() / "journal", Path(folder) / "journal")
            runtime = self.stage.config.runtime
            successor = open_coordinator(Path(folder), clock=ScaledClock(origin_ms=0), runtime=runtime)
            successor.queue.check()
            assert {result.request for result in found} <= successor.queue.finished.keys()
            successor.journal.close()
