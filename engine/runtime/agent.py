"""The node agent: `python -m engine.runtime.agent node.json` is what a node runs, and all that it runs.

It starts the node's processes from a preloaded forkserver, starts them again when they die, hears the cloud's notice
before anyone else and raises drain locally, and owns the memory where the node keeps its one copy of the weights. On
the on-demand node the processes are coordinator and trainer; on a spot node the workers. It holds a lock on its
folder, so that one node is one agent however often it was asked for, and it ends the node at the money deadline even
if nobody is left to ask for that.
"""

import contextlib
import fcntl
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine.config import NodeSpec
from engine.rollout.wire import pack
from engine.runtime.child import CALM_SECONDS, MOST_DEATHS
from engine.runtime.disk import log_to
from engine.runtime.node_store import forget_store, may_share
from engine.runtime.node_weights import NodeMemory
from engine.runtime.ray_environment import ray_environment

MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=536870912:glibc.malloc.mmap_threshold=268435456"
"""For the node's processes: memory in huge pages, and kept when it is freed. A training step allocates and frees the
same tens of megabytes each time; not faulting them in anew saves about 7 % of it (10 runs against 10)."""

LOOK_SECONDS = 0.05
"""Between two looks at what only files say; a death wakes the agent at once."""
FROZEN_SECONDS = 5.0
"""A process that shows no sign of life for this long is killed and started again."""
NOTICE_AGAIN_SECONDS = 0.5
"""A coordinator that did not hear of a notice is told again after so long."""
LAST_WORDS_SECONDS = 3.0
"""How long the coordinator answers after the trainer is done, so that workers hear that it is over."""

EXIT_FINISHED, EXIT_BROKEN, EXIT_MONEY = 0, 1, 7


@dataclass
class _Child:
    """One process of the node, and how often it died lately."""

    name: str
    start: Callable[[], Any]
    beat: Any
    process: Any = None
    started: float = 0.0
    deaths: int = 0
    done: bool = False

    def keep_alive(self) -> bool:
        """Start it if it is not running; False when it died too often. Exit code 0 means it is done."""
        now = time.monotonic()
        if self.done:
            return True
        if self.process is not None and self.process.is_alive():
            if self.beat.value and now - self.beat.value > FROZEN_SECONDS:
                print(f"{self.name} is frozen: killed", flush=True)
                self.process.kill()
                self.process.join()
            else:
                return True
        if self.process is not None:
            if self.process.exitcode == 0:
                self.done = True
                return True
            self.deaths = 1 if now - self.started > CALM_SECONDS else self.deaths + 1
            print(f"{self.name} ended with {self.process.exitcode}, death {self.deaths}", flush=True)
            if self.deaths >= MOST_DEATHS:
                return False
            self.process = None
            # A first death is bad luck and costs no time; who dies again and again is given pauses.
            self.started = now + (0.1 * 2**self.deaths if self.deaths > 1 else 0.0)
        if now >= self.started:
            self.beat.value = 0.0
            self.process = self.start()
            self.started = now
        return True


