"""large_weights: do large weights move without stopping their processes, and without a second copy in memory?

    python -m tests.benchmarks.large_weights --json      1 to 3 minutes, 3 GB of state, 12 GB of memory, 16 GB of disk

A coordinator, a trainer and two nodes run as processes of their own. The trainer's state is a float32 model with its
average and AdamW's two moments, so the weights are a quarter of it. The trainer publishes, writes a checkpoint to a
folder, and restores the checkpoint, with the engine's own classes. Both nodes fetch the published weights over loopback
at the same time, into files on disk, and check the digest. The trainer publishes further versions, until a node writes
into the file of its first fetch: from there on, every fetch of a run does the same. The nodes load the last version.

A thread ticks every 10 ms in every process, and a watcher in this process judges them as an agent does. Peak memory is
the growth of a process's largest resident size over its size before the state was made.
"""

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from engine.algorithm_config import AlgorithmConfig
from engine.clock import ScaledClock
from engine.config import RuntimeConfig
from engine.coordinator.open import open_coordinator
from engine.coordinator.rights import Rights
from engine.coordinator.server import CoordinatorServer, Front, bind
from engine.models.weights import set_weights
from engine.node.frozen import Stillness
from engine.node_spec import role_token
from engine.protocol.request import Group, Manifest, WeightsKey
from engine.storage.checkpoint import Checkpoint, CheckpointStore
from engine.trainer.coordinator_client import CoordinatorClient
from engine.trainer.model import TrainedModel
from engine.trainer.outbox import Outbox
from engine.worker import node_weights
from engine.worker.download import Download
from engine.worker.node_weights import SLOTS, NodeMemory, NodeWeights
from engine.worker.transport import HttpTransport
from engine.worker.usage import Usage
from tests.benchmarks.page import load_now, publish

TOKEN = "token-of-the-benchmark"
NODES = 2
TICK_SECONDS = 0.01
TENSOR_NUMBERS = 48 << 20
"""Numbers of the largest tensors, 200 MB: as large as the largest of a published transformer."""

COPIES = 4
"""Copies of the weights in the trainer's state: weights, average, two moments."""

MOST_SILENCE_MS, MOST_PEAK, LEAST_GB_PER_S = 100.0, 1.2, 1.0
"""Targets."""

V1 = WeightsKey(version=1)
VERSIONS = SLOTS + 1
"""Published versions. The last is the first that a node writes over an earlier one."""

MANIFEST = Manifest(
    run="large",
    lineage=1,
    batch=1,
    version=1,
    sampler="plan",
    groups=(Group(prompt="a", seeds=(0,)),),
    minibatches=((0,),),
)


@dataclass
class Watched:
    """A process's ticking thread, and its phases with their longest gap between two ticks."""

    beat: Any
    phases: list[dict[str, Any]] = field(default_factory=list)
    _longest: float = 0.0

    def start(self) -> None:
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            self._longest = max(self._longest, now - last)
            self.beat.value = last = now

    @contextmanager
    def phase(self, name: str, gigabytes: float) -> Iterator[None]:
        self._longest = 0.0
        begun = time.monotonic()
        yield
        seconds = time.monotonic() - begun
        time.sleep(3 * TICK_SECONDS)  # the tick after a gap tells of the gap
        silence_ms = round(1000 * (self._longest - TICK_SECONDS), 1)
        self.phases.append({"step": name, "gb": round(gigabytes, 2), "seconds": seconds, "gil_silence_ms": silence_ms})


