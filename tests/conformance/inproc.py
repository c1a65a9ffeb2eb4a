"""The stage `inproc`: every process is a thread that can be killed or frozen at each call and poll."""

import copy
import errno
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.coordinator.coordinator import Coordinator
from engine.coordinator.open import open_coordinator
from engine.events import Capacity
from engine.models.load import load_adapter, trainable
from engine.node_spec import ClockConfig
from engine.protocol.codec import Blobs, decode_answer, decode_call, encode, pack, unpack
from engine.protocol.messages import has_news
from engine.protocol.request import Work
from engine.rewards.load import load_reward
from engine.worker.transport import Answer, InprocTransport, Transport
from engine.worker.worker import Worker
from tests.conformance.stage import WORKDIR, BadLine, Step, engine_config
from tests.conformance.unreliable import Unreliable

LOOK_SECONDS = 0.01
PATIENT_SECONDS = 0.2
FROZEN_SECONDS = 1.5
"""Seconds after which a frozen worker is replaced."""
RESTART_SECONDS = 0.2
"""Seconds until a killed coordinator is restarted."""


class Killed(BaseException):
    """The simulated death of a thread."""


class _Life:
    """The signals of a simulated process."""

    def __init__(self) -> None:
        self.killed = False
        self._runs = threading.Event()
        self._runs.set()
        self.frozen_at: float | None = None

    def go_on(self) -> None:
        """Block while frozen, and raise Killed once killed. Called wherever a signal can act."""
        if self.killed:
            raise Killed
        self._runs.wait()
        if self.killed:
            raise Killed

    def freeze(self) -> None:
        self.frozen_at = time.monotonic()
        self._runs.clear()

    def thaw(self) -> None:
        self.frozen_at = None
        self._runs.set()

    def kill(self) -> None:
        self.killed = True
        self._runs.set()


class _Line(InprocTransport):
    """Calls the current coordinator, one caller at a time; waits during its restart."""

    def __init__(self, stage: "InprocStage", life: _Life) -> None:
        self._stage, self._life = stage, life

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        until = time.monotonic() + (PATIENT_SECONDS if wait else 0.0)
        while True:
            self._life.go_on()
            answer = super().call(head, blobs)
            self._life.go_on()  # the coordinator may die after the call and before the answer
            if has_news(decode_answer(answer[0])) or time.monotonic() > until:
                return answer
            time.sleep(LOOK_SECONDS)

    def _ask(self, head: Mapping[str, Any], blobs: Blobs | None) -> Answer:
        while True:
            with self._stage.lock:
                coordinator = self._stage.coordinator
                if coordinator is not None:
                    sent, sent_blobs = unpack(pack(head, blobs))
                    before = coordinator.journal.position()
                    answer, answer_blobs = coordinator.handle(decode_call(sent), sent_blobs)
                    if coordinator.journal.position() != before:
                        coordinator.journal.sync()
                    return unpack(pack(encode(answer), answer_blobs))
            self._life.go_on()
            time.sleep(LOOK_SECONDS)


@dataclass
class _Node:
    name: str
    agent: _Life = field(default_factory=_Life)
    life: _Life | None = None
    thread: threading.Thread | None = None
    noticed_ms: int | None = None
    is_reported: bool = False
    """Whether the coordinator knows of the notice."""


