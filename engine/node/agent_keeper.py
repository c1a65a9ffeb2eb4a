"""Start, watch and end the agent of a node, for the node's remote console.

Only the agent of the last order runs. A repeated order leaves the agent alone, even an ended agent, except after a
reboot. The agent lives in its own session and never notices a closed console. Standard library only.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.durable import write_durably
from engine.mark import MARK
from engine.node.alone import start_ticks

MONEY = ("money_left_ms", "money_deadline_ms", "money_longest_ms")
"""NodeSpec fields that may change while the agent runs. A `money` order changes these fields."""

PATIENCE_SECONDS = 5.0
"""Seconds an agent may take to end before SIGKILL."""

SHORT_WORDS = 400


class AgentKeeper:
    """Keeper of the one agent of a folder.

    Every console of the folder has a keeper. A lock allows one keeper at a time to act on the agent.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        """Create the keeper. `command`: starts the agent, and gets the path of node.json as its last argument."""
        self._folder, self._command = folder, tuple(command)
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, spec: Mapping[str, Any], number: int, secrets: Mapping[str, str]) -> None:
        """Run the agent of this exact spec.

        `number`: number of the order. `secrets`: more of the agent's environment, never written to disk.

        An agent that already ran this spec and ended stays ended: the end is a result, not a fault.

        An order older than the last order is ignored, because a launcher may wake up from a freeze and send an old
        order.
        """
        if Path(spec["folder"]) != self._folder:
            raise OSError(f"{spec['node']} has its disk in {spec['folder']}, and this console serves {self._folder}")
        digest = digest_of(spec)
        with self._alone():
            started = read_json(self._folder / "started.json")
            if started is not None and number < started["told"]:
                return
            if started is not None and started["digest"] == digest and started["boot_id"] == _boot_id():
                self._write("started.json", {**started, "told": number})
                return
            (self._folder / "started.json").unlink(missing_ok=True)
            self._stop(started)
            for name in ("agent.json", "ready.json", "exit.json"):
                (self._folder / name).unlink(missing_ok=True)
            self._write("node.json", spec)
            self._start(secrets, {"digest": digest, "told": number, "boot_id": _boot_id()})

    def _start(self, secrets: Mapping[str, str], order: Mapping[str, Any]) -> None:
        (self._folder / "logs").mkdir(exist_ok=True, mode=0o700)
        log = os.open(self._folder / "logs/agent.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            self._child = subprocess.Popen(
                [*self._command, str(self._folder / "node.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, **secrets, MARK: str(self._folder)},
                start_new_session=True,
            )
        finally:
            os.close(log)
        # A console killed before this line leaves an unrecorded agent. The next console replaces the agent.
        self._write("started.json", {**order, "pid": self._child.pid, "ticks": start_ticks(self._child.pid)})

    def _stop(self, started: Mapping[str, Any] | None) -> None:
        """End the running agent, if any, and all processes of the node."""
        if self._child is not None:
            self._child.poll()
        agent = int(started["pid"]) if started is not None and _is_alive(started) else None
        if agent is not None:
            _send([agent], signal.SIGTERM)
            _send([agent], signal.SIGCONT)  # a stopped process would not handle SIGTERM
        until = time.monotonic() + PATIENCE_SECONDS
        while processes := _processes_of(self._folder, agent):
            if started is None or not _is_alive(started) or time.monotonic() > until:
                _send(processes, signal.SIGKILL)
            if self._child is not None:
                self._child.poll()
            time.sleep(0.02)

    def record_end(self) -> None:
        """Write `exit.json` for an agent that died without writing its own."""
        with self._alone(wait=False) as alone:
            started = read_json(self._folder / "started.json") if alone else None
            if started is None or started["boot_id"] != _boot_id():
                return
            code = -int(signal.SIGKILL)
            if self._child is not None and self._child.pid == started["pid"]:
                code = self._child.poll() or 0
            if _is_alive(started) or (self._folder / "exit.json").exists():
                return
            text = f"the agent ended without a word; its log ends: {self._last_words()}"
            self._write("exit.json", {"code": code, "at_ms": time.time_ns() // 1_000_000, "text": text})

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            lines = (self._folder / "logs/agent.log").read_bytes()[-4096:].decode(errors="replace").split("\n")
            return [line for line in lines if line.strip()][-1][-SHORT_WORDS:]
        return "nothing"

    @contextlib.contextmanager
    def _alone(self, wait: bool = True) -> Iterator[bool]:
        """Hold the lock, so two consoles, or two threads of one console, never touch the agent at once.

        Yields False if the lock is taken and `wait` is False.
        """
        with (self._folder / "window.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

    def _write(self, name: str, value: Mapping[str, object]) -> None:
        write_json(self._folder / name, value)


def digest_of(spec: Mapping[str, Any]) -> str:
    """Return the digest of a NodeSpec without its money fields."""
    lasting = {key: value for key, value in spec.items() if key not in MONEY}
    return hashlib.blake2b(json.dumps(lasting, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file, or None when the file is missing or damaged."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Replace the file durably. Raises OSError, e.g. if the disk is full."""
    write_durably(path, json.dumps(value).encode())


# --- processes, by /proc --------------------------------------------------------------------------


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_alive(started: Mapping[str, Any]) -> bool:
    ticks = start_ticks(int(started.get("pid", 0)))
    return ticks is not None and ticks == started.get("ticks")


def _processes_of(folder: Path, session: int | None) -> list[int]:
    """Return the node's processes: all with the node's mark, and the agent's session."""
    return [pid for pid in _pids() if _belongs(pid, f"{MARK}={folder}".encode(), session)]


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid())


def _belongs(pid: int, mark: bytes, session: int | None) -> bool:
    try:
        if start_ticks(pid) is None:
            return False
        return os.getsid(pid) == session or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # ended in the meantime, or owned by another user


def _send(pids: Sequence[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