def resident_bytes(name: str) -> int:
    """Return VmRSS or VmHWM (the largest VmRSS) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")


def forget_peak() -> None:
    """Begin VmHWM anew at the present size."""
    Path("/proc/self/clear_refs").write_text("5")


class Weights(nn.Module):
    """A float32 model of so many bytes, in tensors of at most 200 MB."""

    def __init__(self, size: int) -> None:
        super().__init__()
        generator, left, tensors = torch.Generator().manual_seed(0), size // 4, []
        while left:
            numbers = min(left, TENSOR_NUMBERS)
            tensors.append(nn.Parameter(torch.empty(numbers).uniform_(-1, 1, generator=generator)))
            left -= numbers
        self.tensors = nn.ParameterList(tensors)


def run_coordinator(folder: Path, beat: Any, pipe: Connection) -> None:
    import asyncio

    Watched(beat).start()
    clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
    coordinator = open_coordinator(folder / "coordinator", clock=clock, runtime=RuntimeConfig())
    listener = bind("127.0.0.1", 0)
    pipe.send(listener.getsockname()[1])
    asyncio.run(CoordinatorServer(Front(coordinator), Rights(TOKEN)).serve(listener))


def run_trainer(folder: Path, beat: Any, pipe: Connection, weight_bytes: int) -> None:
    """Publish, checkpoint and restore."""
    torch.set_num_threads(1)
    watched, before = Watched(beat), resident_bytes("VmRSS")
    watched.start()
    module = Weights(weight_bytes)
    adapter = cast(Any, SimpleNamespace(transformer=module))
    model = TrainedModel(adapter, AlgorithmConfig(), None, Outbox(folder / "outbox", print))
    for parameter in model.parameters.values():  # the moments, as AdamW makes them
        state = {"step": torch.tensor(1.0), "exp_avg": parameter.detach() * 0.1, "exp_avg_sq": parameter.detach() ** 2}
        model.trainer.optimizer.state[parameter] = state
    state_gb = COPIES * weight_bytes / 1e9
    store = CheckpointStore(f"file://{folder}/store")
    transport = HttpTransport("127.0.0.1", pipe.recv(), role_token(TOKEN, "trainer"), patience_seconds=60.0)
    coordinator = CoordinatorClient(transport, "trainer", 1, Usage(ScaledClock(origin_ms=0)))
    coordinator.begin_lineage(1)
    forget_peak()
    with watched.phase("publish", weight_bytes / 1e9):
        file = model.rollout_weights()
        digest = coordinator.publish(V1, file)
    checkpoint = Checkpoint(
        iteration=1,
        lineage=1,
        next_batch=MANIFEST,
        files={},
        evaluations=(),
        std=None,
        skipped_in_a_row=0,
        config_digest="x",
        exploration={},
    )
    with watched.phase("checkpoint", state_gb):
        digests = store.write_files(checkpoint.name, model.files(file))
        store.save(checkpoint, keep=1, digests=digests)
    with watched.phase("restore", state_gb):
        found = store.newest()
        assert found is not None
        model.restore(found.files, found.iteration)
    peak = resident_bytes("VmHWM") - before
    pipe.send(digest)
    for version in range(2, VERSIONS + 1):
        pipe.recv()
        with torch.no_grad():
            for parameter in model.parameters.values():
                parameter.neg_()
                parameter[0] = version
        with watched.phase("publish again", weight_bytes / 1e9):
            file = model.rollout_weights()
            digest = coordinator.publish(WeightsKey(version=version), file)
        pipe.send(digest)
    pipe.send({"phases": watched.phases, "peak_over_state": peak / (COPIES * weight_bytes)})
    pipe.recv()


def fetch_name(version: int) -> str:
    return f"fetch and check version {version}"


def run_node(folder: Path, beat: Any, pipe: Connection, weight_bytes: int) -> None:
    """Fetch each version into a file on disk, and load the last into a model."""
    torch.set_num_threads(1)
    node_weights.MEMORY_ROOM = float("inf")  # files on disk: memory for all copies is not everywhere
    watched, before = Watched(beat), resident_bytes("VmRSS")
    watched.start()
    module = Weights(weight_bytes)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    memory, port = NodeMemory.make(folder), pipe.recv()
    source = NodeWeights(memory, Download("127.0.0.1", port, role_token(TOKEN, "rollout"), patience_seconds=60.0))
    forget_peak()
    pipe.send("ready")
    for version in range(1, VERSIONS + 1):
        key, digest = WeightsKey(version=version), pipe.recv()
        with watched.phase(fetch_name(version), weight_bytes / 1e9), source.get(key, digest) as stored:
            assert stored is not None
        if version < VERSIONS:
            pipe.send("fetched")
    with watched.phase("load", weight_bytes / 1e9), source.get(key, digest) as stored:
        assert stored is not None
        set_weights(dict(module.named_parameters()), stored)
    peak = (resident_bytes("VmHWM") - before) / weight_bytes
    same = sum(float(one.detach().double().sum()) for one in module.parameters())
    pipe.send({"phases": watched.phases, "peak_over_state": peak, "sum": same})
    pipe.recv()


class Bench:
    """The processes, and the judge of their lives."""

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("fork")  # before any thread begins: one import for all
        self._folder = folder
        self._live: list[tuple[Any, Any, Stillness]] = []
        self.false_freezes = 0
        self._ended = threading.Event()

    def start(self, name: str, target: Callable[..., None], *arguments: Any) -> Connection:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        mine, its = self._context.Pipe()
        beat = self._context.Value("d", 0.0, lock=False)
        process = self._context.Process(target=target, args=(folder, beat, its, *arguments), daemon=True)
        process.start()
        self._live.append((process, beat, Stillness()))
        return mine

    def watch(self) -> None:
        """Judge every process five times a second, as an agent does."""
        while not self._ended.wait(0.2):
            for process, beat, stillness in self._live:
                if beat.value and process.is_alive() and stillness.is_frozen(process.pid, beat.value):
                    self.false_freezes += 1

    def end(self) -> None:
        self._ended.set()
        for process, _, _ in self._live:
            process.kill()
            process.join()


def received(pipe: Connection, seconds: float = 600.0) -> Any:
    """Return what the process at the other end sends. Raises EOFError if it ended, TimeoutError if it is late."""
    if not pipe.poll(seconds):
        raise TimeoutError(f"no word for {seconds:.0f} s")
    return pipe.recv()


def measure(weight_bytes: int, scratch: Path | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures, and a row for each step of each process."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        bench = Bench(Path(place))
        try:
            coordinator = bench.start("coordinator", run_coordinator)
            nodes = [bench.start(f"node-{number}", run_node, weight_bytes) for number in range(NODES)]
            trainer = bench.start("trainer", run_trainer, weight_bytes)
            threading.Thread(target=bench.watch, daemon=True).start()
            port = received(coordinator)
            for process in (*nodes, trainer):
                process.send(port)
            for node in nodes:
                assert received(node) == "ready"
            for version in range(1, VERSIONS + 1):
                digest = received(trainer)
                for node in nodes:
                    node.send(digest)
                if version < VERSIONS:
                    assert [received(node) for node in nodes] == ["fetched"] * NODES
                    trainer.send("next")
            of_nodes, of_trainer = [received(node) for node in nodes], received(trainer)
        finally:
            bench.end()
    peaks = {"trainer": of_trainer["peak_over_state"]}
    for name, found in [("trainer", of_trainer), *((f"node {i}", one) for i, one in enumerate(of_nodes))]:
        peaks[name] = round(found["peak_over_state"], 3)
        for phase in found["phases"]:
            rate = {"gb_per_s": round(phase["gb"] / phase["seconds"], 2)}
            rows.append({"process": name, **phase, "seconds": round(phase["seconds"], 2), **rate})

    def rate_of(version: int) -> float:
        slowest = max(float(row["seconds"]) for row in rows if row["step"] == fetch_name(version))
        return round(NODES * weight_bytes / 1e9 / slowest, 2)

    return {
        "state_gb": round(COPIES * weight_bytes / 1e9, 2),
        "weights_gb": round(weight_bytes / 1e9, 2),
        "gil_silence_ms": max(row["gil_silence_ms"] for row in rows if row["process"] == "trainer"),
        "gil_silence_ms_nodes": max(row["gil_silence_ms"] for row in rows if row["process"] != "trainer"),
        "peak_over_state": max(peaks.values()),
        "peaks": peaks,
        "false_freezes": bench.false_freezes,
        "gb_per_s": rate_of(VERSIONS),
        "gb_per_s_first": rate_of(1),
        "same_weights": len({one["sum"] for one in of_nodes}) == 1,
    }, rows


TEXT = """
`gil_silence_ms` is the longest gap between two ticks of a 10 ms thread, less the 10 ms: on a loaded machine it also
contains waits for a core. `gb_per_s` is what both nodes received and checked together (SHA-256), over the time of the
slower one; all processes share the cores. The first fetches of a node write into new files, and the system must find
and clear memory for them (`gb_per_s_first`); the last writes into the file of the first, as all later ones of a run do.

