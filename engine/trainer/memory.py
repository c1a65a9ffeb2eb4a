"""Remember the rows of a training pass that fit into the device's memory.

a pass runs out of memory -> the rows halve (algorithm/transaction.py) -> warning, state, checkpoint -> next trainer
"""

import torch

from engine.algorithm.transaction import Trainer
from engine.storage.checkpoint import RowsThatFit
from engine.trainer.report import Reporter
from engine.trainer.state import TrainerState


class TrainingMemory:
    """Reports every halving, and keeps the number in the trainer's state."""

    def __init__(self, trainer: Trainer, state: TrainerState, reporter: Reporter) -> None:
        self._trainer = trainer
        self._state = state
        self._reporter = reporter
        trainer.on_fewer_rows = self._fewer_rows

    def restore(self) -> None:
        """Use the number of a restored checkpoint. A number found on another kind of device does not count."""
        fits = self._state.fits
        if fits is not None and fits.device == self._device:
            self._trainer.rows_per_forward = min(fits.rows, self._trainer.config.rows_per_forward)

    @property
    def _device(self) -> str:
        device = self._trainer.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def _fewer_rows(self, rows: int, error: str) -> None:
        self._state.fits = RowsThatFit(device=self._device, rows=rows)
        self._reporter.warn(
            f"a training pass ran out of memory; passes have at most {rows} rows from now on, and the optimiser step "
            f"starts again: set algorithm.rows_per_forward: {rows} to begin with that ({error})"
        )
