"""Weight copies between GPUs: a joining worker copies weights from a neighbour's memory (CUDA IPC).

    neighbour with the version: offer -> (a pipe, a store: any channel for picklable values) -> joiner: copy_from

CUDA only. On a CPU, the node's shared memory serves the same purpose (engine/worker/node_weights.py). Both processes
must see the neighbour's GPU under the same number: a node's workers get the same CUDA_VISIBLE_DEVICES and each worker
chooses its own GPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

Offer = dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]
"""By name: the function and arguments to map a tensor of this process into another process."""


def offer(parameters: Mapping[str, Tensor]) -> Offer:
    """Return the handles to copy these parameters, for a single joiner.

    The parameters must stay unchanged until the joiner reports the end of the copy. Raises ValueError for a parameter
    that is not on a GPU: `reduce_tensor` would move a CPU tensor to other memory.
    """
    elsewhere = [name for name, parameter in parameters.items() if not parameter.is_cuda]
    if elsewhere:
        raise ValueError(f"{elsewhere[0]} is not on a GPU; use the node's shared memory (NodeWeights) on a CPU")
    return {name: reduce_tensor(parameter.detach()) for name, parameter in parameters.items()}


@torch.no_grad()
def copy_from(offered: Offer, parameters: Mapping[str, Tensor]) -> None:
    """Copy the offered weights into live parameters, in place.

    After the return, the neighbour may change its weights again. Raises KeyError if a parameter is missing.
    """
    missing = parameters.keys() - offered.keys()
    if missing:
        raise KeyError(f"the neighbour's weights lack {sorted(missing)}")
    for name, parameter in parameters.items():
        mapped, arguments = offered[name]
        parameter.copy_(mapped(*arguments))
    torch.cuda.synchronize()
