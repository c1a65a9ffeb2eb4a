"""The weights that make the rollouts of the open batch, beside the trained weights.

Workers roll out a batch with the weights that were published before it. After the batch's first optimiser step, the
trained weights differ from those. The trainer still needs them: for late rollouts of its own, for log-probs that it
computes again, and for DiffusionNFT's loss.

    keep (before an optimiser step) -> active (any number of times) -> advance (the batch is trained)

Until the first `keep` both are the same tensors and cost no memory.

Early groups of a batch were made with the weights before those (TCSS). The trainer keeps them for one batch more if it
must compute the log-probs of such groups: `advance` sets them aside, and `forget_before` drops them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, assert_never

import torch
from torch import Tensor, nn

from engine.models.weights import exchanged


def decay_of(schedule: Literal["none", "gradual", "late"], steps: int) -> float:
    """Return the share of the old policy's weights that is kept after a batch (DiffusionNFT, arXiv 2509.16117).

    steps    optimiser steps of the run so far, those of the batch included, as DiffusionNFT's public code counts
    returns  0 to below 1
    """
    match schedule:
        case "none":
            return 0.0
        case "gradual":
            return min(0.001 * steps, 0.5)
        case "late":
            return min(0.0075 * max(0, steps - 75), 0.999)
        case _:
            assert_never(schedule)


class OldPolicy:
    """The old policy of a trainer. See the module docstring."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept: dict[str, Tensor] | None = None
        self._before: dict[str, Tensor] | None = None
        self._is_active = False

    @property
    def differs(self) -> bool:
        """Return True if the old policy is a copy of its own, not the trained weights."""
        return self._kept is not None

    @property
    def tensors(self) -> Mapping[str, Tensor] | None:
        """Return the old policy's own copy by name, or None if the old policy is the trained weights."""
        return self._kept

    @property
    def before(self) -> Mapping[str, Tensor] | None:
        """Return the weights that made the early groups of the open batch, by name.

        None: they are the old policy's, because the batch before changed no weight or because nothing needs them.
        """
        return self._before

    def keep(self) -> None:
        """Keep a copy of the trained weights, unless a copy is kept. Call before every optimiser step."""
        if self._kept is None:
            self._kept = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put the old policy into the model inside the context. No gradient and no optimiser step may happen there.

        Contexts may be nested: between the steps of a rollout, the trainer computes log-probs of another.
        """
        if self._kept is None or self._is_active:
            yield
            return
        self._is_active = True
        try:
            with exchanged(self._parameters, self._kept):
                yield
        finally:
            self._is_active = False

    @contextmanager
    def before_active(self) -> Iterator[None]:
        """Put the weights that made the open batch's early groups into the model inside the context, as `active`."""
        if self._before is None:
            with self.active():
                yield
            return
        with exchanged(self._parameters, self._before):
            yield

    @torch.no_grad()
    def advance(self, decay: float, *, keeps_before: bool = False) -> None:
        """Move the old policy to the trained weights: old = decay x old + (1 - decay) x trained.

        Call once per batch, after its last optimiser step. With decay 0 the copy is dropped. `keeps_before`: the next
        batch may have early groups, whose log-probs the trainer computes.
        """
        self._before = self._kept if keeps_before else None
        if decay == 0 or self._kept is None:
            self._kept = None
            return
        if keeps_before:
            self._kept = {name: value.clone() for name, value in self._kept.items()}
        for name, parameter in self._parameters.items():
            self._kept[name].lerp_(parameter.detach(), 1.0 - decay)

    def forget_before(self) -> None:
        """Drop the weights of early groups. Call if the next batch has none."""
        self._before = None

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the old policy of a checkpoint."""
        self._kept = self._on_device(tensors)

    def restore_before(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the weights of early groups of a checkpoint."""
        self._before = self._on_device(tensors)

    def _on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[name].to(value.device) for name, value in self._parameters.items()}
