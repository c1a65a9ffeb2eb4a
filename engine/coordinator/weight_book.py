"""Keep the published weight versions, one safetensors file each, on the on-demand node's disk."""

import hashlib
from pathlib import Path

from engine.durable import write_durably
from engine.protocol.messages import WeightsFile
from engine.protocol.request import WeightsKey
from engine.storage.tensor_files import link_durably


class WeightBook:
    """Weight files by version. A version may be written again; its digest identifies the bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, weights: WeightsKey, data: bytes) -> None:
        """Write a version durably, before the journal's record of the version. Raises OSError if the disk is full."""
        write_durably(self.path(weights), data)

    def adopt(self, weights: WeightsKey, file: WeightsFile) -> None:
        """Take over a durable file of the same disk, without a copy. Raises ValueError if the file is not whole."""
        try:
            size = Path(file.path).stat().st_size
            if size != file.size:
                raise ValueError(f"{file.path} has {size} bytes; the publish names {file.size}")
            link_durably(Path(file.path), self.path(weights))
        except FileNotFoundError:
            raise ValueError(f"{file.path} is gone: a later trainer removed it") from None

    def read(self, weights: WeightsKey) -> bytes:
        """Return a version's bytes. Raises KeyError if the weights were never published or are no longer needed."""
        try:
            return self.path(weights).read_bytes()
        except FileNotFoundError as error:
            raise KeyError(f"weights {weights} are not in the book") from error

    def drop(self, weights: WeightsKey) -> None:
        self.path(weights).unlink(missing_ok=True)

    def path(self, weights: WeightsKey) -> Path:
        """Return the file of a version, which may not exist."""
        return self._folder / f"{weights}.safetensors"


DIGEST_CHARACTERS = 32
"""Characters of SHA-256 in hex that name a set of weights."""


def digest_of(data: bytes) -> str:
    """Return the digest that names the exact bytes of a set of weights."""
    return hashlib.sha256(data).hexdigest()[:DIGEST_CHARACTERS]
