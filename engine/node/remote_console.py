"""Serve a node's remote console: `python -m engine.node.remote_console FOLDER [AGENT COMMAND]`.

The launcher starts the console over SSH.

files of FOLDER -> JSON lines on stdout        JSON lines on stdin -> the agent, and files of FOLDER

Out: `beat` each second; `put` a small changed file, `gone` a removed one; `append` to a file `at` an offset (0: the
file was replaced); `trouble` with an error. In: first `have`, the state of the launcher's copies of appended files,
{NAME: [size, its last bytes]}. Then `beat`, and orders, each safe to repeat: `run` (a NodeSpec, and `secrets` for the
agent's environment, never written to disk), `money` ({left_ms, told}), `notice` ({deadline_ms, source}).

Promises: no byte is sent twice or left out, even if the console is killed at any moment. Only the agent of the last
order runs. A repeated order leaves the agent alone, even an ended agent, except after a reboot. The agent lives in its
own session and never notices a closed console. Standard library only: the console must open on a node where nothing
else works.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from engine.durable import write_durably
from engine.mark import MARK
from engine.node.alone import HEARD, start_ticks, touch

LOOK_SECONDS = 0.1
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 15.0
"""Seconds of silence after which the launcher counts as gone, whatever TCP reports. A returning launcher opens a new
console."""

PIECE_BYTES = 48 * 1024
"""Maximum bytes of a file in one line."""
TAIL_BYTES = 64
"""Number of last bytes compared to detect a file replaced by another with the same beginning."""

PUT = ("agent.json", "ready.json", "notice.json", "hint.json", "exit.json")
"""Small files sent whole. node.json is excluded: node.json holds the token, and comes from the launcher."""
APPENDED = re.compile(r"(progress/[\w-][\w.-]*\.jsonl|logs/[\w-][\w.-]*\.log)")

MONEY = ("money_left_ms", "money_deadline_ms", "money_longest_ms")
"""NodeSpec fields that may change while the agent runs. A `money` order changes these fields."""

PATIENCE_SECONDS = 5.0
"""Seconds an agent may take to end before SIGKILL."""

SHORT_WORDS = 400


class Window:
    """Remote console of one folder and keeper of one agent."""

    def __init__(self, folder: Path, agent: Sequence[str], out: BinaryIO) -> None:
        self._folder, self._agent, self._out = folder, tuple(agent), out
        self._saying = threading.Lock()
        self._heard = time.monotonic()
        self._shown: dict[str, tuple[int, int, int] | None] = {}
        """Size, modification time and inode of each file when last sent; None: reported as absent."""
        self._sent: dict[str, tuple[int, bytes]] = {}
        """Bytes sent of each appended file, and the last bytes sent."""
        self._child: subprocess.Popen[bytes] | None = None
        self._secrets: dict[str, str] = {}

    # --- sending ----------------------------------------------------------------------------------

    def show(self) -> None:
        """Send changes and heartbeats, for ever."""
        beat = 0.0
        while True:
            more = self.look()
            if time.monotonic() - beat >= BEAT_SECONDS:
                beat = time.monotonic()
                self.say({"beat": 1})
            with contextlib.suppress(OSError):  # a full disk: try again at the next look
                self._agent_has_ended()
            if not more:
                time.sleep(LOOK_SECONDS)

    def look(self) -> bool:
        """Send the changes since the last look. Returns True if more bytes wait."""
        # Hide the exit of an agent being replaced: the node does not end with that agent.
        replacing = not (self._folder / "started.json").exists()
        for name in PUT:
            self._look_at_small(name, hidden=replacing and name == "exit.json")
        return sum(self._look_at_long(name) for name in self._long_files()) > 0

    def _look_at_small(self, name: str, hidden: bool) -> None:
        path = self._folder / name
        seen: tuple[int, int, int] | None = None
        news = {"gone": name}
        with contextlib.suppress(FileNotFoundError):
            if not hidden:
                seen, news = _identity(path), {"put": name, "text": path.read_text(errors="replace")}
        if name not in self._shown or self._shown[name] != seen:
            self.say(news)
            self._shown[name] = seen

    def _long_files(self) -> Iterator[str]:
        for folder in ("logs", "progress"):
            with contextlib.suppress(FileNotFoundError):
                names = sorted(f"{folder}/{name}" for name in os.listdir(self._folder / folder))
                yield from (name for name in names if APPENDED.fullmatch(name))

    def _look_at_long(self, name: str) -> bool:
        path = self._folder / name
        try:
            seen = _identity(path)
            if self._shown.get(name) == seen:
                return False
            with path.open("rb") as file:
                done, tail = self._sent.get(name, (0, b""))
                file.seek(done - len(tail))
                begin = file.read(len(tail) + PIECE_BYTES)
        except FileNotFoundError:
            return False  # the file was removed; the launcher keeps the bytes received
        if not begin.startswith(tail):
            # The file shrank or was replaced, perhaps by a longer file.
            self._sent[name] = (0, b"")
            self.say({"append": name, "at": 0, "data": ""})
            return True
        fresh = begin[len(tail) :]
        if fresh:
            self.say({"append": name, "at": done, "data": base64.b64encode(fresh).decode()})
            self._sent[name] = (done + len(fresh), begin[-TAIL_BYTES:])
        if len(fresh) == PIECE_BYTES:
            return True
        self._shown[name] = seen
        return False

    def say(self, what: Mapping[str, Any]) -> None:
        line = memoryview(json.dumps(what).encode() + b"\n")
        with self._saying:
            self._out.write(line)
            self._out.flush()

    # --- receiving --------------------------------------------------------------------------------

    def hear(self, line: bytes) -> None:
        """Apply one line from the launcher."""
        order = json.loads(line)
        try:
            if "have" in order:
                self._sent = {name: (size, base64.b64decode(tail)) for name, (size, tail) in order["have"].items()}
            elif "run" in order:
                self._secrets = dict(order.get("secrets", {}))
                self.run(order["run"], int(order["told"]))
            elif "money" in order:
                known = _read(self._folder / "money.json")
                if known is None or int(known.get("told", 0)) < order["money"]["told"]:
                    self._write("money.json", order["money"])
            elif "notice" in order:
                known = _read(self._folder / "notice.json")
                if known is None or int(known["deadline_ms"]) > order["notice"]["deadline_ms"]:
                    self._write("notice.json", order["notice"])
        except OSError as error:  # a full disk: the launcher repeats the order on the next connection
            self.say({"trouble": f"{next(iter(order))}: {error}"})
        self._heard = time.monotonic()
        touch(self._folder / HEARD)

    def silence(self) -> float:
        """Return the seconds since the launcher's last line."""
        return time.monotonic() - self._heard

    # --- the agent --------------------------------------------------------------------------------

    def run(self, spec: Mapping[str, Any], told: int) -> None:
        """Run the agent of this exact spec.

        An agent that already ran this spec and ended stays ended: the end is a result, not a fault.

        An order older than the last order is ignored, because a launcher may wake up from a freeze and send an old
        order.
        """
        if Path(spec["folder"]) != self._folder:
            raise OSError(f"{spec['node']} has its disk in {spec['folder']}, and this window shows {self._folder}")
        wanted = digest_of(spec)
        with self._alone():
            started = _read(self._folder / "started.json")
            if started is not None and told < started["told"]:
                return
            if started is not None and started["digest"] == wanted and started["boot_id"] == _boot_id():
                self._write("started.json", {**started, "told": told})
                return
            (self._folder / "started.json").unlink(missing_ok=True)
            self._stop(started)
            for name in ("agent.json", "ready.json", "exit.json"):
                (self._folder / name).unlink(missing_ok=True)
            self._write("node.json", spec)
            self._start({"digest": wanted, "told": told, "boot_id": _boot_id()})

    def _start(self, order: Mapping[str, Any]) -> None:
        (self._folder / "logs").mkdir(exist_ok=True, mode=0o700)
        log = os.open(self._folder / "logs/agent.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            self._child = subprocess.Popen(
                [*self._agent, str(self._folder / "node.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, **self._secrets, MARK: str(self._folder)},
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
        while left := _processes_of(self._folder, agent):
            if started is None or not _is_alive(started) or time.monotonic() > until:
                _send(left, signal.SIGKILL)
            if self._child is not None:
                self._child.poll()
            time.sleep(0.02)

    def _agent_has_ended(self) -> None:
        """Write `exit.json` for an agent that died without writing its own."""
        with self._alone(wait=False) as alone:
            started = _read(self._folder / "started.json") if alone else None
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

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        write_durably(self._folder / name, json.dumps(value).encode())


def digest_of(spec: Mapping[str, Any]) -> str:
    """Return the digest of a NodeSpec without its money fields."""
    lasting = {key: value for key, value in spec.items() if key not in MONEY}
    return hashlib.blake2b(json.dumps(lasting, sort_keys=True).encode(), digest_size=16).hexdigest()


def _identity(path: Path) -> tuple[int, int, int]:
    seen = path.stat()
    return seen.st_size, seen.st_mtime_ns, seen.st_ino


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


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


def main() -> None:
    """Serve until the launcher disconnects."""
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    agent = sys.argv[2:] or [sys.executable, "-P", "-m", "engine.node.agent"]
    orders = sys.stdin.buffer
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # stray prints go to stderr, not into the protocol
    window = Window(folder, agent, out)
    have = orders.readline()
    if have:
        window.hear(have)

    def hear() -> None:
        try:
            for line in orders:
                window.hear(line)
        except Exception:
            traceback.print_exc()
        os._exit(0)

    def watch() -> None:
        while window.silence() < SILENCE_SECONDS:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=hear, daemon=True).start()
    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        window.show()
    os._exit(0)


if __name__ == "__main__":
    main()
