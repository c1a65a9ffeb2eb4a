"""Fetch the weights a worker is ordered to load, from the coordinator or from a nearer copy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from engine.coordinator.weight_book import digest_of
from engine.protocol.messages import FetchWeights
from engine.protocol.request import WeightsKey
from engine.worker.transport import CallRefused, Transport, ask


class WeightSource(Protocol):
    """A source of published weights. Raises the errors of its transport."""

    def get(self, weights: WeightsKey, digest: str) -> AbstractContextManager[memoryview | None]:
        """Yield the safetensors bytes with this digest.

        Read the bytes only inside the `with`, where the bytes never change.

        Yields None if other weights were published under this key in the meantime; the next pull names the new digest.
        """


class FromCoordinator:
    """Source that asks the coordinator every time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @contextmanager
    def get(self, weights: WeightsKey, digest: str) -> Iterator[memoryview | None]:
        data = self.fetch(weights, digest)
        yield None if data is None else memoryview(data)

    def fetch(self, weights: WeightsKey, digest: str) -> bytes | None:
        """Return the bytes with this digest, or None as in `get`. The caller may keep the bytes."""
        try:
            _, blobs = ask(self._transport, FetchWeights(weights=weights))
        except CallRefused:
            return None  # the weights are no longer needed
        data = blobs["weights"]
        return data if digest_of(data) == digest else None