## What it changed

Before, each publish and each checkpoint made one bytes object of a state with Python's lock held, and the agent took
the trainer for frozen. Now a state is written tensor by tensor, hashed on the way, and taken over by path.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="also write the page and the JSON file")
    parser.add_argument("--state-gb", type=float, default=3.0, help="GB of the trainer's state")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to use; default: the system's")
    options = parser.parse_args(arguments)
    load1 = load_now()
    weight_bytes = int(options.state_gb * 1e9 / COPIES) // 4 * 4
    result, rows = measure(weight_bytes, options.scratch)
    missed = [
        text
        for text, holds in (
            (
                f"gil_silence_ms {result['gil_silence_ms']} > {MOST_SILENCE_MS}",
                result["gil_silence_ms"] <= MOST_SILENCE_MS,
            ),
            (f"peak_over_state {result['peak_over_state']} > {MOST_PEAK}", result["peak_over_state"] <= MOST_PEAK),
            (f"false_freezes {result['false_freezes']} > 0", result["false_freezes"] == 0),
            (f"gb_per_s {result['gb_per_s']} < {LEAST_GB_PER_S}", result["gb_per_s"] >= LEAST_GB_PER_S),
        )
        if not holds
    ]
    result["missed"] = missed
    if not options.json:
        for row in rows:
            print(row)
        print(result)
        return
    verdict = "All targets are met." if not missed else "Missed: " + "; ".join(missed) + "."
    load = f"The machine's load was {load1:.1f} on {os.cpu_count()} cores before the start, by other work."
    publish(
        "large_weights",
        question="do large weights move without stopping their processes?",
        command="python -m tests.benchmarks.large_weights --json",
        result=result,
        runs=1,
        seeds=[0],
        load1=load1,
        rows=rows,
        text=f"{verdict} {load}\n" + TEXT,
    )


if __name__ == "__main__":
    main()
