"""Nodes in a tenth of a second: one process that has imported what a node needs, and forks node agents.

    python -m tests.engine.nursery    one JSON line in, one out: {"fork": ...} -> pid, {"poll": pid} -> exit code

`python -m engine.runtime.agent` imports torch, diffusers and the recogniser for each node: six seconds of a core.
The nursery imports them once for all tests of a pytest process. The forked agent is the same code in a process session
of its own, with the environment, folder and cores of the test that asks for it. The launcher has agents forked in the
same way (engine/runtime/starter.py).

When its input ends, the nursery kills the sessions of all agents that it forked, and exits.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from setproctitle import getproctitle

from engine.runtime.starter import become_agent
from tests.engine.fleet import Fleet


class Forked:
    """A process that the nursery forked, with the part of `subprocess.Popen` that a fleet uses."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.01)
        return code


class Nursery:
    """The process that forks, seen from the test that asks for agents."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._lock = threading.Lock()
        atexit.register(self.close)

    def fork(self, module: str, node_file: Path) -> Forked:
        """Start `python -m module node_file` with the caller's environment, folder and cores."""
        order = {
            "argv": [module, str(node_file)],
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
        }
        return Forked(self, self.ask({"fork": order}))

    def ask(self, order: Mapping[str, Any]) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the nursery and what it forked."""
        self._process.communicate()


@functools.cache
def nursery() -> Nursery:
    """The nursery of this pytest process, started when it is first needed."""
    return Nursery()


class NurseryFleet(Fleet):
    """A fleet whose agents are forked."""

    def _spawn(self, module: str, node_file: Path) -> Forked:
        return nursery().fork(module, node_file)


def main() -> None:
    import engine.runtime.processes  # noqa: F401  what every node needs
    from engine.config import EngineConfig
    from engine.models.load import load_adapter

    load_adapter(EngineConfig().model)  # imports diffusers
    getproctitle()  # finds where the title is kept, before a forked process changes its environment
    sessions: set[int] = set()
    for line in sys.stdin:
        match json.loads(line):
            case {"fork": order}:
                answer = os.fork()
                if answer == 0:
                    _become(order)
                sessions.add(answer)
            case {"poll": pid}:
                answer = _exit_code(pid)
        print(json.dumps(answer), flush=True)
    _kill_sessions(sessions)


def _exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _kill_sessions(sessions: set[int]) -> None:
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions:
                process.kill()
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue


def _become(order: Mapping[str, Any]) -> None:
    """Turn this process into the agent of a node, as its test would start it."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    os.sched_setaffinity(0, order["cores"])
    module, node_file = order["argv"]
    become_agent(module, Path(node_file))


if __name__ == "__main__":
    main()
