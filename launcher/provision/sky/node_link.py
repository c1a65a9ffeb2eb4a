"""The connection to a node: one ssh process, which carries the remote console of the node's folder and a tunnel.

controller's orders -> ssh -> engine/node/remote_console.py        node's files -> the mirror in the node's local folder

Every method returns at once; a thread does the work. The thread reconnects for ever, with growing gaps, and repeats all
current orders after each connect. So a broken connection costs time and loses nothing: the mirror continues from its
current state, in this process or the next (mirror.py). A stalled connection counts as broken: a heartbeat arrives each
second, or ssh is ended (ssh_line.py).
"""

import random
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.clock import boot_ms
from engine.node_spec import NodeSpec
from engine.protocol.console import AnnouncePreemption, Heartbeat, Order, RunAgent, SetTimeLeft, Trouble
from launcher.provision.sky.mirror import NodeMirror
from launcher.provision.sky.ssh_line import TUNNEL_SECONDS, BrokenLine, SshLine, does_answer

AGAIN_SECONDS = 5.0
"""Seconds until an order is repeated that the node could not carry out (a full disk)."""

FIRST_GAP_SECONDS, LONGEST_GAP_SECONDS = 0.2, 10.0


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
    """The time in ms that the node's money lasted at `at_boot_ms`.

    A repeated message subtracts the time passed since.
    """

    left_ms: int
    number: int
    at_boot_ms: int

    def left_now_ms(self) -> int:
        return self.left_ms - (boot_ms() - self.at_boot_ms)


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
        self._login, self._mirror = login, NodeMirror(mirror)
        self._window = shlex.join([python, "-P", "-m", "engine.node.remote_console", remote_folder, *agent_command])
        self._secrets = dict(secrets or {})
        self._lock = threading.Lock()
        self._spec: NodeSpec | None = None
        self._spec_number = self._last_number = 0
        self._money: _Money | None = None
        self._notice_ms: int | None = None
        self._wants = 0
        """Number of order changes so far. The thread sends the orders again when the number has changed."""
        self._closed = threading.Event()
        self._last_message_at: float | None = None
        self.messages = 0
        """Number of the node's messages so far."""
        self._looked = time.monotonic()
        self._open_tunnel: tuple[str, int] | None = None
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
                self._spec, self._spec_number = spec, self._next_number()
                self._wants += 1

    def rearm(self, left_ms: int) -> None:
        """Send the node the time that its money lasts from now, in ms."""
        with self._lock:
            self._money = _Money(left_ms=left_ms, number=self._next_number(), at_boot_ms=boot_ms())
            self._wants += 1

    def notice(self, deadline_ms: int) -> None:
        """Send the node the announced time of the preemption (UTC)."""
        with self._lock:
            if self._notice_ms != deadline_ms:
                self._notice_ms = deadline_ms
                self._wants += 1

    def tunnel(self, port: int) -> tuple[str, int] | None:
        """Return the local end of a tunnel to `port` of the node's private address. None: no server answers now."""
        spec = self._spec
        return self._open_tunnel if spec is not None and spec.coordinator_port == port else None

    @property
    def seconds_since_message(self) -> float | None:
        """Return the seconds since the node's last message; None: the node has never answered.

        The time is counted up to the thread's last step, so a pause of this process does not count as a node's silence.
        """
        return None if self._last_message_at is None else max(0.0, self._looked - self._last_message_at)

    def close(self) -> None:
        """End the connection soon. The agent continues."""
        self._closed.set()

    def _next_number(self) -> int:
        """Return a number for a new order, above the numbers of all earlier orders.

        The number is the time in ms, so a later process continues with higher numbers if its clock is right.
        """
        self._last_number = max(self._last_number + 1, time.time_ns() // 1_000_000)
        return self._last_number

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        gap = FIRST_GAP_SECONDS
        while not self._closed.is_set():
            line = None
            try:
                line = SshLine(self._command(), self._mirror.have(), self._tunnel())
                self._carry(line)
            except (BrokenLine, OSError, ValueError) as error:
                self.trouble = str(error)
            finally:
                self._open_tunnel = None
                if line is not None:
                    line.end()
                    gap = FIRST_GAP_SECONDS if line.last_report_at is not None else gap
            # Half of the gap is random, so that the nodes of a run do not all reconnect at once.
            until = time.monotonic() + gap * random.uniform(0.5, 1.0)
            while time.monotonic() < until and not self._closed.wait(0.1):
                self._looked = time.monotonic()
            gap = min(gap * 2, LONGEST_GAP_SECONDS)

    def _carry(self, line: SshLine) -> None:
        """Write the node's reports to the mirror and send orders, until `close` or until the tunnel must change.

        Raises BrokenLine when the connection ends or stalls.
        """
        sent, again, tunnel_looked = -1, None, 0.0
        while not self._closed.is_set():
            for report in line.reports():
                self._last_message_at = line.last_report_at
                self.messages += 1
                if isinstance(report, Trouble):
                    self.trouble, again = report.text, time.monotonic() + AGAIN_SECONDS
                    continue
                if not isinstance(report, Heartbeat):
                    self._mirror.take(report)
                if again is None:
                    self.trouble = ""
            now = self._looked = time.monotonic()
            if line.tunnel != self._tunnel():
                return
            if again is not None and now >= again:
                sent, again = -1, None
            if sent != self._wants:
                sent = self._wants
                line.send(*self._orders())
            if (
                line.last_report_at is not None
                and line.tunnel
                and not self._open_tunnel
                and now >= tunnel_looked + TUNNEL_SECONDS
            ):
                tunnel_looked = now
                if does_answer(line.local_port):
                    self._open_tunnel = ("127.0.0.1", line.local_port)

    def _orders(self) -> list[Order]:
        """Return all current orders.

        Every call returns all of them, because the node ignores orders that it has already.
        """
        with self._lock:
            orders: list[Order] = []
            if self._spec is not None:
                spec = self._spec.model_dump(mode="json")
                orders.append(RunAgent(spec=spec, number=self._spec_number, secrets=self._secrets))
            if self._money is not None:
                orders.append(SetTimeLeft(left_ms=self._money.left_now_ms(), number=self._money.number))
            if self._notice_ms is not None:
                orders.append(AnnouncePreemption(deadline_ms=self._notice_ms, source="the cloud's API"))
            return orders

    def _tunnel(self) -> str | None:
        """Return the tunnel's far end, or None. Only a trainer has a coordinator."""
        spec = self._spec
        return f"{spec.coordinator_host}:{spec.coordinator_port}" if spec and spec.role == "trainer" else None

    def _command(self) -> list[str]:
        login = self._login
        known_hosts = login.known_hosts or self._mirror.folder / "known_hosts"
        options = {
            "BatchMode": "yes",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "ControlMaster": "no",
            "ControlPath": "none",
            "StrictHostKeyChecking": "accept-new",
            "UserKnownHostsFile": f'"{known_hosts}"',
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
