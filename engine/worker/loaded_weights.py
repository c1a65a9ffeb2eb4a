"""The weights in a worker's model."""

import torch

from engine.models.weights import set_weights
from engine.protocol.request import LoadWeights, WeightsKey
from engine.worker.weight_source import WeightSource


class LoadedWeights:
    """Loads weights into the model's trained parameters, and records the key and digest of the loaded weights."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], source: WeightSource) -> None:
        self._parameters, self._source = parameters, source
        self.key: tuple[WeightsKey, str] | None = None
        """The loaded weights and their digest. None: unknown, for example after a load that failed."""

    def load(self, order: LoadWeights) -> None:
        """Load the ordered weights.

        Loads nothing if other weights were published under the same key meanwhile: the next pull names the new digest.
        """
        with self._source.get(order.weights, order.digest) as data:
            if data is None:
                return
            self.key = None
            set_weights(self._parameters, data)
        self.key = (order.weights, order.digest)

    def require(self, weights: WeightsKey, digest: str) -> None:
        """Load weights unless the model has the weights already.

        Raises RuntimeError if other weights were published under the same key meanwhile.
        """
        if self.key != (weights, digest):
            self.load(LoadWeights(weights=weights, digest=digest))
        if self.key != (weights, digest):
            raise RuntimeError(f"weights {weights} with digest {digest} were published again meanwhile")
