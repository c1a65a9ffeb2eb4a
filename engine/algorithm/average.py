"""The running average of the trained weights."""

import torch
from torch import nn


class Average:
    """Exponential moving average of the trained weights, used by evaluation and `spotrl pull`."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self._parameters = parameters
        self._decay = decay
        self.tensors = {name: value.detach().clone() for name, value in parameters.items()}

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average towards the live weights. Call once per iteration."""
        for name, value in self._parameters.items():
            self.tensors[name].lerp_(value.detach(), 1.0 - self._decay)
