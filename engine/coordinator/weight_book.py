"""Keep the published weight versions, one safetensors file each, on the on-demand node's disk."""

import hashlib
from pathlib import Path

from engine.durable import write_durably
from engine.protocol.request import WeightsKey


class WeightBook:
    """Weight files by version. A version may be written again; its digest identifies the bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, weights: WeightsKey, data: bytes) -> None:
        """Write a version durably, before the journal's record of the version. Raises OSError if the disk is full."""
        write_durably(self._path(weights), data)

    def read(self, weights: WeightsKey) -> bytes:
        """Return a version's bytes. Raises KeyError if the weights were never published or are no longer needed."""
        try:
            return self._path(weights).read_bytes()
        except FileNotFoundError as error:
            raise KeyError(f"weights {weights} are not in the book") from error

    def drop(self, weights: WeightsKey) -> None:
        self._path(weights).unlink(missing_ok=True)

    def _path(self, weights: WeightsKey) -> Path:
        return self._folder / f"{weights}.safetensors"


def digest_of(data: bytes) -> str:
    """Return the digest that names the exact bytes of a set of weights."""
    return hashlib.sha256(data).hexdigest()[:32]
