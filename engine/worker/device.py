"""Choose the device of a node's process: its GPU if the node has any, else the CPU.

    runtime.device -> device_of (in the process itself) -> load_adapter puts the model on the device -> the rest follows

Promise: no code calls CUDA before the computing process is forked, because a process forked after a CUDA call cannot
use a GPU. Code that loads a model therefore calls `device_of`; the agent and its forkserver never do.
"""

from typing import Literal

import torch


def device_of(device: Literal["auto", "cpu", "cuda"], number: int) -> str:
    """Return the device of process `number` of a node (the trainer is 0).

    If processes outnumber GPUs, processes share GPUs. A negative number counts from the last GPU: -1 is the last.

    Under Ray, a worker sees only the GPU assigned by Ray, always as number 0. Raises RuntimeError if a GPU is required
    and torch can use none.
    """
    if device == "cpu":
        return "cpu"
    # The count alone may come from a driver too old for this torch.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        return f"cuda:{number % gpus}"
    if device == "cuda":
        raise RuntimeError(
            f"runtime.device is cuda, but torch {torch.__version__} can use no GPU here; look at the driver with "
            "nvidia-smi, or use runtime.device: auto, which computes on the CPU then"
        )
    return "cpu"
