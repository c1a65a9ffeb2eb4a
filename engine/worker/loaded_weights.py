"""The weights in a worker's model."""

import torch

from engine.models.merge import MergedAdapters
from engine.models.weights import set_weights
from engine.protocol.request import LoadWeights, WeightsKey
from engine.worker.weight_source import WeightSource


class LoadedWeights:
    """Loads weights into the model's trained parameters, and records the key and digest of the loaded weights.

    `merged`: the adapters that are merged into the base weights after every load; None: nothing is merged.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        source: WeightSource,
        merged: MergedAdapters | None = None,
    ) -> None:
        self._parameters, self._source, self._merged = parameters, source, merged
        self.key: tuple[WeightsKey, str] | None = None
        """The loaded weights and their digest. None: unknown, for example after a load that failed."""

    def load(self, order: LoadWeights) -> None:
        """Load the ordered weights.

        Loads nothing if other weights were published under the same key meanwhile: the next pull names the new digest.
        """
        with self._source.get(order.weights, order.digest) as stored:
            if stored is None:
                return
            self.key = None
            set_weights(self._parameters, stored)
        if self._merged is not None:
            self._merged.merge()
        self.key = (order.weights, order.digest)

    def require(self, weights: WeightsKey, digest: str) -> None:
        """Load weights unless the model has the weights already.

        Raises RuntimeError if other weights were published under the same key meanwhile.
        """
        if self.key != (weights, digest):
            self.load(LoadWeights(weights=weights, digest=digest))
        if self.key != (weights, digest):
            raise RuntimeError(f"weights {weights} with digest {digest} were published again meanwhile")
