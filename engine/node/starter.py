"""Start the agents of nodes on this machine, by forking from a process with all imports done.

    python -m engine.node.starter AGENT [MODULE ...]    a line on standard input: the path of a node.json

An agent started as a program imports torch, diffusers and the recogniser: six seconds of a core for each node. The
starter imports MODULE ... once. AGENT is a module, or the file of a program. The forked agent runs the same code in a
process session of its own. The agent forks the node's processes itself, and the node's processes need no import either.

When the starter's input ends, no process is left to end a node, so the starter exits without starting another node. Its
agents stay, like cloud instances without a terminate call. A node given up before its start has a file `ending` in its
folder, and is not started any more. Each agent's exit is a line in its node's `exits.jsonl`.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from engine.mark import ENDING, EXITS, bear_mark

ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=536870912:"
    "glibc.malloc.mmap_threshold=268435456",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a worker that waits for work of its SP group times out regularly, without a fault
}
"""Environment variables of a node's processes: huge pages, and freed memory stays with the process. A training step
allocates and frees the same tens of megabytes each time. Avoiding the page faults saves about 7 % of a step (10 runs
against 10)."""


def environment() -> dict[str, str]:
    """Return the starter's environment.

    The C library's settings come last, because otherwise process titles cannot be set.
    """
    mine = ENVIRONMENT | os.environ
    return {name: mine[name] for name in sorted(mine, key=lambda name: name == "GLIBC_TUNABLES")}


class Starter:
    """Forks agents on request, and records their exits."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._folders: dict[int, Path] = {}
        """Node folders by the agent's pid."""
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)

    def serve(self) -> None:
        """Start the requested agents until standard input ends."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        text = b""
        while True:
            ready = dict(poll.poll())
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._note_ends()
            if ready.get(0, 0) & ~select.POLLIN:
                return
            if 0 in ready:
                *lines, text = (text + os.read(0, 65536)).split(b"\n")
                for line in lines:
                    self._start(Path(os.fsdecode(line)))

    def _start(self, node_file: Path) -> None:
        if (node_file.parent / ENDING).exists():
            return
        pid = os.fork()
        if pid == 0:
            os.close(self._woken)
            os.close(self._wake)
            try:
                become_agent(self._agent, node_file)
            finally:
                os._exit(1)  # after a full disk, for example, this process must not continue as a second starter
        self._folders[pid] = node_file.parent

    def _note_ends(self) -> None:
        """Record each agent's exit before reaping its pid. Until then, other processes see a zombie."""
        for pid, code in _ended_children():
            folder = self._folders.pop(pid, None)
            if folder is not None:
                with contextlib.suppress(OSError), (folder / EXITS).open("a") as exits:
                    exits.write(json.dumps({"pid": pid, "code": code}) + "\n")
            os.waitpid(pid, 0)


def _ended_children() -> Iterator[tuple[int, int]]:
    """Yield pid and exit code of each ended child. The caller must reap the child before asking for the next."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        yield ended.si_pid, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def become_agent(agent: str, node_file: Path) -> None:
    """Turn this forked process into the agent of a node, in a session of its own. Does not return."""
    folder = node_file.parent
    os.setsid()
    is_marked = bear_mark(folder, "agent")
    if (folder / ENDING).exists():
        os._exit(0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(folder / "logs" / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    program = [agent] if agent.endswith(".py") else ["-m", agent]
    if not is_marked:  # a separate program carries the mark in its environment
        os.execv(sys.executable, [sys.executable, "-P", *program, str(node_file)])
    multiprocessing.set_start_method("fork")
    sys.argv = [agent, str(node_file)]
    code = 1
    try:
        if agent.endswith(".py"):
            runpy.run_path(agent, run_name="__main__")
        else:
            runpy.run_module(agent, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Import the agents' modules, then start agents."""
    needed = environment()
    if list(os.environ.items()) != list(needed.items()):
        os.execve(sys.executable, [sys.executable, "-P", "-m", "engine.node.starter", *sys.argv[1:]], needed)
    agent, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # untouched objects stay shared between the processes
    Starter(agent).serve()


if __name__ == "__main__":
    main()
