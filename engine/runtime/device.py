"""Which device a process of a node computes on: its GPU if the node has any, else the CPU.

    runtime.device -> device_of (in the process itself) -> load_adapter puts the model there -> the rest follows it

The promise: nothing asks CUDA for anything before the process that computes was forked, because no fork of a process
that did may use a GPU. So `device_of` is called where a model is loaded, never by the agent or its forkserver.
"""

from typing import Literal

import torch


def device_of(wanted: Literal["auto", "cpu", "cuda"], number: int) -> str:
    """For process `number` of a node (the trainer is 0). More processes than GPUs share them.

    Under Ray a worker sees only the GPU that Ray gave it, which is then number 0 whatever its own is. Raises
    RuntimeError when a GPU is wanted and torch can use none.
    """
    if wanted == "cpu":
        return "cpu"
    # A count alone may come from a driver that is too old for this torch.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        return f"cuda:{number % gpus}"
    if wanted == "cuda":
        raise RuntimeError(
            f"runtime.device is cuda, but torch {torch.__version__} can use no GPU here; look at the driver with "
            "nvidia-smi, or use runtime.device: auto, which computes on the CPU then"
        )
    return "cpu"
