"""The callers of the coordinator: workers (engine/worker/worker.py) and the trainer (engine/trainer/loop.py), modelled.

An actor is a generator: it yields a call `(head, blobs)` and gets `(answer, blobs)`, or yields milliseconds to wait.
The world delivers, loses and repeats its calls, freezes it, or never resumes it.
"""

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from engine.coordinator.weight_book import digest_of
from tests.simulation.oracle import STEPS_MAX, Broken, Key, Trail, key_of, made_with, reward_of, whole

if TYPE_CHECKING:
    from tests.simulation.world import Process, World

Head = dict[str, Any]
Body = Generator[Any, Any, Any]

HEARTBEAT_MS = 300
PRIORITY = ["train", "evaluate", "explore", "early"]
TRAINED = ("train", "early")
EARLY_PATIENCE = 40
"""Looks for early groups, 60 ms apart, after which the trainer makes the missing groups anew."""


class Worker:
    """A worker: it pulls, loads weights, makes steps, polls between them, commits in parallel and finishes."""

    def __init__(self, world: "World", process: "Process", *, kinds: list[str] = PRIORITY, may_load: bool = True):
        self.world, self.process = world, process
        self.kinds, self.may_load = kinds, may_load
        self.paused = not may_load
        self.idle = True
        self.seq = 0
        self.holds: list[Any] | None = None
        self.weights = 0
        self.pending: list[tuple[Head, list[Trail], int]] = []
        """Sampled leases that wait for their score: (work, images, time of the score)."""
        self.commit_lane: Any = None
        self.commit_answer: Head | None = None
        self.step_ms = 40 + int(160 * world.random())
        self.room = None if world.random() < 0.2 else 1 if may_load and world.random() < 0.1 else 2
        self.called_ms = 0

    def _call(self, head: Head, blobs: Mapping[str, Any] | None = None) -> Body:
        process = self.process
        whole_head = {**head, "worker": process.name, "node": process.node.name, "boot": process.boot}
        answer, _ = yield whole_head, blobs or {}
        self.called_ms = self.world.now_ms
        return answer

    def serve(self) -> Body:
        while True:
            if self.paused:
                self.idle = True
                yield 40
                continue
            self.idle = False
            yield from self._settle(block=False)
            self.seq += 1
            call = {"call": "pull", "holds": self.holds, "kinds": self.kinds, "seq": self.seq, "room": self.room}
            answer = yield from self._call(call)
            do = answer["do"]
            if do == "work":
                yield from self._make(answer)
                while len(self.pending) > 1 or (self.pending and not self.may_load):
                    yield from self._settle(block=True)
            elif do == "load_weights":
                if self.may_load:
                    yield from self._load(answer)
                else:
                    yield 60
            elif do == "exit":
                if self.may_load:
                    self.process.alive = False
                return
            elif do == "drain":
                yield from self._give_up_scoring()
                yield 60 + int(140 * self.world.random())
            else:
                while self.pending:
                    yield from self._settle(block=True)
                yield 60 + int(140 * self.world.random())

    def _give_up_scoring(self) -> Body:
        """Send the scored results, and give the other sampled leases back after their last step."""
        yield from self._settle(block=False)
        unscored, self.pending = self.pending, []
        for work, trails, _ in unscored:
            yield from self._hand_back(work, trails)

    def _load(self, order: Head) -> Body:
        answer, blobs = yield {"call": "weights", "weights": order["weights"]}, {}
        if answer["do"] == "refused":
            yield 50
            return
        data = blobs["weights"]
        if digest_of(data) == order["digest"]:
            self.holds, self.weights = [*order["weights"], order["digest"]], int(data)

    def _make(self, work: Head) -> Body:
        attempts = work["attempts"]
        keys = [key_of(a[0]) for a in attempts]
        first = attempts[0][2]
        trails: list[Trail] = [()] * len(keys)
        if first:
            answer, states = yield {"call": "states", "names": [a[3] for a in attempts]}, {}
            if answer["do"] == "refused":  # withdrawn in the meantime
                return
            trails = [states[a[3]] for a in attempts]
            if any(trail != whole(self.weights, first) for trail in trails):
                # Not an error yet: the lease may be over. Results made from this state must never be accepted.
                self.world.note(f"{self.process.name}: goes on from {trails} with weights {self.weights}")
        committed = first
        for step in range(first, self.world.oracle.steps):
            yield self.step_ms + self.world.hang_ms(keys, step)
            came_down = self.world.comes_down(self.process, keys, step)
            if came_down:
                return
            if came_down is not None:
                yield from self._call({"call": "fault", "lease": work["lease"], "text": "boom"})
                return
            trails = [(*trail, self.weights * STEPS_MAX + step) for trail in trails]
            if step + 1 == self.world.oracle.steps:
                break
            every = work["commit_every"]
            if every and step + 1 - committed >= every and self.commit_lane is None:
                committed = step + 1
                self._commit_beside(work, trails)
            if not (yield from self._go_on(work, trails)):
                return
        self.pending.append((work, trails, self.world.now_ms + int(120 * self.world.random())))

    def _go_on(self, work: Head, trails: list[Trail]) -> Body:
        """Return whether to take the next step."""
        yield from self._settle(block=False)
        node = self.process.node
        drain = node.is_reported and node.deadline_ms is not None
        commit_result, self.commit_answer = self.commit_answer, None
        if commit_result is not None:
            if commit_result["do"] in ("fenced", "exit"):
                return False
            drain = drain or commit_result["do"] == "drain"
        if not drain and self.world.now_ms - self.called_ms >= HEARTBEAT_MS:
            leases = {str(made["lease"]): len(images[0]) for made, images, _ in self.pending}
            leases[str(work["lease"])] = len(trails[0])
            answer = yield from self._call({"call": "heartbeat", "leases": leases})
            if answer["do"] == "fenced":
                self.pending = [one for one in self.pending if one[0]["lease"] != answer["lease"]]
                return answer["lease"] != work["lease"]
            if answer["do"] == "exit":
                return False
            drain = answer["do"] in ("drain", "yield")
        if drain:
            yield from self._hand_back(work, trails)
        return not drain

    def _hand_back(self, work: Head, trails: list[Trail]) -> Body:
        while self.commit_lane is not None:
            yield 20
        if work["attempts"][0][0][5] in TRAINED:
            yield from self._call(*self._state(work, trails))
        yield from self._call({"call": "give_back", "lease": work["lease"]})

    def _state(self, work: Head, trails: list[Trail]) -> tuple[Head, dict[str, Trail]]:
        named = [
            (a[0], len(trail), blob_name(a[0], len(trail))) for a, trail in zip(work["attempts"], trails, strict=True)
        ]
        states = [list(one) for one in named]
        blobs = {name: trail for (_, _, name), trail in zip(named, trails, strict=True)}
        return {"call": "commit", "lease": work["lease"], "states": states, "commit_ms": 12.0}, blobs

    def _commit_beside(self, work: Head, trails: list[Trail]) -> None:
        def body() -> Body:
            self.commit_answer = yield from self._call(*self._state(work, trails))
            self.commit_lane = None

        self.commit_lane = self.world.thread(self.process, body())

    def _settle(self, *, block: bool) -> Body:
        """Send the scored results."""
        while self.pending:
            work, trails, ready_ms = self.pending[0]
            if ready_ms > self.world.now_ms:
                if not block:
                    return
                yield ready_ms - self.world.now_ms
                if not self.pending or self.pending[0][0] is not work:
                    continue
            self.pending.pop(0)
            results, blobs = [], {}
            for attempt, trail in zip(work["attempts"], trails, strict=True):
                raw = attempt[0]
                name = blob_name(raw, len(trail)) if raw[5] in TRAINED else None
                if name is not None:
                    blobs[name] = trail
                made = trail[-1] // STEPS_MAX
                results.append(
                    {"request": raw, "reward": reward_of(key_of(raw), made), "metrics": {}, "trajectory": name}
                )
            yield from self._call({"call": "finish", "lease": work["lease"], "results": results}, blobs)