class _FullFile:
    """A journal's file on a full disk: half of each write arrives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def write(self, data: Any) -> int:
        if len(data) > 1:
            return int(self.inner.write(data[: len(data) // 2]))
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class InprocStage:
    """See `Stage`. The minder thread is the agent of every node: it restarts workers and receives notices."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = engine_config("inproc")
        self.given_up_seconds = 2 * self.config.runtime.lease_seconds
        self.clock = ClockConfig(origin_ms=time.time_ns() // 1_000_000).clock()
        self.lock = threading.RLock()
        self.coordinator: Coordinator | None = self._open()
        self._adapter = load_adapter(self.config.model)
        self._nodes: dict[str, _Node] = {}
        self._steps: list[Step] = []
        self._frozen = False
        self._trouble: str | None = None
        self._over = False
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._tick, self._mind)]
        for thread in self._threads:
            thread.start()

    def _open(self) -> Coordinator:
        return open_coordinator(self.journal(), clock=self.clock, runtime=self.config.runtime)

    def line(self) -> Transport:
        return _Line(self, _Life())

    @contextmanager
    def bad_line(self) -> Iterator[BadLine]:
        line = Unreliable(self.line(), seed=0)
        yield BadLine(line, lambda: line.faults)

    # --- nodes --------------------------------------------------------------------------------------------

    def start(self, node: str) -> None:
        self._nodes[node] = _Node(node)

    def is_ready(self, node: str) -> bool:
        return self._nodes[node].thread is not None

    def has_ended(self, node: str) -> bool:
        thread = self._nodes[node].thread
        return thread is not None and not thread.is_alive()

    def forget(self, node: str) -> None:
        gone = self._nodes.pop(node)
        self._kill_node(gone)
        if gone.thread is not None:
            gone.thread.join()

    def kill(self, victim: str) -> None:
        if victim == "coordinator":
            with self.lock:
                assert self.coordinator is not None
                self.coordinator.journal.close()
                self.coordinator = None
            threading.Timer(RESTART_SECONDS, self._restart).start()
            return
        node, part = self._find(victim)
        if part == "worker-0":
            assert node.life is not None
            node.life.kill()
        else:  # a worker ends with its agent
            self._kill_node(node)

    def freeze(self, victim: str) -> None:
        if victim == "coordinator":
            self.lock.acquire()
            self._frozen = True
            return
        node, part = self._find(victim)
        if part in ("", "agent"):
            node.agent.freeze()
        if part in ("", "worker-0"):
            assert node.life is not None
            node.life.freeze()

    def thaw(self, victim: str) -> None:
        if victim == "coordinator":
            self._frozen = False
            self.lock.release()
            return
        node, part = self._find(victim)
        if part in ("", "agent"):
            node.agent.thaw()
        if part in ("", "worker-0"):
            assert node.life is not None
            node.life.thaw()

    def notice(self, node: str, seconds: float) -> None:
        self._nodes[node].noticed_ms = self.clock.now_ms() + round(seconds * 1000)

    def send_capacity(self, snapshot: Capacity) -> None:
        with self.lock:
            assert self.coordinator is not None
            self.coordinator.set_capacity(snapshot)

    # --- the disk -------------------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        with self.lock:
            assert self.coordinator is not None
            self.coordinator.journal._file = _FullFile(self.coordinator.journal._file)

    def free_disk(self) -> None:
        with self.lock:
            assert self.coordinator is not None
            self.coordinator.journal._file = self.coordinator.journal._file.inner

    def trouble(self) -> str | None:
        try:
            with self.lock:
                assert self.coordinator is not None
                self.coordinator.journal.append({"op": "hello", "lineage": self.coordinator.lineage})
        except OSError as error:
            return str(error)
        return None

    # --- observing ------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        return sorted(self._steps, key=lambda step: step.at_ns)

    def journal(self) -> Path:
        return self.folder / "coordinator"

    def check(self) -> None:
        with self.lock:
            assert self.coordinator is not None
            self.coordinator.queue.check()

    def close(self) -> None:
        if self._frozen:
            self.thaw("coordinator")
        for node in list(self._nodes):
            self.forget(node)
        self._over = True
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- threads ----------------------------------------------------------------------------------------------

    def _find(self, victim: str) -> tuple[_Node, str]:
        node, _, part = victim.partition("/")
        return self._nodes[node], part

    def _kill_node(self, node: _Node) -> None:
        node.agent.kill()
        if node.life is not None:
            node.life.kill()

    def _restart(self) -> None:
        with self.lock:
            self.coordinator = self._open()

    def _tick(self) -> None:
        while not self._over:
            with self.lock:
                if self.coordinator is not None:
                    self.coordinator.tick()
            time.sleep(LOOK_SECONDS)

    def _mind(self) -> None:
        while not self._over:
            for node in list(self._nodes.values()):
                if not node.agent.killed and node.agent.frozen_at is None:
                    self._mind_node(node)
            time.sleep(LOOK_SECONDS)

    def _mind_node(self, node: _Node) -> None:
        frozen_at = node.life.frozen_at if node.life is not None else None
        if node.life is not None and frozen_at is not None and time.monotonic() - frozen_at > FROZEN_SECONDS:
            node.life.kill()
        if node.noticed_ms is not None and not node.is_reported:
            node.is_reported = True
            self.line().call({"call": "notice", "node": node.name, "deadline_ms": node.noticed_ms})
        if node.thread is None or not node.thread.is_alive():
            node.life = _Life()
            node.thread = threading.Thread(target=self._work, args=(node, node.life), daemon=True)
            node.thread.start()

    def _work(self, node: _Node, life: _Life) -> None:
        torch.set_num_threads(1)
        adapter = copy.deepcopy(self._adapter)

        def draining() -> bool:
            life.go_on()
            # The agent receives the notice.
            return node.noticed_ms is not None and node.agent.frozen_at is None

        def trace(work: Work, step: int) -> None:
            life.go_on()
            requests = [attempt.request for attempt in work.attempts]
            self._steps.append(
                Step(
                    at_ns=time.time_ns(),
                    node=node.name,
                    lease=work.lease,
                    step=step,
                    batch=requests[0].batch,
                    seeds=tuple(request.seed for request in requests),
                )
            )

        worker = Worker(
            name=f"{node.name}/0",
            node=node.name,
            workers_of_node=1,
            transport=_Line(self, life),
            adapter=adapter,
            parameters=trainable(adapter),
            reward=load_reward(self.config.reward, str(WORKDIR)),
            clock=self.clock,
            heartbeat_seconds=self.config.runtime.heartbeat_seconds,
            step_seconds=self.config.runtime.step_seconds,
            draining=draining,
            trace=trace,
        )
        try:
            worker.serve()
            node.agent.kill()  # it got an exit order, so it is not restarted
        except Killed:
            if not self._over:
                # The kernel closes a dead process's connection, and the coordinator's front reports the death.
                died = {"call": "died", "worker": worker.name, "node": node.name, "boot": worker.boot, "reason": "-"}
                self.line().call(died)
