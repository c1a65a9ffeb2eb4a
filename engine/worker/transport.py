"""Carry calls of a worker or trainer to the coordinator: one call, one answer, blobs beside the messages.

A call with a lost answer is repeated. Every call is idempotent, or gets the answer `fenced` the second time. While the
coordinator's disk is full, the transport repeats the call until the disk has room: the run pauses, and loses nothing.
"""

import contextlib
import errno
import time
from collections.abc import Mapping
from typing import Any, Protocol

import httpx
import stamina

from engine.coordinator.coordinator import Coordinator
from engine.protocol.codec import Blobs, Head, decode_answer, decode_call, encode, pack, unpack
from engine.protocol.messages import Answer as TypedAnswer
from engine.protocol.messages import Call
from engine.storage.disk import when_there_is_room

Answer = tuple[Head, dict[str, bytes]]
"""The head of an answer, and its blobs."""

WAIT_MS = 500
"""Maximum wall milliseconds the coordinator may keep a caller with nothing to do."""

PRESENCE_GAP_SECONDS = 0.2
"""Seconds before a presence connection closed by the coordinator is opened again."""


class CoordinatorLost(Exception):
    """Failure to get an answer from the coordinator within the caller's patience."""


class CallRefused(Exception):
    """Refusal of a call by the coordinator: an unknown call, or weights no longer kept."""


class Transport(Protocol):
    """Carrier of calls. Raises CoordinatorLost if no answer comes, CallRefused if the answer is an error."""

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        """Make one call. With `wait`, an answer without news may take up to WAIT_MS."""


def ask(
    transport: Transport, call: Call, blobs: Blobs | None = None, *, wait: bool = False
) -> tuple[TypedAnswer, dict[str, bytes]]:
    """Make one call and return the answer. Raises the errors of the transport."""
    answer, answer_blobs = transport.call(encode(call), blobs, wait=wait)
    return decode_answer(answer), answer_blobs


class InprocTransport:
    """Transport to a coordinator in this process, for tests and single-process runs."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        return when_there_is_room(lambda: self._ask(head, blobs), _print)

    def _ask(self, head: Mapping[str, Any], blobs: Blobs | None) -> Answer:
        # Encode and decode, so tests use the same wire format as HTTP.
        sent, sent_blobs = unpack(pack(head, blobs))
        answer, answer_blobs = self._coordinator.handle(decode_call(sent), sent_blobs)
        self._coordinator.journal.sync()
        self._coordinator.tick()
        return unpack(pack(encode(answer), answer_blobs))


class HttpTransport:
    """Transport over HTTP with a token. The caller listens on no port. Several threads may call at once."""

    def __init__(self, host: str, port: int, token: str, *, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._client = httpx.Client(
            base_url=f"http://{host}:{port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(10.0, connect=2.0),
            trust_env=False,
        )

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        body = pack({**head, "wait_ms": WAIT_MS} if wait else head, blobs)
        response = when_there_is_room(lambda: self._post(body), _print)
        if response.status_code != 200:
            raise CallRefused(f"{head['call']}: {response.status_code} {response.text[:300]}")
        return unpack(response.content)

    def stay_present(self, worker: str, node: str, boot: int) -> None:
        """Keep a connection open until this process dies.

        The closed connection reports the death to the coordinator at once.
        """
        query = {"worker": worker, "node": node, "boot": str(boot)}
        while True:
            with contextlib.suppress(httpx.HTTPError):
                with self._client.stream("GET", "/presence", params=query, timeout=_OPEN_ENDED) as response:
                    for _ in response.iter_raw():
                        pass
            time.sleep(PRESENCE_GAP_SECONDS)

    def _post(self, body: bytes) -> httpx.Response:
        """Send one call. Raises OSError if the coordinator's disk is full, CoordinatorLost if patience ends."""
        try:
            for attempt in stamina.retry_context(
                on=httpx.TransportError, attempts=None, timeout=self._patience, wait_initial=0.05, wait_max=0.5
            ):
                with attempt:
                    response = self._client.post("/call", content=body)
        except httpx.TransportError as error:
            raise CoordinatorLost(f"no answer for {self._patience:.0f} s: {error}") from error
        if response.status_code == httpx.codes.INSUFFICIENT_STORAGE:
            raise OSError(errno.ENOSPC, response.text[:300])
        return response


_OPEN_ENDED = httpx.Timeout(10.0, connect=2.0, read=None)


def _print(text: str) -> None:
    print(f"coordinator: {text}", flush=True)
