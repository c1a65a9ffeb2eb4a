"""The running average of the trained weights."""

import torch
from torch import nn


class Average:
    """Exponential moving average of the trained weights, used by evaluation and `spotrl pull`.

    The n-th move keeps min((1 + n) / (10 + n), decay) of the average, n from 1: the warm-up that flow_grpo and
    DiffusionNFT publish. A constant share would keep much of the base model for many iterations.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        """`decay`: largest share of the average that a move keeps."""
        self._parameters = parameters
        self._decay = decay
        self.tensors = {name: value.detach().clone() for name, value in parameters.items()}

    @torch.no_grad()
    def follow(self, batch: int) -> None:
        """Move the average towards the live weights. Call once per batch. `batch`: its number, from 0."""
        kept = min((2 + batch) / (11 + batch), self._decay)
        for name, value in self._parameters.items():
            self.tensors[name].lerp_(value.detach(), 1.0 - kept)