class Trainer:
    """The trainer: for each batch it submits, collects exactly the manifest, checkpoints, publishes and withdraws."""

    def __init__(self, world: "World", process: "Process"):
        self.world, self.process = world, process
        self.worker = Worker(world, process, kinds=["train"], may_load=False)
        self.hurry = False
        """Whether to submit the open batch again at the next version."""
        self.lineage = 0
        self.orders = 0

    def _call(self, head: Head, blobs: Mapping[str, Any] | None = None) -> Body:
        self.orders += 1
        return (yield {**head, "boot": self.process.boot, "seq": self.orders}, blobs or {})

    def run(self) -> Body:
        store = self.world.stored
        yield from self._settle_lineage(store)
        yield from self._publish(store["iteration"], average=False)
        yield from self._withdraw_trained(store["iteration"])
        while not self.world.calm or self.world.stored["iteration"] == 0:
            batch = store["iteration"]
            if (batch + self.world.seed) % 4 == 0:
                yield from self._evaluate(batch)
            yield from self._iterate(batch)
            store["iteration"] = batch + 1
            store["lineage"] = self.lineage
            yield from self._publish(batch + 1, average=False)
            yield from self._withdraw_trained(batch + 1)
        if self.world.random() < 0.3:
            yield from self._call({"call": "stop", "reason": "iterations"})
        self.world.done = True

    def _settle_lineage(self, store: dict[str, int]) -> Body:
        known, _ = yield from self._call({"call": "peek"})
        same = known["lineage"] > 0 and store["lineage"] in (0, known["lineage"])
        if same and (known["version"] is None or known["version"] <= store["iteration"]):
            self.lineage = known["lineage"]
            return
        store["claimed"] += 1
        self.lineage = store["claimed"]
        yield from self._call({"call": "hello", "lineage": self.lineage})

    def _publish(self, version: int, *, average: bool) -> Body:
        yield from self._rest()
        made = made_with(self.lineage, version, average)
        answer, _ = yield from self._call(
            {"call": "publish", "weights": [version, average]}, {"weights": str(made).encode()}
        )
        self.worker.holds, self.worker.weights = [version, average, answer["digest"]], made

    def _rest(self) -> Body:
        """Wait until the trainer's model is free for training."""
        self.worker.paused = True
        while not self.worker.idle:
            yield 20

    def _withdraw_trained(self, iteration: int) -> Body:
        batches = [["train", iteration - 1], ["early", iteration - 1], ["explore", iteration]]
        yield from self._call({"call": "withdraw", "batches": batches})

    def _iterate(self, batch: int) -> Body:
        version = batch
        wanted = self._requests(batch, "train", 4 + batch % 3)
        self.worker.kinds = ["train"]
        yield from self._submit(wanted, version, "train")
        early = self.world.drafts.get((self.lineage, batch), [])
        yield from self._submit(early, version - 1, "early")
        explored = self._requests(batch + 1, "explore", 3) if batch % 2 == 0 else []
        if explored:
            yield from self._submit(explored, version, "explore")
        yield from self._draft(batch + 1, version)
        yield from self._collect(wanted, batch, "train", version)
        yield int(100 * self.world.random())  # the first optimiser step, while early groups are under way
        yield from self._train_early(wanted, early, batch)
        if explored:
            call = {"call": "collect", "kind": "explore", "batch": batch + 1, "have": 0, "poisoned": 0}
            yield from self._call(call)

    def _draft(self, batch: int, version: int) -> Body:
        """Freeze some groups of the next batch, two images each, and submit them. An earlier draft stays."""
        if (self.lineage, batch) not in self.world.drafts:
            if self.world.random() < 0.4:
                return
            self.world.drafts[self.lineage, batch] = self._requests(batch, "early", 2 * (1 + batch % 2))
        yield from self._submit(self.world.drafts[self.lineage, batch], version, "early")

    def _train_early(self, wanted: list[Any], early: list[Any], batch: int) -> Body:
        """Take the early groups that are whole, and make the others anew, whole, with the weights at hand."""
        got: set[Key] = set()
        keys = {key_of(raw) for raw in early}
        patience = EARLY_PATIENCE
        while len(got) < len(keys) and patience:
            self.worker.paused = False
            call = {"call": "collect", "kind": "early", "batch": batch, "have": len(got), "poisoned": 0}
            answer, blobs = yield from self._call(call)
            for result in answer["results"]:
                key = key_of(result["request"])
                if key not in keys or key in got:
                    raise Broken(f"the trainer got {key} early, which it has or never asked for")
                got.add(key)
                self._judge(key, result, blobs, batch)
            patience = 0 if answer["poisoned"] else patience - 1
            yield 60
        lost = [one for one in zip(early[::2], early[1::2], strict=True) if not {key_of(raw) for raw in one} <= got]
        if lost:
            anew = self._requests(batch, "train", 2 * len(lost), first=50)
            assert self.worker.holds is not None
            version = self.worker.holds[0]  # the newest: the batch may have been asked for at the next version
            yield from self._submit(anew, version, "train")
            yield from self._collect([*wanted, *anew], batch, "train", version)

    def _evaluate(self, batch: int) -> Body:
        wanted = self._requests(batch, "evaluate", 2)
        live = self.worker.holds, self.worker.weights
        self.worker.kinds = ["evaluate"]
        yield from self._publish(batch, average=True)
        yield from self._submit(wanted, batch, "evaluate", average=True)
        yield from self._collect(wanted, batch, "evaluate", batch)
        yield from self._rest()
        self.worker.holds, self.worker.weights = live
        yield from self._call({"call": "withdraw", "batches": [["evaluate", batch]]})

    def _collect(self, wanted: list[Any], batch: int, kind: str, version: int) -> Body:
        """Collect until every request is finished or poisoned. Results must be the manifest, each request once."""
        manifest = {key_of(raw) for raw in wanted}
        got: set[Key] = set()
        poisoned = 0
        while len(got) + poisoned < len(manifest):
            self.worker.paused = False
            if self.hurry and kind == "train":
                self.hurry = False
                version, poisoned = batch + 1, 0  # a new attempt: reported requests are tried again
                yield from self._publish(version, average=False)
                yield from self._submit(wanted[1::2], version, kind)
                yield int(400 * self.world.random())
                yield from self._submit(wanted, version, kind)
            call = {"call": "collect", "kind": kind, "batch": batch, "have": len(got), "poisoned": poisoned}
            answer, blobs = yield from self._call(call)
            for result in answer["results"]:
                key = key_of(result["request"])
                if key not in manifest or key in got:
                    raise Broken(f"the trainer got {key}, which it has or never asked for")
                got.add(key)
                self._judge(key, result, blobs, batch)
            poisoned += len(answer["poisoned"])
            yield 60
        if len(got) + poisoned > len(manifest):
            raise Broken(f"batch {batch}: {len(got)} finished and {poisoned} reported of {len(manifest)}")
        missing = manifest - got
        if not missing <= self.world.oracle.reported and self.world.coordinator is not None:
            raise Broken(f"batch {batch}: {missing} is missing, and reported is {self.world.oracle.reported}")

    def _judge(self, key: Key, result: Head, blobs: Mapping[str, Any], batch: int) -> None:
        weights = self.world.oracle.finished.get(key)
        if weights is None or result["reward"] != reward_of(key, weights):
            raise Broken(f"the trainer got {result} for {key}, which was made with {weights}")
        kind = result["request"][5]
        if kind == "early" and weights != made_with(self.lineage, batch - 1, False):
            raise Broken(f"{key} of batch {batch} is early, and was made with {weights}")
        if kind == "train" and weights < made_with(self.lineage, batch, False):
            raise Broken(f"{key} of batch {batch} is fresh, and was made with {weights}")
        name = result["trajectory"]
        if name is not None and blobs[name] != whole(weights, self.world.oracle.steps):
            raise Broken(f"the trainer got {blobs[name]} for {key}, which was made with {weights}")

    def _requests(self, batch: int, kind: str, count: int, first: int = 0) -> list[Any]:
        first += batch * 1000 + 100 * PRIORITY.index(kind)
        wanted = [["run", self.lineage, batch, "1234", first + number, kind] for number in range(count)]
        for raw in wanted:
            if kind != "evaluate":
                self.world.requested(key_of(raw))
        return wanted

    def _submit(self, requests: list[Any], version: int, kind: str, *, average: bool = False) -> Body:
        if not requests:
            return
        task = {
            "requests": requests,
            "weights": [version, average],
            "sampler": "plan",
            "steps": self.world.oracle.steps,
            "shape": 2,
            "dtype": "float32",
            "pictures": 0,
        }
        yield from self._call({"call": "submit", "task": task})


def blob_name(raw: list[Any], step: int) -> str:
    """Return the blob name of a request and step, as in engine/worker/worker.py."""
    return f"{raw[1]}-{raw[4]}-{step}"
