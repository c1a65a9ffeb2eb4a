"""Run one node's processes. The node agent, `python -m engine.node.agent node.json`, is the node's only entry point.

The agent starts the node's processes from a preloaded forkserver, or forks the processes directly if starter.py forked
the agent. The agent restarts dead processes, receives the cloud's preemption notice first, orders the node's workers to
drain, and owns the memory with the node's single copy of the weights. The processes are coordinator and trainer on the
on-demand node, only ranks of the trainer on its further nodes, and the workers on a spot node. A lock on the node's
folder ensures one agent per node, however often the node was requested. The agent terminates the node at the spend
deadline, even if no controller is left.

On a cloud's instance (`NodeSpec.cloud`), the node is the whole instance. There the agent reads the metadata service
(preemption_notice.py), counts its money on the boot clock and terminates the instance itself (spend_guard.py,
self_termination.py). The agent ships the logs (ship.py), and refuses an instance with a setup different from the
controller's. The agent outlives the connection that started the agent. On every exit, the agent leaves no process
behind except the guard, and writes the reason to `exit.json`. The guard terminates the instance at the spend deadline,
or when neither a controller nor a coordinator is left (alone.py).
"""

import contextlib
import fcntl
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine.durable import write_durably
from engine.events import Market
from engine.mark import MARK, marked
from engine.node.alone import LAST_ANSWER, limit_seconds, start_ticks, touch
from engine.node.child import EXIT_SUPERSEDED, EXIT_TORN, EXIT_UNANSWERED, Deaths, exit_in_words, last_line, progress_of
from engine.node.environment import begin_sending
from engine.node.frozen import FROZEN_SECONDS, Stillness
from engine.node.hardware import hardware
from engine.node.local_disk import use_local_disk
from engine.node.node_store import forget_store, may_share
from engine.node.preemption_notice import watch_notice
from engine.node.ray_environment import ray_environment
from engine.node.self_check import unfit
from engine.node.self_termination import terminate_instance
from engine.node.spend_guard import Guard, TimeLeft, boot_id
from engine.node.starter import ENVIRONMENT
from engine.node.trainer_nodes import meeting_file
from engine.node_spec import EXIT_FINISHED, EXIT_MONEY, EXIT_UNFIT, NodeSpec
from engine.protocol.codec import encode, pack
from engine.protocol.messages import Notice
from engine.storage.disk import log_to
from engine.storage.ship import begin_shipping
from engine.worker.node_weights import NodeMemory

LOOK_SECONDS = 0.05
"""Seconds between two looks at files. A process's death wakes the agent at once."""
NOTICE_AGAIN_SECONDS = 0.5
"""Seconds after which a notice is sent again that the coordinator has not acknowledged."""
COORDINATOR_SECONDS = 10.0
"""Longest time between two questions to the coordinator, whose answers say that the run goes on (alone.py)."""
LAST_WORDS_SECONDS = 3.0
"""Seconds the coordinator still answers after the trainer is done, so the workers learn of the end."""

ENDING_SECONDS = 2.0
"""Maximum seconds a stopping agent waits for killed processes."""

TRAINER = "trainer"
"""Name of the process that runs the training loop. The node's work is done when this process is done."""

MEETING = "meeting"
"""Name of the same process of a trainer's further node: it copies the meeting of the ranks."""

EXIT_BROKEN, EXIT_REFUSED = 1, 9