@dataclass
class Agent:
    """One node's life, from the lock to the last process."""

    spec: NodeSpec
    children: list[_Child] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = Path(self.spec.folder)
        self.context = multiprocessing.get_context("forkserver")
        os.environ.setdefault("GLIBC_TUNABLES", MALLOC)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # that a follower waited in vain is no warning
        self.ray = self.spec.engine.runtime.name == "ray"
        if self.ray:
            os.environ.update(ray_environment(self.spec))
        # Where Ray starts the workers, nothing here needs torch: the raylet keeps processes ready that have it.
        needs_torch = not self.ray or self.spec.role == "trainer"
        self.context.set_forkserver_preload(["engine.runtime.processes"] if needs_torch else [])
        self.drain = self.context.Event()
        self.memory = NodeMemory.make()
        self.noticed_ms: int | None = None

    def run(self) -> int:
        """Returns the exit code."""
        ready = self._prepare()
        told_ready = False
        looked = time.monotonic()
        while True:
            if time.monotonic() - looked > FROZEN_SECONDS / 2:
                # It was the agent that stood still, perhaps with the whole node: let the others show themselves.
                time.sleep(1.0)
            looked = time.monotonic()
            if not all(child.keep_alive() for child in self.children):
                return EXIT_BROKEN
            if not told_ready and all(event.is_set() for event in ready):
                with contextlib.suppress(OSError):  # a full disk: at the next look
                    self.write("ready.json", {"at_ms": self.spec.clock.clock().now_ms()})
                    told_ready = True
            self._hear_notice()
            if self._is_finished():
                if self.spec.role == "trainer":
                    time.sleep(LAST_WORDS_SECONDS)
                return EXIT_FINISHED
            deadline = self._money_deadline()
            if deadline is not None and self.spec.clock.clock().now_ms() >= deadline:
                print("the money deadline has come: this node ends itself", flush=True)
                return EXIT_MONEY
            running = [child.process for child in self.children if child.process is not None and not child.done]
            wait_for([process.sentinel for process in running], LOOK_SECONDS)

    def stop(self) -> None:
        """End every process of the node that is ours."""
        for child in self.children:
            if child.process is not None and child.process.is_alive():
                child.process.kill()

    def _prepare(self) -> list[Any]:
        if self.ray and self.spec.role == "trainer":
            return [self._child("run_ray_head"), self._child("run_ray_supervisor"), self._child("run_trainer")]
        if self.spec.role == "trainer":
            return [self._child("run_coordinator"), self._child("run_trainer")]
        forget_store(self.spec)
        store = [self._child("run_store")] if may_share(self.spec) else []
        if self.ray:
            return [*store, self._child("run_raylet")]
        workers = range(self.spec.workers)
        return store + [self._child("run_worker", number, self.drain, self.memory) for number in workers]

    def _child(self, name: str, *arguments: Any) -> Any:
        """Plan one process; returns the event that it sets when it is ready."""
        ready, beat = self.context.Event(), self.context.Value("d", 0.0, lock=False)
        spec_json = self.spec.model_dump_json()

        def start() -> Any:
            process = self.context.Process(target=_run, args=(name, spec_json, beat, *arguments, ready))
            process.start()
            return process

        self.children.append(_Child(name=name, start=start, beat=beat))
        return ready

    def _is_finished(self) -> bool:
        """The trainer's end is its node's; a spot node ends with the last of its workers, and its store with it."""
        if self.spec.role == "trainer":
            return self.children[-1].done
        return all(child.done for child in self.children if child.name != "run_store")

    def _money_deadline(self) -> int | None:
        """When the money is used up: what the node was told at its start, or by its controller since."""
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads((self.folder / "money.json").read_text())["deadline_ms"])
        return self.spec.money_deadline_ms

    def _hear_notice(self) -> None:
        """The cloud takes this node back: tell the workers at once, and the coordinator as soon as it listens."""
        deadline_ms = None
        with contextlib.suppress(OSError, ValueError):
            deadline_ms = int(json.loads((self.folder / "notice.json").read_text())["deadline_ms"])
        if deadline_ms is None or deadline_ms == self.noticed_ms:
            return
        self.noticed_ms = deadline_ms
        self.drain.set()
        print(f"notice: this node will be gone at {deadline_ms}", flush=True)
        threading.Thread(target=self._tell_notice, args=(deadline_ms,), daemon=True).start()

    def _tell_notice(self, deadline_ms: int) -> None:
        call = pack({"call": "notice", "node": self.spec.node, "deadline_ms": deadline_ms})
        url = f"http://{self.spec.coordinator_host}:{self.spec.coordinator_port}/call"
        headers = {"Authorization": f"Bearer {self.spec.token}"}
        while self.noticed_ms == deadline_ms:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(url, content=call, headers=headers, timeout=1.0, trust_env=False).raise_for_status()
                return
            time.sleep(NOTICE_AGAIN_SECONDS)

    def write(self, name: str, content: dict[str, Any]) -> None:
        fresh = self.folder / f"{name}.new"
        fresh.write_text(json.dumps(content))
        fresh.replace(self.folder / name)


def _run(name: str, spec_json: str, *arguments: Any) -> None:
    # Imported in the forkserver and its children only: the agent itself stays small and never loads torch.
    module = "node_store" if name == "run_store" else "ray_processes" if name.startswith("run_ray") else "processes"
    getattr(importlib.import_module(f"engine.runtime.{module}"), name)(
        NodeSpec.model_validate_json(spec_json), *arguments
    )


def main() -> int:
    """Run the node that the file named on the command line describes."""
    spec = NodeSpec.model_validate_json(Path(sys.argv[1]).read_text())
    folder = Path(spec.folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lock = (folder / "agent.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{spec.node} runs already; nothing to do", flush=True)
        return EXIT_FINISHED
    log_to(sys.stdout.fileno())
    agent = Agent(spec)
    agent.write("agent.json", {"pid": os.getpid(), "create_time": psutil.Process().create_time()})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_BROKEN))
    try:
        return agent.run()
    finally:
        agent.stop()


if __name__ == "__main__":
    sys.exit(main())
