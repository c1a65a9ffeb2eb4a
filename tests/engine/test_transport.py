"""Transport: calls survive lost answers and full disks, and a worker's death is noticed at once."""

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.clock import ScaledClock
from engine.config import RuntimeConfig
from engine.coordinator.journal import Journal
from engine.coordinator.open import open_coordinator
from engine.protocol.codec import pack, unpack
from engine.protocol.request import WeightsKey
from engine.storage import disk
from engine.storage.disk import log_to, when_there_is_room
from engine.worker.transport import CallRefused, HttpTransport, InprocTransport
from tests.engine.heads import weights_to_list


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(disk, "ASK_AGAIN_SECONDS", 0.02)


class Coordinator(ThreadingHTTPServer):
    """A server that answers with the given statuses, then echoes each call."""

    def __init__(self, *statuses):
        self.statuses, self.received = list(statuses), []
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def transport(self, patience_seconds=1.0):
        return HttpTransport("127.0.0.1", self.server_address[1], "token", patience_seconds=patience_seconds)

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        head, blobs = unpack(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append(head)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        body = pack(head, blobs) if status == 200 else b"No space left"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_full_disk_is_waited_out_with_two_log_lines(capsys):
    with Coordinator(*[507] * 20) as coordinator:
        answer, blobs = coordinator.transport(patience_seconds=0.1).call({"call": "finish"}, {"t": b"x"})
        assert (answer, blobs) == ({"call": "finish"}, {"t": b"x"})
        assert len(coordinator.received) == 21
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "No space left" in lines[0]
    assert "going on" in lines[1]


def test_other_refusals_are_raised():
    with Coordinator(400) as coordinator, pytest.raises(CallRefused, match="400"):
        coordinator.transport().call({"call": "dance"})


def test_several_threads_may_call_at_once():
    with Coordinator() as coordinator, ThreadPoolExecutor(8) as pool:
        transport = coordinator.transport()
        answers = pool.map(lambda i: transport.call({"call": i}, {"b": bytes([i])}), range(64))
        assert [(head["call"], blobs["b"]) for head, blobs in answers] == [(i, bytes([i])) for i in range(64)]


def test_other_disk_errors_are_not_waited_out():
    def broken():
        raise OSError(errno.EIO, "I/O error")

    with pytest.raises(OSError, match="I/O error"):
        when_there_is_room(broken, print)


class FullAtFirst(Journal):
    full = 0

    def append(self, *arguments, **options):
        if self.full:
            self.full -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(*arguments, **options)


def test_a_full_disk_is_waited_out_within_one_process_too(tmp_path, capsys):
    clock = ScaledClock(origin_ms=time.time_ns() // 1_000_000)
    coordinator = open_coordinator(tmp_path, clock=clock, runtime=RuntimeConfig())
    coordinator.log.journal = FullAtFirst(tmp_path)
    coordinator.journal.full = 3
    v0 = weights_to_list(WeightsKey(version=0))
    answer, _ = InprocTransport(coordinator).call({"call": "publish", "weights": v0}, {"weights": b"w"})
    assert answer["do"] == "published"
    assert coordinator.journal.full == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def print_on_a_full_disk():
    log_to(os.open("/dev/full", os.O_WRONLY))
    print("x" * 100_000, flush=True)
    print("never read")
    os._exit(7)


def test_a_log_on_a_full_disk_loses_only_lines():
    process = multiprocessing.get_context("forkserver").Process(target=print_on_a_full_disk)
    process.start()
    process.join()
    assert process.exitcode == 7


# --- presence


def be_present(port):
    HttpTransport("127.0.0.1", port, "token", patience_seconds=1.0).stay_present("spot/0", "spot", 2**62 + 1)


def accept(listener):
    connection, _ = listener.accept()
    connection.settimeout(60.0)
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        received += connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n.\r\n")
    return connection, received.decode()


def test_a_killed_worker_is_noticed_at_once_and_a_closed_presence_reopens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(120.0)  # the first process of a forkserver waits for its imports
        process = multiprocessing.get_context("forkserver").Process(
            target=be_present, args=(listener.getsockname()[1],), daemon=True
        )
        process.start()
        first, received = accept(listener)
        assert received.startswith(f"GET /presence?worker=spot%2F0&node=spot&boot={2**62 + 1} ")
        assert "Bearer token" in received
        first.close()
        second, _ = accept(listener)
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert second.recv(1) == b""
        assert time.monotonic() - killed < 10.0
        second.close()
        process.join()