@dataclass
class _Child:
    """A process of the node, with its exits since the node last made progress."""

    name: str
    start: Callable[[], Any]
    heartbeat: Any
    past: Deaths
    serves: bool = False
    """The process serves the node's workers, and never ends by itself."""
    stillness: Stillness = field(default_factory=Stillness)
    process: Any = None
    started: float = 0.0
    done: bool = False

    def keep_alive(self, *, leaving: bool = False) -> str | None:
        """Start the process if the process is not running. Exit code 0 means done.

        Returns the reason why another start would be useless, or None. `leaving`: the node is being preempted, and
        deaths are not counted.
        """
        now, frozen = time.monotonic(), False
        if self.done:
            return None
        if self.process is not None and self.process.is_alive():
            if self.heartbeat.value and self.stillness.is_frozen(self.process.pid, self.heartbeat.value):
                print(f"{self.name} is frozen: killed", flush=True)
                self.process.kill()
                self.process.join()
                frozen = True
            else:
                return None
        if self.process is not None:
            if self.process.exitcode == 0:
                self.done = True
                return None
            if self.process.exitcode == EXIT_SUPERSEDED:
                return f"{self.name} has ended, because another node is the trainer's now"
            if self.process.exitcode == EXIT_TORN:
                self.past.add_torn()
            elif not leaving and self.process.exitcode != EXIT_UNANSWERED:
                self.past.add("a freeze" if frozen else exit_in_words(self.process.exitcode))
            deaths = len(self.past.exits) + self.past.torn // 2
            print(f"{self.name} ended with {exit_in_words(self.process.exitcode)}, death {deaths}", flush=True)
            if (why := self.past.give_up()) is not None:
                return f"{self.name} {why}"
            self.process = None
            # Restart at once after a first death. After later deaths the restart waits longer each time.
            self.started = now + (0.1 * 2**deaths if deaths > 1 else 0.0)
        if now >= self.started:
            self.heartbeat.value = 0.0
            self.process = self.start()
            self.started = now
        return None


