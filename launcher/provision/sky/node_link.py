"""The connection to a node: one ssh process, which carries the remote console of the node's folder and a tunnel.

controller's orders -> ssh -> engine/node/remote_console.py        node's files -> the mirror in the node's local folder

Every method returns at once; a thread does the work. The thread reconnects for ever, with growing gaps, and repeats all
current orders after each connect. So a broken connection costs time and loses nothing: the mirror continues from its
current state, in this process or the next. A stalled connection counts as broken: a heartbeat arrives each second, or
ssh is ended.
Input from a node is not trusted beyond the node's own files: only names known to the remote console are written.
"""

import base64
import contextlib
import json
import os
import random
import re
import select
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.clock import boot_ms
from engine.durable import write_durably
from engine.node_spec import NodeSpec

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""Seconds without a heartbeat after which the connection is ended and made anew."""
CONNECT_SECONDS = 30.0
"""Seconds until the first heartbeat, which may take longer: ssh exchanges keys, and Python starts on a booting VM."""
AGAIN_SECONDS = 5.0
"""Seconds until an order is repeated that the node could not carry out (a full disk)."""
DOOR_SECONDS = 0.5
"""Seconds between two probes of the tunnel's far end, and the longest time of a probe."""

FIRST_GAP_SECONDS, LONGEST_GAP_SECONDS = 0.2, 10.0

PUT = frozenset({"agent.json", "ready.json", "notice.json", "hint.json", "exit.json"})
APPENDED = re.compile(r"(progress/[\w-][\w.-]*\.jsonl|logs/[\w-][\w.-]*\.log)")
TAIL_BYTES = 64
"""Number of last bytes, same as in the remote console, by which a file is recognised as the file in the mirror."""

UNSENT_BYTES = 1 << 20
"""Unsent bytes above which no more heartbeats are queued. A remote console that reads nothing is
then detected by its silence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Login:
    """The SSH access to a VM. `known_hosts`: file for the VM's host key; None: in the mirror.

    `proxy`: an OpenSSH ProxyCommand into the VM's network; empty: direct connection.
    """

    host: str
    user: str
    key: Path
    port: int = 22
    known_hosts: Path | None = None
    proxy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Money:
    """The node's money left in ms, and the time of the message. A repeated message subtracts the time since."""

    left_ms: int
    told: int
    at_boot_ms: int

    def left_now_ms(self) -> int:
        return self.left_ms - (boot_ms() - self.at_boot_ms)


class _BrokenLine(Exception):
    """The reason for the end of a connection, as text."""


