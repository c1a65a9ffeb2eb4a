"""Half precision for candidates, which are only ranked. Trained seeds are rolled out in the precision of training."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def half_precision(transformer: nn.Module) -> Iterator[None]:
    """Compute in bfloat16 inside the context. The weights stay unchanged and are converted once.

    On a CPU, the exact GELU replaces the tanh approximation, which takes torch four times as long in bfloat16.
    The two differ by 5e-4 at most; bfloat16 resolves .004 at 1.
    """
    from diffusers.models.activations import GELU  # here, because the forking process must not load diffusers

    device = next(transformer.parameters()).device
    approximated = [
        module for module in transformer.modules() if isinstance(module, GELU) and module.approximate == "tanh"
    ]
    if device.type != "cpu":
        approximated = []
    for gelu in approximated:
        gelu.approximate = "none"
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield
    finally:
        for gelu in approximated:
            gelu.approximate = "tanh"


def precision(transformer: nn.Module, dtype: str) -> AbstractContextManager[None]:
    """Return the context that computes in `dtype`: "float32" or "bfloat16"."""
    return half_precision(transformer) if dtype == "bfloat16" else nullcontext()