@dataclass
class Agent:
    """Agent of one node, from the folder's lock to the end of the last process."""

    spec: NodeSpec
    children: list[_Child] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = Path(self.spec.folder)
        self.context: Any = multiprocessing.get_context(
            multiprocessing.get_start_method(allow_none=True) or "forkserver"
        )
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.ray = self.spec.engine.runtime.name == "ray"
        if self.ray:
            os.environ.update(ray_environment(self.spec))
        # With Ray on a rollout node, only scoring processes need torch: the raylet keeps processes ready with torch
        # imported.
        needs_torch = not self.ray or self.spec.role == "trainer" or self.spec.engine.reward.placed == "pool"
        if self.context.get_start_method() == "forkserver":
            self.context.set_forkserver_preload(["engine.entrypoints.processes"] if needs_torch else [])
        os.environ.setdefault(MARK, str(self.folder))
        self.drain = self.context.Event()
        self.memory = NodeMemory.make(self.folder)
        self.noticed_ms: int | None = None
        self.on_cloud = self.spec.cloud != "local"
        self.sending: subprocess.Popen[bytes] | None = None
        self.money, self.guard = TimeLeft(self.folder), Guard(self.folder)

    def run(self) -> tuple[int, str]:
        """Run the node until its end. Returns the exit code and the reason."""
        if (refusal := other_setup(self.spec)) is not None:
            return EXIT_REFUSED, refusal
        if self.spec.cloud != "local" and self.spec.market == Market.SPOT:
            watch_notice(self.spec.cloud, self.folder, self.spec.clock.clock(), self.spec.notice_ms)
        if self.on_cloud and (verdict := unfit(self.spec.engine.runtime.device, self.folder)) is not None:
            return EXIT_UNFIT, verdict
        if self.on_cloud and self.spec.digest:  # only on a machine that our set-up made into a node
            print(use_local_disk(self.folder), flush=True)
        if self.on_cloud:
            # A client loads certificates, under a lock that a process forked meanwhile would keep for ever: not in the
            # thread.
            client = httpx.Client(timeout=5.0, trust_env=False)
            threading.Thread(target=self._watch_coordinator, args=(client,), daemon=True, name="coordinator").start()
        has = hardware()
        ready = self._prepare()
        ready_sent = False
        looked = time.monotonic()
        while True:
            if time.monotonic() - looked > FROZEN_SECONDS / 2:
                # The agent itself was stopped, perhaps with the whole node. Give the processes time to show a sign of
                # life.
                time.sleep(1.0)
            looked = time.monotonic()
            if self.on_cloud:
                self.guard.keep_alive()
            for child in self.children:
                why = child.keep_alive(leaving=self.noticed_ms is not None)
                if why is not None:
                    return EXIT_BROKEN, f"{why}; its log ends: {last_line(self.spec, child.name)}"
            if not ready_sent and all(event.is_set() for event in ready):
                with contextlib.suppress(OSError):  # a full disk: try again at the next look
                    at_ms = self.spec.clock.run_clock().now_ms()
                    ready_as = {"pid": os.getpid(), "role": self.spec.role, "hardware": has}
                    self.write("ready.json", {"at_ms": at_ms, **ready_as})
                    ready_sent = True
                if ready_sent and self.on_cloud:
                    self.sending = begin_sending(self.spec.store)  # now: what the processes imported is compiled
            self._check_notice()
            if self._is_finished():
                if self.spec.role == "trainer":
                    self.spec.clock.hold()
                    time.sleep(LAST_WORDS_SECONDS)
                return EXIT_FINISHED, "finished"
            if self._is_money_spent():
                print("the money deadline has come: this node ends itself", flush=True)
                return EXIT_MONEY, "the money deadline has come"
            running = [child.process for child in self.children if child.process is not None and not child.done]
            wait_for([process.sentinel for process in running], LOOK_SECONDS)

    def stop(self) -> None:
        """Kill every process of the node, Ray's too, in any session and from any parent.

        The guard and multiprocessing's resource tracker stay. The tracker cleans up after the agent and then exits.
        """
        until = time.monotonic() + ENDING_SECONDS
        while descendants := self._descendants():
            for process in descendants:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(descendants, timeout=0.2)
            if time.monotonic() > until:
                print(f"still there: {descendants}", flush=True)
                return

    def _descendants(self) -> list[psutil.Process]:
        own = psutil.Process()
        processes = set(own.children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if marked(process.pid) == str(self.folder):
                    processes.add(process)
        return [process for process in processes - {own, *own.parents()} if self._ends_with_us(process)]

    def _ends_with_us(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.pid == self.guard.pid:
                return False
            return not any("multiprocessing.resource_tracker" in word for word in process.cmdline())
        except psutil.NoSuchProcess:
            return False

    def _prepare(self) -> list[Any]:
        if self.ray and self.spec.role == "trainer":
            return [
                self._child("ray", "run_ray_head"),
                self._child("supervisor", "run_ray_supervisor"),
                *self._scorers(),
                *self._ranks(),
            ]
        if self.spec.role == "trainer":
            return [
                self._child("coordinator", "run_coordinator"),
                *self._scorers(),
                *self._ranks(),
            ]
        if self.spec.role == "ranks":
            meeting_file(self.spec).unlink(missing_ok=True)  # of an earlier agent
            first = self.spec.in_trainer.ranks(self.spec.engine).start
            scorers = self._scorers() if first < self.spec.sampling_ranks else []
            return [self._child(MEETING, "run_meeting"), *scorers, *self._ranks()]
        forget_store(self.spec)
        beside = self._scorers() + ([self._child("store", "run_store")] if may_share(self.spec) else [])
        if self.ray:
            return [*beside, self._child("ray", "run_raylet")]
        workers = range(self.spec.workers)
        return beside + [
            self._child(f"worker-{number}", "run_worker", number, self.drain, self.memory) for number in workers
        ]

    def _scorers(self) -> list[Any]:
        """Register the node's scoring processes, if the job has any."""
        pool = self.spec.engine.reward.scoring_pool
        return [self._child(f"scorer-{n}", "run_scorer", n) for n in range(0 if pool is None else pool.processes)]

    def _ranks(self) -> list[Any]:
        """Register the ranks of this node. Rank 0 is the trainer."""
        return [
            self._child(f"trainer-rank-{rank}", "run_trainer_rank", rank)
            if rank
            else self._child(TRAINER, "run_trainer")
            for rank in self.spec.in_trainer.ranks(self.spec.engine)
        ]

    def _child(self, name: str, runs: str, *arguments: Any) -> Any:
        """Register a process with this log name. Returns the event the process sets when ready."""
        ready, heartbeat = self.context.Event(), self.context.Value("d", 0.0, lock=False)
        spec_json = self.spec.model_dump_json()

        def start() -> Any:
            process = self.context.Process(target=_run, args=(runs, spec_json, heartbeat, *arguments, ready))
            process.start()
            return process

        past = Deaths(partial(progress_of, self.spec))
        serves = runs in ("run_store", "run_scorer")
        self.children.append(_Child(name=name, start=start, heartbeat=heartbeat, past=past, serves=serves))
        return ready

    def _is_finished(self) -> bool:
        """Return True if the node's work is done: the trainer has ended, or all workers of a spot node have ended.

        A further node of the trainer is done when the run is. The weight store and the scoring processes end with the
        workers.
        """
        if self.spec.role == "trainer":
            return next(child.done for child in self.children if child.name == TRAINER)
        if self.spec.role == "ranks":
            return next(child.done for child in self.children if child.name == MEETING)
        return all(child.done for child in self.children if not child.serves)

    def _is_money_spent(self) -> bool:
        """Return True if the spend deadline has passed, as set at the start or later by the controller."""
        if self.on_cloud:
            left_ms = self.money.left_ms()
            return left_ms is not None and left_ms <= 0
        deadline_ms = self._money_deadline_ms()
        return deadline_ms is not None and self.spec.clock.run_clock().now_ms() >= deadline_ms

    def _money_deadline_ms(self) -> int | None:
        """Return the spend deadline on the local infra (run's clock), or None without a limit."""
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads((self.folder / "money.json").read_text())["deadline_ms"])
        return self.spec.money_deadline_ms

    def ended_ms(self, code: int) -> int:
        """Return the time at which the node's work ended.

        On the local infra, a node ended by its spend deadline is billed up to exactly that deadline.
        """
        deadline_ms = None if self.on_cloud or code != EXIT_MONEY else self._money_deadline_ms()
        now_ms = self.spec.clock.run_clock().now_ms()
        return now_ms if deadline_ms is None else min(now_ms, deadline_ms)

    def _check_notice(self) -> None:
        """React to a preemption notice.

        The agent drains the workers at once, and notifies the coordinator as soon as the coordinator answers.
        """
        deadline_ms = None
        with contextlib.suppress(OSError, ValueError):
            deadline_ms = int(json.loads((self.folder / "notice.json").read_text())["deadline_ms"])
        if deadline_ms is None or deadline_ms == self.noticed_ms:
            return
        self.noticed_ms = deadline_ms
        self.drain.set()
        print(f"notice: this node will be gone at {deadline_ms}", flush=True)
        client = httpx.Client(timeout=1.0, trust_env=False)
        threading.Thread(target=self._send_notice, args=(client, deadline_ms), daemon=True).start()

    def _send_notice(self, client: httpx.Client, deadline_ms: int) -> None:
        call = pack(encode(Notice(node=self.spec.node, deadline_ms=deadline_ms)))
        url, headers = self._coordinator("call")
        while self.noticed_ms == deadline_ms:
            with contextlib.suppress(httpx.HTTPError):
                client.post(url, content=call, headers=headers).raise_for_status()
                return
            time.sleep(NOTICE_AGAIN_SECONDS)

    def _watch_coordinator(self, client: httpx.Client) -> None:
        """Record each answer of the run's coordinator for the guard. A frozen coordinator gives none."""
        url, headers = self._coordinator("health")
        while True:
            with contextlib.suppress(httpx.HTTPError):
                client.get(url, headers=headers).raise_for_status()
                touch(self.folder / LAST_ANSWER)
            time.sleep(min(COORDINATOR_SECONDS, limit_seconds() / 4))

    def _coordinator(self, route: str) -> tuple[str, dict[str, str]]:
        """Return a URL of the coordinator, and the headers of this node's calls."""
        url = f"http://{self.spec.coordinator_host}:{self.spec.coordinator_port}/{route}"
        return url, {"Authorization": f"Bearer {self.spec.own_token}"}

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a file for the launcher, durably. Raises OSError if the disk is full."""
        write_durably(self.folder / name, json.dumps(content).encode())


def _run(runs: str, spec_json: str, *arguments: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process inherits the agent's handler
    # Import only in the forkserver and its children, so an agent without a fork stays small and never loads torch.
    if runs == "run_store":
        module = "engine.node.node_store"
    else:
        module = f"engine.entrypoints.{'ray_processes' if runs.startswith('run_ray') else 'processes'}"
    process = getattr(importlib.import_module(module), runs)
    lost = importlib.import_module("engine.worker.transport").CoordinatorLost
    superseded = importlib.import_module("engine.storage.checkpoint").Superseded
    try:
        process(NodeSpec.model_validate_json(spec_json), *arguments)
    except lost as error:
        print(f"the coordinator is away: {error}", flush=True)
        sys.exit(EXIT_UNANSWERED)
    except superseded as error:
        print(error, flush=True)
        sys.exit(EXIT_SUPERSEDED)


def other_setup(spec: NodeSpec) -> str | None:
    """Return a message if the machine's setup differs from the setup that the controller named, else None."""
    if spec.cloud == "local" or not spec.digest:
        return None
    file = Path(sys.prefix) / ".digest"
    try:
        digest = file.read_text().strip()
    except OSError:
        digest = ""
    if digest == spec.digest:
        return None
    return (
        f"this machine was set up as {digest or 'nothing (there is no ' + str(file) + ')'}, but its controller means "
        f"{spec.digest}; run the set-up again, or take an image that was made from the same job and version"
    )


class _EndRequested(BaseException):
    """Request to end, raised on SIGTERM."""


def _on_sigterm(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignore repeats: an agent already ending finishes undisturbed
    raise _EndRequested


def main() -> int:
    """Run the node described by the file on the command line."""
    spec = NodeSpec.model_validate_json(Path(sys.argv[1]).read_text())
    folder = Path(spec.folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lock = (folder / "agent.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{spec.node} runs already; nothing to do", flush=True)
        return EXIT_FINISHED
    os.register_at_fork(after_in_child=lock.close)  # only the agent holds the lock, not its children
    log_to(sys.stdout.fileno())
    for stale in ("ready.json", "exit.json"):  # files of an earlier agent
        (folder / stale).unlink(missing_ok=True)
    agent = Agent(spec)
    identity = {"pid": os.getpid(), "create_time": psutil.Process().create_time()}
    agent.write("agent.json", {**identity, "ticks": start_ticks(os.getpid()), "boot_id": boot_id()})
    if agent.on_cloud:
        agent.guard.keep_alive()  # start first: a machine that refuses its work needs a guard too
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _on_sigterm)
    shipping = begin_shipping(spec)
    code, text = EXIT_BROKEN, "its agent failed; its log says why"
    try:
        code, text = agent.run()
    except _EndRequested:
        text = "ended by SIGTERM"
    except Exception as error:
        text = f"its agent failed: {error!r}"
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        at_ms = agent.ended_ms(code)
        agent.stop()
        print(f"this agent ends: {text}", flush=True)
        with contextlib.suppress(OSError):
            agent.write("exit.json", {"code": code, "at_ms": at_ms, "text": text})
        if shipping is not None:
            shipping.end()
    if code == EXIT_MONEY and spec.cloud != "local":
        terminate_instance(spec.cloud, lambda text: print(text, flush=True))
    return code


if __name__ == "__main__":
    sys.exit(main())
