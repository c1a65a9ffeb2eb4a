"""Fetch the weights a worker is ordered to load, from the coordinator or from a nearer copy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from engine.coordinator.weight_book import digest_of
from engine.protocol.messages import FetchWeights
from engine.protocol.request import WeightsKey
from engine.storage.tensor_files import Stored
from engine.worker.transport import CallRefused, Transport, ask


class WeightSource(Protocol):
    """A source of published weights. Raises the errors of its transport."""

    def get(self, weights: WeightsKey, digest: str) -> AbstractContextManager[Stored | None]:
        """Yield the weights with this digest.

        Read the weights only inside the `with`, where the bytes never change.

        Yields None if other weights were published under this key in the meantime; the next pull names the new digest.
        """


class FromCoordinator:
    """Source that asks the coordinator every time, in one call: for weights that are small or in this process."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @contextmanager
    def get(self, weights: WeightsKey, digest: str) -> Iterator[Stored | None]:
        try:
            _, blobs = ask(self._transport, FetchWeights(weights=weights))
        except CallRefused:
            yield None  # the weights are no longer needed
            return
        data = blobs["weights"]
        yield Stored.of_bytes(data) if digest_of(data) == digest else None
