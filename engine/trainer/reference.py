"""The reference of the loss: the model before training."""

from engine.algorithm_config import AlgorithmConfig
from engine.models.adapter import DiTAdapter
from engine.models.load import ReferencePolicy


def reference_of(adapter: DiTAdapter, algorithm: AlgorithmConfig, *, is_started: bool) -> ReferencePolicy | None:
    """Return the model as reference, if the loss has a term that holds the weights near it (`ReferencePolicy.of`)."""
    if algorithm.keeps_reference:
        return ReferencePolicy.of(adapter, is_started=is_started)
    return None