class NodeLink:
    """The connection to one node. `secrets` go into the agent's environment and are written nowhere."""

    def __init__(
        self,
        login: Login,
        mirror: Path,
        remote_folder: str = "spotrl/node",
        python: str = "spotrl/env/bin/python",
        *,
        secrets: Mapping[str, str] | None = None,
        agent_command: Sequence[str] = (),
    ) -> None:
        self._login, self._mirror = login, mirror
        self._window = shlex.join([python, "-P", "-m", "engine.node.remote_console", remote_folder, *agent_command])
        self._secrets = dict(secrets or {})
        self._lock = threading.Lock()
        self._spec: NodeSpec | None = None
        self._spec_told = self._told = 0
        self._money: _Money | None = None
        self._notice_ms: int | None = None
        self._wants = 0
        """Counter of order changes, compared with the counter last sent."""
        self._closed = threading.Event()
        self._heard: float | None = None
        self._looked = time.monotonic()
        self._open_door: tuple[str, int] | None = None
        self.trouble = ""
        """The reason for a missing connection, or the node's last error; empty if all is well."""
        self._thread = threading.Thread(target=self._work, name=f"link {mirror.name}", daemon=True)
        self._thread.start()

    # --- calls of the controller ---------------------------------------------------------------------

    def run(self, spec: NodeSpec) -> None:
        """Request an agent with this spec.

        An equal spec changes nothing; a different spec replaces the running agent.
        """
        with self._lock:
            if self._spec != spec:
                self._spec, self._spec_told = spec, self._now_told()
                self._wants += 1

    def rearm(self, left_ms: int) -> None:
        """Send the node the time that its money lasts from now, in ms."""
        with self._lock:
            self._money = _Money(left_ms=left_ms, told=self._now_told(), at_boot_ms=boot_ms())
            self._wants += 1

    def notice(self, deadline_ms: int) -> None:
        """Send the node the announced time of the preemption (UTC)."""
        with self._lock:
            if self._notice_ms != deadline_ms:
                self._notice_ms = deadline_ms
                self._wants += 1

    def door(self, port: int) -> tuple[str, int] | None:
        """Return the local end of a tunnel to `port` of the node's private address. None: no server answers now."""
        spec = self._spec
        return self._open_door if spec is not None and spec.coordinator_port == port else None

    @property
    def heard_s(self) -> float | None:
        """Return the seconds since the node's last message; None: the node has never answered.

        Counted up to the thread's last step: while this process stands still, no node is silent.
        """
        return None if self._heard is None else max(0.0, self._looked - self._heard)

    def close(self) -> None:
        """End the connection soon. The agent continues."""
        self._closed.set()

    def _now_told(self) -> int:
        """Return a number above all earlier numbers, also of earlier processes, if the clocks are right."""
        self._told = max(self._told + 1, time.time_ns() // 1_000_000)
        return self._told

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        gap = FIRST_GAP_SECONDS
        while not self._closed.is_set():
            line = None
            try:
                line = _Line(self._command(), self._have(), self._tunnel())
                self._carry(line)
            except (_BrokenLine, OSError, ValueError) as error:
                self.trouble = str(error)
            finally:
                self._open_door = None
                if line is not None:
                    line.end()
                    gap = FIRST_GAP_SECONDS if line.heard is not None else gap
            # Half of the gap is random, so that the nodes of a run do not all reconnect at once.
            until = time.monotonic() + gap * random.uniform(0.5, 1.0)
            while time.monotonic() < until and not self._closed.wait(0.1):
                self._looked = time.monotonic()
            gap = min(gap * 2, LONGEST_GAP_SECONDS)

    def _carry(self, line: "_Line") -> None:
        """Serve a connection until its end."""
        told, again, door_looked = -1, None, 0.0
        while not self._closed.is_set():
            for message in line.messages():
                self._heard = line.heard
                if self._take(message):
                    self.trouble, again = str(message["trouble"]), time.monotonic() + AGAIN_SECONDS
                elif again is None:
                    self.trouble = ""
            now = self._looked = time.monotonic()
            if line.tunnel != self._tunnel():
                return
            if again is not None and now >= again:
                told, again = -1, None
            if told != self._wants:
                told = self._wants
                line.send(*self._orders())
            if line.heard is not None and line.tunnel and not self._open_door and now >= door_looked + DOOR_SECONDS:
                door_looked = now
                if _answers(line.local_port):
                    self._open_door = ("127.0.0.1", line.local_port)

    def _orders(self) -> list[dict[str, Any]]:
        """Return all current orders, each time: the node ignores known orders."""
        with self._lock:
            orders: list[dict[str, Any]] = []
            if self._spec is not None:
                spec = self._spec.model_dump(mode="json")
                orders.append({"run": spec, "told": self._spec_told, "secrets": self._secrets})
            if self._money is not None:
                orders.append({"money": {"left_ms": self._money.left_now_ms(), "told": self._money.told}})
            if self._notice_ms is not None:
                orders.append({"notice": {"deadline_ms": self._notice_ms, "source": "the cloud's API"}})
            return orders

    def _tunnel(self) -> str | None:
        """Return the tunnel's far end, or None. Only a trainer has a coordinator."""
        spec = self._spec
        return f"{spec.coordinator_host}:{spec.coordinator_port}" if spec and spec.role == "trainer" else None

    def _command(self) -> list[str]:
        login = self._login
        known = login.known_hosts or self._mirror / "known_hosts"
        options = {
            "BatchMode": "yes",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "ControlMaster": "no",
            "ControlPath": "none",
            "StrictHostKeyChecking": "accept-new",
            "UserKnownHostsFile": f'"{known}"',
            "GlobalKnownHostsFile": "/dev/null",
            "UpdateHostKeys": "no",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "ExitOnForwardFailure": "yes",
            "LogLevel": "ERROR",
            **({"ProxyCommand": login.proxy} if login.proxy else {}),
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        # The user's own ssh configuration is meant for the user's own hosts.
        ssh = ["ssh", "-F", "none", "-T", "-a", "-x", "-i", str(login.key), "-p", str(login.port)]
        return [*ssh, *words, f"{login.user}@{login.host}", f"exec {self._window}"]

    # --- the mirror -------------------------------------------------------------------------------

    def _have(self) -> dict[str, tuple[int, str]]:
        """Return the size and last bytes of each growing file in the mirror."""
        self._mirror.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self._mirror / "known_hosts").touch(mode=0o600)
        have = {}
        for path in [*self._mirror.glob("progress/*.jsonl"), *self._mirror.glob("logs/*.log")]:
            name = path.relative_to(self._mirror).as_posix()
            if APPENDED.fullmatch(name):
                with path.open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - TAIL_BYTES))
                    have[name] = (size, base64.b64encode(file.read()).decode())
        return have

    def _take(self, message: Mapping[str, Any]) -> bool:
        """Write the node's file to the mirror. Return True if the message reports an error instead."""
        match message:
            case {"put": str(name), "text": str(text)} if name in PUT:
                self._replace(name, text.encode())
            case {"gone": str(name)} if name in PUT:
                (self._mirror / name).unlink(missing_ok=True)
            case {"append": str(name), "at": int(at), "data": str(data)} if APPENDED.fullmatch(name):
                self._append(name, at, base64.b64decode(data))
        return "trouble" in message

    def _append(self, name: str, at: int, data: bytes) -> None:
        path = self._mirror / name
        if at == 0:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            self._replace(name, data)
            return
        with path.open("r+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) < at:
                raise _BrokenLine(f"{name} has fewer bytes in the mirror than {at}, where the node goes on")
            # Writes go by offset, so two processes connected to one node write the same bytes at the same place.
            file.seek(at)
            while data:
                data = data[file.write(data) :]

    def _replace(self, name: str, content: bytes) -> None:
        write_durably(self._mirror / name, content)


class _Line:
    """One ssh process: lines out, lines in, and no call waits longer than a tenth of a second."""

    def __init__(self, command: list[str], have: Mapping[str, Any], tunnel: str | None) -> None:
        self.tunnel = tunnel
        self.local_port = _free_port() if tunnel else 0
        forward = ["-L", f"127.0.0.1:{self.local_port}:{tunnel}"] if tunnel else []
        self._process = subprocess.Popen(
            [command[0], *forward, *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is meant for the controller
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._in, self._out, self._err = (
            self._process.stdin.fileno(),
            self._process.stdout.fileno(),
            self._process.stderr.fileno(),
        )
        for handle in (self._in, self._out, self._err):
            os.set_blocking(handle, False)
        self.heard: float | None = None
        self._began = self._beaten = time.monotonic()
        self._unread, self._words = b"", b""
        self._unsent = bytearray()
        self.send({"have": have})

    def send(self, *messages: Mapping[str, Any]) -> None:
        for message in messages:
            self._unsent += json.dumps(message).encode() + b"\n"

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of a tenth of a second. Raises _BrokenLine when the connection ends or stalls."""
        now = time.monotonic()
        if now - self._beaten >= BEAT_SECONDS and len(self._unsent) < UNSENT_BYTES:
            self._beaten = now
            self.send({"beat": 1})
        readable, writable, _ = select.select([self._out, self._err], [self._in] if self._unsent else [], [], 0.1)
        if writable:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                del self._unsent[: os.write(self._in, self._unsent)]
        if self._err in readable:
            self._words = (self._words + os.read(self._err, 65536))[-4096:]
        if self._out in readable:
            data = os.read(self._out, 1 << 18)
            if not data:
                raise _BrokenLine(self._last_words())
            self.heard = time.monotonic()
            *lines, self._unread = (self._unread + data).split(b"\n")
            # A login shell may print lines of its own; skip these.
            return [json.loads(line) for line in lines if line.startswith(b"{")]
        # Only if nothing waits to be read: this process itself may have stood still.
        since, patience = (self._began, CONNECT_SECONDS) if self.heard is None else (self.heard, SILENCE_SECONDS)
        if now - since > patience:
            raise _BrokenLine(f"the node's window said nothing for {now - since:.0f} s {self._last_words()}".strip())
        return []

    def _last_words(self) -> str:
        """Return the last error line of ssh or of the remote side."""
        until = time.monotonic() + 1.0
        while self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        with contextlib.suppress(BlockingIOError):
            self._words += os.read(self._err, 65536)
        lines = [line for line in self._words.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"ssh ended with {self._process.returncode}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _free_port() -> int:
    """Return a port without a listener.

    If another process takes the port first, ssh fails and the next try gets a new port.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    """Return whether an HTTP server answers behind the tunnel.

    ssh itself accepts every connection, and drops the connection if no server listens.
    """
    with contextlib.suppress(OSError):
        with socket.create_connection(("127.0.0.1", port), timeout=DOOR_SECONDS) as connection:
            connection.settimeout(DOOR_SECONDS)
            connection.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            return bool(connection.recv(1))
    return False
