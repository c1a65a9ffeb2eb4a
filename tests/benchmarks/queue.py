"""queue: how many calls a second does the queue take, what does a commit cost, how soon is a killed coordinator back?

    python -m tests.benchmarks.queue --json

`core`: the state machine alone, with its invariants checked all the time. `runtime`: the same mix over HTTP on
loopback, journal and fsync included. `restart`: from SIGKILL to the first answer, the new process forked from a
preloaded server as the node agent does it. `commit`: a real worker, paced steps, with commits and without.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from engine.clock import ScaledClock
from engine.config import EngineConfig, RuntimeConfig
from engine.coordinator.open import open_coordinator
from engine.coordinator.rights import Rights
from engine.coordinator.server import CoordinatorServer, Front, bind
from engine.coordinator.weight_book import digest_of
from engine.diffusion.sampler import plan_to_dict, rollout_plan
from engine.models.load import load_adapter, trainable
from engine.models.weights import get_weights
from engine.node_spec import role_token
from engine.protocol.codec import pack
from engine.protocol.request import Finished, Kind, RequestId, Score, WeightsKey, Work
from engine.protocol.task import Task
from engine.queue.pace import Rules
from engine.queue.queue import Queue
from engine.rewards.load import load_reward
from engine.worker.transport import HttpTransport
from engine.worker.worker import Worker
from tests.benchmarks.page import load_now, publish, spread
from tests.engine.fleet import ALLOWED, TOKEN, free_port
from tests.engine.heads import task_to_dict, weights_to_list

OPEN = 10_000
WORKERS = 256
SHAPE = 12
SHAPES = (1, 4, SHAPE)
"""Requests per lease for the state machine alone; each commit has a cost per request. The first is the headline."""
STEPS = 20
COMMITS = 4
FAULTS = 0.01
CHECK_ALL_EVERY = 20_000
"""Operations between two full checks; the lease of an operation is checked with every operation."""

V0 = WeightsKey(version=0)
DIGEST = digest_of(b"weights")
ORIGIN_MS = 1_700_000_000_000


def task(number: int, shape: int = SHAPE) -> Task:
    requests = tuple(
        RequestId(run="run", lineage=1, batch=number, prompt=f"{i // 24:04d}", seed=i, kind=Kind.TRAIN)
        for i in range(480)
    )
    return Task(requests=requests, weights=V0, sampler="plan", steps=STEPS, shape=shape, dtype="float32")


# --- the state machine alone


@dataclass
class Hand:
    """One simulated worker: its leases and the number of its commits."""

    name: str
    node: str
    work: Work | None = None
    commits: int = 0
    seq: int = 0


def core_ops_per_s(operations: int, seed: int, shape: int) -> float:
    """Return operations a second of the queue with OPEN requests; checks and refilling count in the time."""
    draw = random.Random(seed).random
    queue = Queue(Rules(lease_ms=2000, first_lease_ms=20_000, commit_every=None, preemption_ms=3_600_000))
    queue.publish(V0, DIGEST)
    tasks: dict[int, Task] = {}
    left: dict[int, int] = {}

    open_now = 0

    def refill() -> int:
        added = 0
        while open_now + added < OPEN:
            number = len(tasks)
            tasks[number] = task(number, shape)
            left[number] = len(tasks[number].requests)
            added += left[number]
            queue.submit(tasks[number])
        return added

    open_now += refill()
    hands = [Hand(name=f"n{i // 8}/{i % 8}", node=f"n{i // 8}") for i in range(WORKERS)]
    begun = time.perf_counter()
    for now_ms in range(operations):
        hand = hands[int(draw() * WORKERS)]
        if hand.work is None:
            hand.seq += 1
            reply = queue.pull(hand.name, hand.node, boot=1, seq=hand.seq, now_ms=now_ms, holds=(V0, DIGEST))
            assert isinstance(reply, Work)
            hand.work, hand.commits, number = reply, 0, reply.lease
        else:
            work, number = hand.work, hand.work.lease
            if draw() < FAULTS:
                queue.fault(hand.name, hand.node, number, "boom", now_ms=now_ms)
                hand.work = None
            elif hand.commits < COMMITS:
                hand.commits += 1
                step = work.attempts[0].step + hand.commits * (STEPS - 1 - work.attempts[0].step) // COMMITS
                states = {attempt.request: (step, "state") for attempt in work.attempts}
                queue.commit(hand.name, hand.node, number, states, now_ms=now_ms, cost_ms=10.0)
            else:
                results = [Finished(request=a.request, score=Score(reward=1.0, metrics={})) for a in work.attempts]
                queue.finish(hand.name, hand.node, number, results, now_ms=now_ms)
                hand.work = None
                for attempt in work.attempts:
                    left[attempt.request.batch] -= 1
                open_now -= len(results)
                if not left[results[0].request.batch]:
                    queue.withdraw(tasks[results[0].request.batch].requests)
                open_now += refill()
        queue.check(number)
        if now_ms % 50 == 0:
            queue.tick(now_ms)
            queue.events.clear()
        if now_ms % CHECK_ALL_EVERY == 0:
            queue.check()
    return operations / (time.perf_counter() - begun)


# --- a coordinator in a separate process


def serve(folder: str, port: int, runtime: str) -> None:
    """Serve like `run_coordinator`, without a node."""
    clock = ScaledClock(origin_ms=ORIGIN_MS)
    coordinator = open_coordinator(Path(folder), clock=clock, runtime=RuntimeConfig.model_validate_json(runtime))
    asyncio.run(CoordinatorServer(Front(coordinator), Rights(TOKEN)).serve(bind("127.0.0.1", port)))


class Served:
    """A coordinator behind HTTP, forked from a preloaded server."""

    def __init__(self, folder: Path, runtime: RuntimeConfig | None = None) -> None:
        self.folder, self.runtime, self.port = folder, runtime or RuntimeConfig(), free_port()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["engine.entrypoints.processes"])
        self.process: Any = None

    def start(self) -> float:
        """Start the coordinator, and return the seconds until it answers."""
        begun = time.perf_counter()
        arguments = (str(self.folder), self.port, self.runtime.model_dump_json())
        self.process = self._context.Process(target=serve, args=arguments)
        self.process.start()
        call = pack({"call": "peek"})
        url = f"http://127.0.0.1:{self.port}/call"
        with httpx.Client(trust_env=False, headers=ALLOWED["trainer"]) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    assert client.post(url, content=call).status_code == 200
                    return time.perf_counter() - begun
                assert self.process.is_alive(), "the coordinator died"
                time.sleep(0.005)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def transport(self) -> HttpTransport:
        return HttpTransport("127.0.0.1", self.port, role_token(TOKEN, "trainer"), patience_seconds=20.0)


@contextmanager
def served(runtime: RuntimeConfig | None = None) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as folder:
        one = Served(Path(folder), runtime)
        one.start()
        try:
            yield one
        finally:
            one.kill()


def fill(line: HttpTransport, weights: bytes = b"weights") -> None:
    line.call({"call": "hello", "lineage": 1})
    line.call({"call": "publish", "weights": weights_to_list(V0)}, {"weights": weights})


class Client:
    """A thread that simulates a few workers over one connection, one call at a time."""

    def __init__(self, one: Served, number: int, workers: int, blob: bytes, seed: int) -> None:
        self.line, self.blob, self.draw = one.transport(), blob, random.Random(seed).random
        self.hands = [Hand(name=f"c{number}/{i}", node=f"c{number}") for i in range(workers)]
        self.calls = 0

    def play(self, until: float) -> None:
        while time.perf_counter() < until:
            for hand in self.hands:
                self._one(hand)
                self.calls += 1

    def finish(self, leases: int) -> None:
        """Finish this many leases completely."""
        hand = self.hands[0]
        while leases:
            finishing = hand.work is not None and hand.commits >= COMMITS
            self._one(hand)
            leases -= finishing and hand.work is None

    def _one(self, hand: Hand) -> None:
        me = {"worker": hand.name, "node": hand.node, "of": 1, "usage": [], "boot": 1}
        if hand.work is None:
            hand.seq += 1
            pull = {"call": "pull", "seq": hand.seq, "holds": [0, False, DIGEST], "kinds": None, "room": None}
            answer, _ = self.line.call(me | pull)
            hand.work, hand.commits = (answer if answer["do"] == "work" else None), 0  # type: ignore[assignment]
            return
        work: Any = hand.work
        call = me | {"lease": work["lease"]}
        requests = [attempt[0] for attempt in work["attempts"]]
        names = [f"{raw[2]}-{raw[4]}-{hand.commits}" for raw in requests]
        blobs = dict.fromkeys(names, self.blob)
        if self.draw() < FAULTS:
            self.line.call(call | {"call": "fault", "text": "boom"})
            hand.work = None
        elif hand.commits < COMMITS:
            hand.commits += 1
            step = hand.commits * (STEPS - 1) // COMMITS
            states = [[raw, step, name] for raw, name in zip(requests, names, strict=True)]
            answer, _ = self.line.call(call | {"call": "commit", "states": states, "commit_ms": 10.0}, blobs)
            if answer["do"] == "fenced":
                hand.work = None
        else:
            results = [
                {"request": raw, "reward": 1.0, "metrics": {}, "trajectory": name}
                for raw, name in zip(requests, names, strict=True)
            ]
            self.line.call(call | {"call": "finish", "results": results}, blobs)
            hand.work = None


def runtime_ops_per_s(seconds: float, clients: int, seed: int) -> float:
    """Return calls a second over HTTP: WORKERS workers in a few threads, an fsync before every durable answer."""
    with served(RuntimeConfig(lease_seconds=60, first_lease_seconds=60)) as one:
        line = one.transport()
        fill(line)
        for number in range(OPEN // 480 + 1):
            line.call({"call": "submit", "task": task_to_dict(task(number))})
        players = [Client(one, i, WORKERS // clients, bytes(4096), seed + i) for i in range(clients)]
        begun = time.perf_counter()
        threads = [threading.Thread(target=player.play, args=[begun + seconds]) for player in players]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(player.calls for player in players) / (time.perf_counter() - begun)


def restarts_s(times: int, finished: int) -> list[float]:
    """Return the seconds from SIGKILL to the first answer, with OPEN requests open and some thousands finished."""
    with served(RuntimeConfig(lease_seconds=600, first_lease_seconds=600)) as one:
        line = one.transport()
        fill(line)
        for number in range((OPEN + finished) // 480 + 1):
            line.call({"call": "submit", "task": task_to_dict(task(number))})
        Client(one, 0, 1, bytes(16_384), 0).finish(finished // SHAPE)
        found = []
        for _ in range(times):
            begun = time.perf_counter()
            one.kill()
            one.start()
            found.append(time.perf_counter() - begun)
        return found


# --- cost of commits for a worker


def seconds_per_rollout(commit_every: int, leases: int, step_seconds: float) -> list[float]:
    """Return the denoising time of each lease of a real worker. `commit_every` above the number of steps: no commit."""
    config = EngineConfig()
    with served(RuntimeConfig(commit_every=commit_every, lease_seconds=10)) as one:
        adapter = load_adapter(config.model)
        marks: list[tuple[int, float]] = []
        worker = Worker(
            name="a/0",
            node="a",
            workers_of_node=1,
            transport=one.transport(),
            adapter=adapter,
            parameters=trainable(adapter),
            reward=load_reward(config.reward, None),
            clock=ScaledClock(origin_ms=ORIGIN_MS),
            heartbeat_seconds=0.5,
            step_seconds=step_seconds,
            trace=lambda work, step: marks.append((work.lease, time.perf_counter())),
        )
        line = one.transport()
        fill(line, get_weights(worker.parameters))
        plan = rollout_plan(config.sampler, 0, 0)
        wanted = tuple(
            RequestId(run="run", lineage=1, batch=0, prompt=f"{i:04d}", seed=i, kind=Kind.TRAIN)
            for i in range(SHAPE * leases)
        )
        task = Task(
            requests=wanted,
            weights=V0,
            sampler=json.dumps(plan_to_dict(plan)),
            steps=plan.steps,
            shape=SHAPE,
            dtype="float32",
        )
        line.call({"call": "submit", "task": task_to_dict(task)})
        while len({lease for lease, _ in marks}) < leases or len(marks) < leases * plan.steps:
            worker.serve_once(wait=False)
        worker.serve_once(wait=False)
        by_lease: dict[int, list[float]] = {}
        for lease, at in marks:
            by_lease.setdefault(lease, []).append(at)
        return [(times[-1] - times[0]) / (len(times) - 1) for times in by_lease.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each round over HTTP")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--finished", type=int, default=3000, help="results in the journal that a restart reads")
    parser.add_argument("--leases", type=int, default=3, help="rollouts of the worker in each arm and round")
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    torch.set_num_threads(1)
    seeds = list(range(options.rounds))
    core = {shape: [core_ops_per_s(options.operations // shape, seed, shape) for seed in seeds] for shape in SHAPES}
    over_http = [runtime_ops_per_s(options.seconds, options.clients, seed) for seed in seeds]
    restarts = restarts_s(2 * options.rounds - 1, options.finished)
    with_commits: list[float] = []
    without: list[float] = []
    for _ in seeds:
        with_commits += seconds_per_rollout(3, options.leases, options.step_seconds)
        without += seconds_per_rollout(1000, options.leases, options.step_seconds)
    share = 1 - statistics.median(without) / statistics.median(with_commits)
    publish(
        "queue",
        question="how many calls a second, what does a commit cost, and how soon is a killed coordinator back?",
        command="python -m tests.benchmarks.queue --json",
        result={
            "core_ops_per_s": statistics.median(core[1]),
            "core_ops_per_s_by_requests_per_lease": {shape: statistics.median(found) for shape, found in core.items()},
            "runtime_ops_per_s": statistics.median(over_http),
            "commit_overhead_share": share,
            "coordinator_restart_s": statistics.median(restarts),
            "open_requests": OPEN,
            "workers": WORKERS,
            "shape": SHAPE,
            "clients": options.clients,
            "finished_at_restart": options.finished,
            "step_seconds": options.step_seconds,
        },
        runs=options.rounds,
        seeds=seeds,
        load1=load1,
        rows=[
            *(
                {"figure": f"core, operations/s, requests to a lease: {shape}", "median (range)": spread(found)}
                for shape, found in core.items()
            ),
            {"figure": "over HTTP with fsync, calls/s", "median (range)": spread(over_http)},
            {"figure": "restart, s", "median (range)": spread(restarts)},
            {"figure": "a step with commit_every 3, s", "median (range)": spread(with_commits)},
            {"figure": "a step without commits, s", "median (range)": spread(without)},
        ],
        text=f"""
