"""One ssh process to a node: JSON lines out, JSON lines in, and a tunnel. A stalled connection counts as broken."""

import contextlib
import json
import os
import select
import socket
import subprocess
import time

from engine.protocol.console import Have, Heartbeat, Order, Report, decode_report, encode_order

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""Seconds without a heartbeat after which the connection is ended and made anew."""
CONNECT_SECONDS = 30.0
"""Seconds until the first heartbeat, which may take longer: ssh exchanges keys, and Python starts on a booting VM."""
TUNNEL_SECONDS = 0.5
"""Seconds between two probes of the tunnel's far end, and the longest time of a probe."""

UNSENT_BYTES = 1 << 20
"""Unsent bytes above which no more heartbeats are queued. A remote console that reads nothing is
then detected by its silence."""


class BrokenLine(Exception):
    """The reason for the end of a connection, as text."""


class SshLine:
    """One ssh process. No call waits longer than a tenth of a second."""

    def __init__(self, command: list[str], have: Have, tunnel: str | None) -> None:
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
        self.last_report_at: float | None = None
        self._began = self._heartbeat_sent = time.monotonic()
        self._unread, self._words = b"", b""
        self._unsent = bytearray()
        self.send(have)

    def send(self, *orders: Order) -> None:
        for order in orders:
            self._unsent += json.dumps(encode_order(order)).encode() + b"\n"

    def reports(self) -> list[Report]:
        """Wait at most a tenth of a second, and return the reports received.

        Raises BrokenLine when the connection ends or stalls.
        """
        now = time.monotonic()
        if now - self._heartbeat_sent >= HEARTBEAT_SECONDS and len(self._unsent) < UNSENT_BYTES:
            self._heartbeat_sent = now
            self.send(Heartbeat())
        readable, writable, _ = select.select([self._out, self._err], [self._in] if self._unsent else [], [], 0.1)
        if writable:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                del self._unsent[: os.write(self._in, self._unsent)]
        if self._err in readable:
            self._words = (self._words + os.read(self._err, 65536))[-4096:]
        if self._out in readable:
            data = os.read(self._out, 1 << 18)
            if not data:
                raise BrokenLine(self._last_words())
            self.last_report_at = time.monotonic()
            *lines, self._unread = (self._unread + data).split(b"\n")
            # A login shell may print lines of its own; skip these.
            try:
                read = [decode_report(json.loads(line)) for line in lines if line.startswith(b"{")]
            except RecursionError:
                raise BrokenLine("the remote console sent JSON that is nested too deeply") from None
            return [report for report in read if report is not None]
        # Judge the silence only when no data is waiting. After a pause of this process, reports are waiting to be read.
        since, patience = (
            (self._began, CONNECT_SECONDS) if self.last_report_at is None else (self.last_report_at, SILENCE_SECONDS)
        )
        if now - since > patience:
            raise BrokenLine(f"the remote console sent nothing for {now - since:.0f} s {self._last_words()}".strip())
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


def does_answer(port: int) -> bool:
    """Return whether an HTTP server answers behind the tunnel.

    ssh itself accepts every connection, and drops the connection if no server listens.
    """
    with contextlib.suppress(OSError):
        with socket.create_connection(("127.0.0.1", port), timeout=TUNNEL_SECONDS) as connection:
            connection.settimeout(TUNNEL_SECONDS)
            connection.sendall(b"HEAD / HTTP/1.0\r\n\r\n")
            return bool(connection.recv(1))
    return False
