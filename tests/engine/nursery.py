"""Nodes in a tenth of a second: one process that has imported what a node needs, and forks node agents.

    python -m tests.engine.nursery SOCKET [PACKAGE ...]

One JSON line in, one out: {"fork": ...} -> pid, {"poll": pid} -> exit code.

A module of the engine that a command starts (`python -m engine.entrypoints.preflight`) can be forked too.
`forked_python` makes a program to put in the place of `sys.executable`: it sends its command line and its open files
through SOCKET, and ends with the exit code that the forked process had.

With workers of pytest-xdist, tests/conftest.py starts one nursery for all, with every module of each PACKAGE. It forks
the workers, their own nurseries and the processes of `multiprocessing`, so a run of the tests imports torch once.

`python -m engine.node.agent` imports torch, diffusers and the recogniser for each node: six seconds of a core.
The nursery imports them once for all tests of a pytest process. The forked agent is the same code in a process session
of its own, with the environment, folder and cores of the test that asks for it. The launcher has agents forked in the
same way (engine/node/starter.py).

When its input ends, the nursery kills the sessions of all agents that it forked, and exits.
"""

import atexit
import fcntl
import functools
import gc
import importlib
import json
import multiprocessing.spawn
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from setproctitle import getproctitle

from engine.node.starter import become_agent
from tests import rank_stops, sampling_stops, trainer_stops
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

    def wait(self, timeout: float = 240.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.01)
        return code


class Nursery:
    """A test's handle on the process that forks agents."""

    def __init__(self, *packages: str) -> None:
        self._folder = tempfile.TemporaryDirectory(
            prefix="nursery"
        )  # a socket path has a length limit that a test's folder may exceed
        self.socket = Path(self._folder.name) / "socket"
        self._process = subprocess.Popen(
            [multiprocessing.spawn.get_executable(), "-m", "tests.engine.nursery", str(self.socket), *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],  # a test may have changed the folder
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
        self._folder.cleanup()


@functools.cache
def nursery() -> Nursery:
    """The nursery of this pytest process, started when it is first needed."""
    return Nursery()


PROGRAM = """\
#!{python} -SE
import array, json, os, socket, sys

def is_open(file):
    try:
        return os.get_inheritable(file)
    except OSError:
        return False

files = [file for file in sorted(map(int, os.listdir("/dev/fd"))) if is_open(file)]
line = socket.socket(socket.AF_UNIX)
line.connect({socket!r})
order = {{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "files": files}}
text = json.dumps(order).encode()
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
line.sendmsg([len(text).to_bytes(4, "big")], rights)
line.sendall(text)
for file in files:
    os.close(file)
sys.exit(int(line.recv(16) or 1))
"""


def forked_python(folder: Path, *packages: str) -> str:
    """Write the program that has `-m MODULE WORD ...` or `-c CODE WORD ...` done by a process that the nursery forks.

    Return its path. Other options of Python have no effect. `packages`: a nursery of its own has all their modules.
    """
    program = folder / "forked-python"
    ask = Nursery(*packages) if packages else nursery()
    ask.ask({"poll": None})  # its answer shows that it listens
    program.write_text(PROGRAM.format(python=sys.executable, socket=str(ask.socket)))
    program.chmod(0o755)
    return str(program)


MOST_FILES, FIRST_OWN_FILE = 64, 500
"""Open files that a replaced process may have, and the lowest number of the files of the forked process itself."""


class NurseryFleet(Fleet):
    """A fleet whose agents are forked."""

    def _spawn(self, module: str, node_file: Path) -> Forked:
        return nursery().fork(module, node_file)


def main() -> None:
    import engine.entrypoints.processes  # noqa: F401  every node needs these modules
    from engine.config import EngineConfig
    from engine.models.load import load_adapter

    load_adapter(EngineConfig().model)  # imports diffusers
    for package in map(importlib.import_module, sys.argv[2:]):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # Alembic runs migrations. Ray reads its environment, with its authentication, when it is imported.
            if ".migrations." not in module.name and ".ray" not in module.name:
                importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # untouched objects stay shared between the processes
    getproctitle()  # finds where the title is kept, before a forked process changes its environment
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    sessions: set[int] = set()
    modules: set[int] = set()
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [], 1.0 if modules else None)
        modules -= {pid for pid in modules if os.waitpid(pid, os.WNOHANG)[0]}
        if listener in ready:
            line, _ = listener.accept()
            answer = os.fork()
            if answer == 0:
                listener.close()
                try:
                    _run_program(line)
                finally:
                    os._exit(1)  # at the usual exit, a library may wait for a thread that is not in this process
            modules.add(answer)
            line.close()
        if sys.stdin in ready:
            if not (text := sys.stdin.readline()):
                break
            print(json.dumps(_answer(json.loads(text), sessions)), flush=True)
    _kill_sessions(sessions)


def _answer(order: Mapping[str, Any], sessions: set[int]) -> int | None:
    match order:
        case {"fork": agent}:
            pid = os.fork()
            if pid == 0:
                _become(agent)
            sessions.add(pid)
            return pid
        case {"poll": int(pid)}:
            return _exit_code(pid)
        case _:
            return None


def _run_program(line: socket.socket) -> None:
    """Run a module or code with the open files, environment, folder and command line of the replaced process."""
    head, received, _, _ = socket.recv_fds(line, 4, MOST_FILES)
    # The process's own files must not be in the way of the numbers that the replaced process used.
    line = socket.socket(fileno=_above(line.detach()))
    received = [_above(file) for file in received]
    sent = b""
    while len(sent) < int.from_bytes(head, "big"):
        sent += line.recv(65536)
    order = json.loads(sent)
    for number, file in zip(order["files"], received, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  the nursery's own has read ahead
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    words = order["argv"]
    while words[0] not in ("-m", "-c"):
        words.pop(0)
    kind, text, *rest = words
    code: object = 0
    try:
        if kind == "-m":
            sys.argv = [text, *rest]
            runpy.run_module(text, run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *rest]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(text, vars(sys.modules["__main__"]))
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    line.sendall(str(code if isinstance(code, int) else int(code is not None)).encode())
    os._exit(0)


def _above(file: int) -> int:
    """Move a file descriptor to a number that no started program uses."""
    number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_FILE)
    os.close(file)
    return number


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
    rank_stops.plant(order["env"])
    sampling_stops.plant(order["env"])
    trainer_stops.plant(order["env"])
    module, node_file = order["argv"]
    become_agent(module, Path(node_file))


if __name__ == "__main__":
    main()
