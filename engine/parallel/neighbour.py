"""Weights from the GPU beside: a worker that joins its node copies them out of a neighbour's memory (CUDA IPC).

    a neighbour that has the version: offer -> (a pipe, a store: any way for picklable values) -> joiner: copy_from

On CUDA only; on a CPU the node's shared memory serves the same end (engine/runtime/node_weights.py). Both processes
must see the neighbour's GPU under one number: a node's workers get the same CUDA_VISIBLE_DEVICES and choose their own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

Offer = dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]
"""By name: how another process maps a tensor of this one."""


def offer(parameters: Mapping[str, Tensor]) -> Offer:
    """What a joiner needs to copy these. For one joiner; they must stay as they are until it says that it is done.

    Raises ValueError for what is not on a GPU: a tensor on the CPU would be moved to other memory by it.
    """
    elsewhere = [name for name, parameter in parameters.items() if not parameter.is_cuda]
    if elsewhere:
        raise ValueError(f"{elsewhere[0]} is not on a GPU; use the node's shared memory (NodeWeights) on a CPU")
    return {name: reduce_tensor(parameter.detach()) for name, parameter in parameters.items()}


@torch.no_grad()
def copy_from(offered: Offer, parameters: Mapping[str, Tensor]) -> None:
    """Copy into live parameters, in place; when it returns, the neighbour may change its own again.

    Raises KeyError when one is missing.
    """
    missing = parameters.keys() - offered.keys()
    if missing:
        raise KeyError(f"the neighbour's weights lack {sorted(missing)}")
    for name, parameter in parameters.items():
        mapped, arguments = offered[name]
        parameter.copy_(mapped(*arguments))
    torch.cuda.synchronize()
