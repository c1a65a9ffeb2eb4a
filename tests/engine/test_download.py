"""Weights over HTTP: in pieces, with ranges that go on after a break, and only to those who may read them."""

import hashlib
import http.client
import socket
import threading

import pytest

from engine.coordinator.weight_book import digest_of
from engine.node_spec import role_token
from engine.protocol.request import WeightsKey
from engine.worker import download
from engine.worker.download import Download
from engine.worker.node_weights import NodeMemory, NodeWeights
from engine.worker.transport import CallRefused, CoordinatorLost
from tests.engine.fleet import TOKEN
from tests.engine.heads import weights_to_list
from tests.engine.served import Served

V0 = WeightsKey(version=0)
DATA = bytes(range(256)) * 40_000  # 10 MB
DIGEST = digest_of(DATA)


@pytest.fixture
def served(tmp_path):
    served = Served(tmp_path / "coordinator")
    publish(served, DATA)
    yield served
    served.close()


def publish(served, data):
    served.transport().call({"call": "publish", "weights": weights_to_list(V0)}, {"weights": data})


def a_download(port, *, role="rollout", patience=60.0):
    return Download("127.0.0.1", port, role_token(TOKEN, role), patience_seconds=patience)


class Memory:
    """A sink in memory that counts how often it began."""

    def __init__(self):
        self.size = self.have = self.begun = 0
        self.data = bytearray()

    def begin(self, size):
        if size != self.size:
            self.size, self.have, self.data = size, 0, bytearray()
            self.begun += 1

    def take(self, piece):
        self.data += piece
        self.have += len(piece)


class BreakingLine:
    """A line to the coordinator that breaks after some bytes. `requests`: the first byte of each request."""

    def __init__(self, port, breaks_after):
        self._port, self._breaks = port, list(breaks_after)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.requests = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            with caller, socket.create_connection(("127.0.0.1", self._port)) as server:
                request = caller.recv(65536)
                self.requests.append(int(request.split(b"bytes=")[1].split(b"-")[0]))
                server.sendall(request)
                left = self._breaks.pop(0) if self._breaks else 1 << 40
                while left > 0 and (piece := server.recv(min(left, 65536))):
                    left -= len(piece)
                    caller.sendall(piece)

    def close(self):
        self._listener.close()


def test_weights_arrive_in_whole(served):
    sink = Memory()
    assert a_download(served.port)(V0, DIGEST, sink)
    assert sink.data == DATA


def test_a_broken_line_is_taken_up_where_it_broke(served):
    line, sink = BreakingLine(served.port, [3_000_000, 0, 4_000_000]), Memory()
    assert a_download(line.port)(V0, DIGEST, sink)
    line.close()
    assert sink.data == DATA
    assert sink.begun == 1
    first, second, third, fourth = line.requests
    assert first == 0
    assert 2_000_000 < second == third < fourth < len(DATA)


def test_a_fetch_that_gets_no_byte_ends_with_its_patience(monkeypatch):
    monkeypatch.setattr(download, "GAP_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    with pytest.raises(CoordinatorLost, match="no byte of 0"):
        a_download(port, patience=0.1)(V0, DIGEST, Memory())


def test_replaced_weights_are_not_sent(served):
    publish(served, b"other")
    assert not a_download(served.port)(V0, DIGEST, Memory())
    assert not a_download(served.port)(WeightsKey(version=9), DIGEST, Memory())


def test_only_workers_and_the_trainer_may_read_weights(served):
    with pytest.raises(CallRefused, match="403"):
        a_download(served.port, role="controller")(V0, DIGEST, Memory())


@pytest.mark.parametrize("wanted", ["bytes=5-9", "bytes=-5", "pages=1-", f"bytes={len(DATA)}-"])
def test_other_ranges_are_refused(served, wanted):
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    headers = {"Authorization": f"Bearer {role_token(TOKEN, 'rollout')}", "Range": wanted}
    connection.request("GET", f"/weights?version=0&average=0&digest={DIGEST}", headers=headers)
    response = connection.getresponse()
    assert response.status == 400
    assert b"range" in response.read()
    connection.close()


def test_a_version_published_again_during_a_fetch_goes_on_with_the_old_bytes(served):
    """The file was open, and the digest is the old one: the worker gets what it asked for, or nothing."""

    class Republishes(Memory):
        def take(self, piece):
            super().take(piece)
            if self.have == len(piece):
                publish(served, bytes(len(DATA)))

    sink = Republishes()
    assert a_download(served.port)(V0, DIGEST, sink)
    assert hashlib.sha256(sink.data).digest() == hashlib.sha256(DATA).digest()


def test_a_node_checks_what_it_fetched(served, tmp_path):
    source = NodeWeights(NodeMemory.make(tmp_path), a_download(served.port))
    with source.get(V0, DIGEST) as stored:
        assert stored.to_bytes() == DATA
    served.coordinator.queue.weights.digests[V0] = "0" * 32
    with source.get(V0, "0" * 32) as stored:
        assert stored is None
