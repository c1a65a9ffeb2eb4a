"""How a worker or trainer reaches the coordinator: one call, one answer, blobs beside it.

A lost answer is repeated: every call is idempotent, or answered with `fenced` the second time.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import httpx
import stamina

from engine.rollout.wire import Blobs, pack, unpack
from engine.runtime.coordinator import Coordinator

Answer = tuple[dict[str, Any], dict[str, bytes]]

WAIT_MS = 500
"""How long the coordinator may keep a caller that has nothing to do (wall time)."""


class CoordinatorLost(Exception):
    """The coordinator did not answer for longer than the caller's patience."""


class CallRefused(Exception):
    """The coordinator answered that it cannot do this: a full disk, a call it does not know."""


class Transport(Protocol):
    """Carries calls. Raises CoordinatorLost when nobody answers, CallRefused when the answer is an error."""

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        """One call. With `wait`, an answer that says "nothing yet" may take up to WAIT_MS to come."""


class InprocTransport:
    """Calls the coordinator in this process; for tests, and for what one process can do alone."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def call(self, head: Mapping[str, Any], blobs: Blobs | None = None, *, wait: bool = False) -> Answer:
        # Through the wire format, so that tests meet what HTTP would carry.
        sent, sent_blobs = unpack(pack(head, blobs))
        answer, answer_blobs = self._coordinator.call(sent, sent_blobs)
        self._coordinator.journal.sync()
        self._coordinator.tick()
        return unpack(pack(answer, answer_blobs))


class HttpTransport:
    """Calls out over HTTP with a token; the caller listens on nothing."""

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
        try:
            for attempt in stamina.retry_context(
                on=httpx.TransportError, attempts=None, timeout=self._patience, wait_initial=0.05, wait_max=0.5
            ):
                with attempt:
                    response = self._client.post("/call", content=body)
        except httpx.TransportError as error:
            raise CoordinatorLost(f"no answer for {self._patience:.0f} s: {error}") from error
        if response.status_code != 200:
            raise CallRefused(f"{head['call']}: {response.status_code} {response.text[:300]}")
        return unpack(response.content)
