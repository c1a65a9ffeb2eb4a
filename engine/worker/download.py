"""Fetch published weights from the coordinator's server, in pieces and with ranges.

A fetch that breaks goes on from the byte it reached, in this process or in a later one. Nothing holds Python's lock
for longer than a piece.
"""

import http.client
import time
from urllib.parse import urlencode

from engine.protocol.request import WeightsKey
from engine.storage.disk import FULL, when_there_is_room
from engine.worker.sink import Sink
from engine.worker.transport import CallRefused, CoordinatorLost

PIECE_BYTES = 1 << 20
"""Bytes of a read from the connection."""

SILENT_SECONDS = 10.0
"""Seconds without a byte after which the connection is opened again."""

GAP_SECONDS = 0.2
"""Seconds between two tries."""


class Download:
    """The `Fetch` of a node over HTTP. Several threads may call at once."""

    def __init__(self, host: str, port: int, token: str, *, patience_seconds: float) -> None:
        """`patience_seconds`: seconds without any new byte after which a fetch gives up."""
        self._host, self._port, self._token = host, port, token
        self._patience = patience_seconds

    def __call__(self, weights: WeightsKey, digest: str, sink: Sink) -> bool:
        """Fetch weights. Waits while the disk of the sink is full. Raises CoordinatorLost when patience ends."""
        return when_there_is_room(lambda: self._fetch(weights, digest, sink), _print)

    def _fetch(self, weights: WeightsKey, digest: str, sink: Sink) -> bool:
        until = time.monotonic() + self._patience
        while True:
            had = sink.have
            try:
                return self._continue(weights, digest, sink)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, OSError) and error.errno in FULL:
                    raise
                now = time.monotonic()
                if sink.have > had:
                    until = now + self._patience
                elif now > until:
                    raise CoordinatorLost(f"no byte of {weights} for {self._patience:.0f} s: {error}") from error
                time.sleep(GAP_SECONDS)

    def _continue(self, weights: WeightsKey, digest: str, sink: Sink) -> bool:
        """Ask for the missing bytes once. Raises OSError or HTTPException if the connection breaks."""
        if sink.size and sink.have == sink.size:
            return True
        query = urlencode({"version": weights.version, "average": int(weights.average), "digest": digest})
        headers = {"Authorization": f"Bearer {self._token}", "Range": f"bytes={sink.have}-"}
        connection = http.client.HTTPConnection(self._host, self._port, timeout=SILENT_SECONDS)
        try:
            connection.request("GET", f"/weights?{query}", headers=headers)
            response = connection.getresponse()
            if response.status == http.client.NOT_FOUND:
                return False
            if response.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN, http.client.BAD_REQUEST):
                raise CallRefused(f"weights: {response.status} {response.read(300).decode(errors='replace')}")
            if response.status != http.client.PARTIAL_CONTENT:
                raise http.client.HTTPException(f"the coordinator answered {response.status}")
            first, total = _range(response.getheader("Content-Range", ""))
            sink.begin(total)
            if first != sink.have:
                raise http.client.HTTPException(f"asked for byte {sink.have}, got byte {first}")
            buffer = memoryview(bytearray(PIECE_BYTES))
            while sink.have < total:
                got = response.readinto(buffer)
                if not got:
                    raise http.client.HTTPException(f"the connection closed at byte {sink.have} of {total}")
                sink.take(buffer[:got])
            return True
        finally:
            connection.close()


def _range(text: str) -> tuple[int, int]:
    """Return the first byte and the size of all bytes from `bytes FIRST-LAST/SIZE`. Raises HTTPException."""
    try:
        where, total = text.removeprefix("bytes ").split("/")
        return int(where.split("-")[0]), int(total)
    except ValueError:
        raise http.client.HTTPException(f"not a range: {text!r}") from None


def _print(text: str) -> None:
    print(f"weights: {text}", flush=True)
