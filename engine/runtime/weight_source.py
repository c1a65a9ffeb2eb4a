"""Where a worker gets the weights that it is told to load: from the coordinator, or from a copy that is nearer."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from engine.rollout.request import WeightsKey
from engine.rollout.wire import weights_to_list
from engine.runtime.transport import CallRefused, Transport
from engine.runtime.weight_book import digest_of


class WeightSource(Protocol):
    """Lends weights. Raises what its transport raises."""

    def get(self, weights: WeightsKey, digest: str) -> AbstractContextManager[memoryview | None]:
        """The safetensors bytes with this digest, to be read inside the `with` only: nobody changes them meanwhile.

        None: other weights were published under this key in the meantime; the next pull says so.
        """


class FromCoordinator:
    """Asks the coordinator every time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @contextmanager
    def get(self, weights: WeightsKey, digest: str) -> Iterator[memoryview | None]:
        data = self.fetch(weights, digest)
        yield None if data is None else memoryview(data)

    def fetch(self, weights: WeightsKey, digest: str) -> bytes | None:
        """As `get`, but to keep."""
        try:
            _, blobs = self._transport.call({"call": "weights", "weights": weights_to_list(weights)})
        except CallRefused:
            return None  # nobody needs them any more
        data = blobs["weights"]
        return data if digest_of(data) == digest else None
