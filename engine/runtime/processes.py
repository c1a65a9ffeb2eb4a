"""What the processes of a node do: coordinator and trainer on the on-demand node, workers on a spot node.

Importing this module loads torch, diffusers and the recogniser: the node agent's forkserver does that once, and every
process that it forks starts in a twentieth of a second instead of five.
A process whose agent is gone ends itself: a node lives and dies as one.
"""

import asyncio
import multiprocessing
import multiprocessing.process
import os
import socket
import sys
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Protocol

import torch

import engine.rewards.ocr  # noqa: F401  preloaded
from engine.config import NodeSpec
from engine.loop import Loop, Place
from engine.models.load import load_adapter, trainable
from engine.prompts import prompt_source
from engine.rewards.load import load_reward
from engine.runtime.coordinator import Coordinator
from engine.runtime.progress import ProgressLog
from engine.runtime.server import CoordinatorServer
from engine.runtime.transport import HttpTransport
from engine.runtime.worker import Worker
from engine.training.checkpoint import CheckpointStore
from engine.training.metrics import MetricsLog


class Beat(Protocol):
    """A shared number: the monotonic time at which a process was last seen running."""

    value: float


PATIENCE_SECONDS = 60.0
"""How long worker and trainer go on asking a coordinator that does not answer (wall time)."""

BEAT_SECONDS = 0.2
"""How often a process shows its agent that it is not frozen."""

BIND_SECONDS = 20.0
"""How long a coordinator waits for its port: the one before it may still be ending."""


def run_coordinator(spec: NodeSpec, beat: Beat, ready: Event) -> None:
    """Serve until the agent ends this process."""
    _begin(spec, "coordinator", beat)
    folder = Path(spec.folder)
    clock = spec.clock.clock()
    coordinator = Coordinator(
        folder / "coordinator",
        clock=clock,
        lease_ms=round(spec.engine.runtime.lease_seconds / clock.wall_seconds(1)),
        progress=ProgressLog(
            folder / "progress" / "coordinator.jsonl", run=spec.run, source="coordinator", clock=clock
        ),
    )
    listener = _bind(spec.coordinator_host, spec.coordinator_port)
    ready.set()
    asyncio.run(CoordinatorServer(coordinator, spec.token).serve(listener))


def run_trainer(spec: NodeSpec, beat: Beat, ready: Event) -> None:
    """Train until there is nothing left to do; a return means that the engine is finished."""
    _begin(spec, "trainer", beat)
    alone = spec.engine.exploration.mode == "none"
    torch.set_num_threads(spec.engine.runtime.trainer_threads or (os.cpu_count() or 1 if alone else 1))
    folder, clock = Path(spec.folder), spec.clock.clock()
    place = Place(
        run=spec.run,
        node=spec.node,
        workers_of_node=spec.workers,
        store=CheckpointStore(spec.store),
        transport=_transport(spec),
        progress=ProgressLog(folder / "progress" / "trainer.jsonl", run=spec.run, source="trainer", clock=clock),
        metrics=MetricsLog(folder / "metrics"),
        clock=clock,
    )
    adapter = load_adapter(spec.engine.model)
    reward = load_reward(spec.engine.reward, spec.workdir)
    loop = Loop(spec.engine, place, adapter, reward, prompt_source(spec.engine, spec.workdir))
    ready.set()
    print(loop.run(), flush=True)


def run_worker(spec: NodeSpec, beat: Beat, number: int, drain: Event, ready: Event) -> None:
    """Roll out and explore until told to exit."""
    _begin(spec, f"worker-{number}", beat)
    torch.set_num_threads(1)
    adapter = load_adapter(spec.engine.model)
    worker = Worker(
        name=f"{spec.node}/{number}",
        node=spec.node,
        workers_of_node=spec.workers,
        transport=_transport(spec),
        adapter=adapter,
        parameters=trainable(adapter),
        reward=load_reward(spec.engine.reward, spec.workdir),
        clock=spec.clock.clock(),
        heartbeat_seconds=spec.engine.runtime.heartbeat_seconds,
        draining=drain.is_set,
    )
    ready.set()
    print("exit:", worker.serve(), flush=True)


def _begin(spec: NodeSpec, name: str, beat: Beat) -> None:
    log = os.open(Path(spec.folder) / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    print(
        f"--- {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {name} of {spec.node}, pid {os.getpid()}", flush=True
    )
    threading.Thread(target=_beat, args=(beat,), daemon=True).start()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _beat(beat: Beat) -> None:
    while True:
        beat.value = time.monotonic()
        time.sleep(BEAT_SECONDS)


def _follow(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _transport(spec: NodeSpec) -> HttpTransport:
    return HttpTransport(spec.coordinator_host, spec.coordinator_port, spec.token, patience_seconds=PATIENCE_SECONDS)


def _bind(host: str, port: int) -> socket.socket:
    until = time.monotonic() + BIND_SECONDS
    while True:
        # With the protocol named asyncio turns Nagle's algorithm off; without it every answer takes 40 ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            return listener
        except OSError:
            listener.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
