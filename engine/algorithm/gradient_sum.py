"""Sum of the gradients of an optimiser step in 64-bit fixed point: the same bits for every order of addition.

    value = integer x 2^-48,  |sum| < 2^15

Additions of integers commute, and additions of floats do not. Each addend is rounded to 2^-48 once. An addend so large
that the sum could leave 64 bits makes the sum not finite, whatever the order, so an overflow never goes unseen.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

FRACTION_BITS = 48
"""2^-48 is 4e-15: far below the rounding of fp32 for the gradients of a trained model."""


class GradientSum:
    """The sum of at most `most` gradients, each a tensor for every parameter. Takes 8 bytes a trained weight."""

    def __init__(self, parameters: Sequence[nn.Parameter], most: int) -> None:
        self._parameters = parameters
        self._sums: list[Tensor] = []
        self._limit = 2.0 ** (63 - FRACTION_BITS) / (most + 1)
        self.is_finite = True
        """False once an addend was too large, or not a number."""

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add a gradient of every parameter. Shapes as the parameters'."""
        if not self._sums:
            self._sums = [torch.zeros_like(parameter, dtype=torch.int64) for parameter in self._parameters]
        for total, gradient in zip(self._sums, gradients, strict=True):
            if not bool((gradient.abs() < self._limit).all()):
                self.is_finite = False
                return
            total.add_(gradient.double().mul_(2.0**FRACTION_BITS).round_().to(torch.int64))

    @torch.no_grad()
    def write(self) -> None:
        """Write the sum into `grad` of the parameters, or infinity if it is not finite. No addends: write nothing."""
        for parameter, total in zip(self._parameters, self._sums, strict=False):
            if self.is_finite:
                parameter.grad = total.double().mul_(2.0**-FRACTION_BITS).to(parameter.dtype)
            else:
                parameter.grad = torch.full_like(parameter, torch.inf)
