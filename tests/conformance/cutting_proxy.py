"""A TCP proxy on loopback that cuts each connection after some bytes, in the middle of a request or of an answer."""

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

LONGEST_LIFE_BYTES = 40_000
"""Bytes after which a connection is cut. A call with two images' states is about half as long."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that closes a connection without a FIN, like a lost peer."""


@dataclass
class _Pair:
    """Both ends of one connection through the proxy."""

    ends: tuple[socket.socket, socket.socket]
    bytes_left: int


class CuttingProxy:
    """A proxy that listens on `port` during the `with` block."""

    def __init__(self, target: int, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cuts = 0
        self._pairs: list[_Pair] = []

    def __enter__(self) -> "CuttingProxy":
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._pairs:
            self._cut(pair)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                pair = _Pair(ends=(client, server), bytes_left=self._random.randint(200, LONGEST_LIFE_BYTES))
                self._pairs.append(pair)
                for source, sink in (pair.ends, pair.ends[::-1]):
                    threading.Thread(target=self._pump, args=(pair, source, sink), daemon=True).start()

    def _pump(self, pair: _Pair, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for data in _received(source):
                pair.bytes_left -= len(data)
                if pair.bytes_left < 0:
                    sink.sendall(data[: len(data) // 2])
                    self.cuts += 1
                    break
                sink.sendall(data)
        self._cut(pair)

    def _cut(self, pair: _Pair) -> None:
        for end in pair.ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _received(source: socket.socket) -> Iterator[bytes]:
    while data := source.recv(4096):
        yield data
