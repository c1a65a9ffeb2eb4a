"""Errors of a device or a host without memory."""

import gc

import torch

WORDS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""Parts of the texts of errors that mean a failed allocation, but have no class of their own in torch."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that a device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the error's class if there is no text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def free_memory() -> None:
    """Return unused memory to the device. Call after the error and the tensors of its frames are released."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_of(device: torch.device) -> str:
    """Return the device's name and memory in words, for an error text."""
    if device.type != "cuda":
        return "this machine's memory"
    free, total = torch.cuda.mem_get_info(device)
    return f"the {total / 2**30:.0f} GiB of {torch.cuda.get_device_name(device)} ({free / 2**30:.1f} GiB are free)"
