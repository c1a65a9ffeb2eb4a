"""Files of tensors on their way out of the trainer: to the coordinator, to the store of checkpoints, or both.

    write (in pieces, hashed, durable) -> publish and checkpoint give the file further names -> drop

A file is written once, however many take it over. The folder is emptied at the start of a trainer: what an earlier one
left there belongs to no version. While the disk is full, the trainer waits.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.models.weights import write_tensors
from engine.storage.disk import when_there_is_room
from engine.storage.tensor_files import TensorFile


class Outbox:
    """The folder of these files, on the coordinator's disk."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        """`warn`: tells of a full disk."""
        self._folder, self._warn = folder, warn
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)

    def write(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        whole: Callable[[str], Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> TensorFile:
        """Write tensors to a file of this name, and wait while the disk is full. See `write_tensors`."""
        path = self._folder / f"{name}.safetensors"
        return when_there_is_room(lambda: write_tensors(path, tensors, whole, dtype), self._warn)

    def drop(self, *files: TensorFile) -> None:
        """Remove files that everybody has taken over."""
        for file in files:
            file.path.unlink(missing_ok=True)