`core_ops_per_s`: {options.operations} operations a round on the state machine alone, 1 pull : {COMMITS}
commits : 1 finish in random order over {WORKERS} workers, {FAULTS:.0%} of what is not a pull a fault, one
request to a lease, {OPEN} requests open all the time. In the time: the lease of every operation is checked
with it, everything every {CHECK_ALL_EVERY} operations, ticks and new batches. With more requests to a lease
an operation does more: see the table.
`runtime_ops_per_s`: the same mix from {options.clients} threads of one process over HTTP to a coordinator in
a process of its own, {SHAPE} requests to a lease with a state of 4 KiB each, its journal on disk and an fsync
(shared by those who wait) before the answer.
`coordinator_restart_s`: SIGKILL, wait for the end of the process, fork from a server that has loaded the
engine (as the node agent's), read the journal with {OPEN} open and {options.finished} finished requests (a
trajectory of 16 KiB and {COMMITS} states of 16 KiB each), bind, first answer.
`commit_overhead_share`: a real worker (digits model, {SHAPE} pictures, one thread, commits beside the steps)
against a real coordinator, both on this machine; time from the first step to the last of each rollout, per
step, with `commit_every: 3` against none. A step is paced to {options.step_seconds} s, so that what fits into
the pause costs nothing, as on a GPU.
""",
    )


if __name__ == "__main__":
    main()
