"""Where nodes come from in a tenth of a second: one process that has imported everything, and forks agents.

    python -m tests.conformance.nursery    one line in: "MODULE NODE_FILE LOG_FILE", one line out: the agent's pid

A node is the same agent in the same session of processes as `python -m engine.runtime.agent` makes it, but for the
import of torch, diffusers and the recogniser, which takes five seconds of a core. When its input ends, so do its nodes.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.engine.fleet import Fleet


class Born:
    """A process that the nursery forked: as much of `subprocess.Popen` as a fleet needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None while it runs; the nursery has its exit code."""
        return None if psutil.pid_exists(self.pid) else 0

    def wait(self, timeout: float = 60.0) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise TimeoutError(f"process {self.pid} does not end")
            time.sleep(0.005)
        return 0


class NurseryFleet(Fleet):
    """A fleet whose agents are forked."""

    _nursery: "subprocess.Popen[str] | None" = None

    def _spawn(self, module: str, node_file: Path, log: Path) -> "Born":
        if self._nursery is None:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "tests.conformance.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                text=True,
            )
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(f"{module} {node_file} {log}\n")
        self._nursery.stdin.flush()
        return Born(int(self._nursery.stdout.readline()))

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._nursery is not None:
                self._nursery.kill()
                self._nursery.wait()


def main() -> None:
    import engine.runtime.processes  # noqa: F401  what every node needs

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    born: list[int] = []
    while line := os.read(0, 4096).decode():
        pid = os.fork()
        if pid == 0:
            _become(*line.split())
        born.append(pid)
        os.write(1, f"{pid}\n".encode())
    for pid in born:
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == pid:
                    process.kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue


def _become(module: str, node_file: str, log: str) -> None:
    """The agent of a node, in a session of its own; its processes are forked too."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    forked = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forked  # type: ignore[method-assign, assignment]
    sys.argv = [module, node_file]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        os._exit(int(end.code or 0))
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
