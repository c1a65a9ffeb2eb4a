"""Sum of the gradients of an optimiser step in 64-bit fixed point: the same bits for every order of addition.

    fp32   value = integer x 2^-48,  |sum| < 2^15
    fp64   value = integer x 2^-48 + rest x 2^-96,  0 <= rest < 2^48

Additions of integers commute, and additions of floats do not. Each addend is rounded once, to 2^-48 or 2^-96. An
addend so large that the sum could leave 64 bits makes the sum not finite, whatever the order, so an overflow never goes
unseen.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

FRACTION_BITS = 48
"""2^-48 is 4e-15: far below the rounding of fp32 for the gradients of a trained model. fp64 needs a second word: AdamW
divides by the size of a gradient, which makes an error of 4e-15 in a small one an error of 1e-10 in a weight."""


class GradientSum:
    """The sum of at most `most` gradients, each a tensor for every parameter.

    Takes 8 bytes a trained weight, and 16 in fp64.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], most: int) -> None:
        self._parameters = parameters
        self._sums: list[Tensor] = []
        self._rests: list[Tensor | None] = []
        self._limit = 2.0 ** (63 - FRACTION_BITS) / (most + 1)
        self.is_finite = True
        """False once an addend was too large, or not a number."""

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add a gradient of every parameter. Shapes as the parameters'."""
        if not self._sums:
            self._sums = [torch.zeros_like(parameter, dtype=torch.int64) for parameter in self._parameters]
            self._rests = [
                torch.zeros_like(parameter, dtype=torch.int64) if parameter.dtype == torch.float64 else None
                for parameter in self._parameters
            ]
        for total, remainder, gradient in zip(self._sums, self._rests, gradients, strict=True):
            if not bool((gradient.abs() < self._limit).all()):
                self.is_finite = False
                return
            scaled = gradient.double().mul(2.0**FRACTION_BITS)  # exact, as is every step until a rounding
            if remainder is None:
                total.add_(scaled.round_().to(torch.int64))
                continue
            whole = scaled.floor()
            remainder.add_(scaled.sub_(whole).mul_(2.0**FRACTION_BITS).round_().to(torch.int64))
            carry = remainder >> FRACTION_BITS
            remainder.sub_(carry << FRACTION_BITS)
            total.add_(whole.to(torch.int64)).add_(carry)

    @torch.no_grad()
    def write(self) -> None:
        """Write the sum into `grad` of the parameters, or infinity if it is not finite. No addends: write nothing."""
        for parameter, total, remainder in zip(self._parameters, self._sums, self._rests, strict=False):
            if not self.is_finite:
                parameter.grad = torch.full_like(parameter, torch.inf)
                continue
            value = total.double()
            if remainder is not None:
                value.add_(remainder.double().mul_(2.0**-FRACTION_BITS))
            parameter.grad = value.mul_(2.0**-FRACTION_BITS).to(parameter.dtype)
