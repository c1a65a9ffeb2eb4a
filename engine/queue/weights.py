"""Published weights: the versions that workers can load, by digest.

The promise: a worker keeps loaded weights only if the version and the digest agree, because a version may be published
anew with other bytes after a restart of the trainer.
"""

from collections.abc import Iterable

from engine.protocol.request import LoadWeights, WeightsKey


class PublishedWeights:
    """The weights that workers can load."""

    def __init__(self) -> None:
        self.live: WeightsKey | None = None
        """The newest weights that are no average. Idle workers load them ahead."""
        self.digests: dict[WeightsKey, str] = {}

    def publish(self, weights: WeightsKey, digest: str) -> None:
        """Make weights available to workers. Weights without `average` become the live weights."""
        self.digests[weights] = digest
        if not weights.average:
            self.live = weights

    def drop(self, needed: Iterable[WeightsKey]) -> list[WeightsKey]:
        """Drop the weights that are neither needed nor live. Return the dropped keys."""
        kept = {*needed, self.live}
        dropped = [key for key in self.digests if key not in kept]
        for key in dropped:
            del self.digests[key]
        return dropped

    def clear(self) -> None:
        """Forget all weights."""
        self.live = None
        self.digests.clear()

    def order(self, weights: WeightsKey | None, holds: tuple[WeightsKey, str] | None) -> LoadWeights | None:
        """Return the order to load these weights, or None if the worker holds them or no worker can load them."""
        if weights is None or weights not in self.digests:
            return None
        digest = self.digests[weights]
        return None if holds == (weights, digest) else LoadWeights(weights=weights, digest=digest)
