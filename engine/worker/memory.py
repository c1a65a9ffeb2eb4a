"""Errors of a device or a host without memory."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that a device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch has no exception class for a failed CPU allocation.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
