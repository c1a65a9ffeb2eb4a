"""Trained weights as safetensors bytes."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from safetensors.torch import save

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of weights, by the names of safetensors."""


def get_weights(parameters: dict[str, torch.nn.Parameter]) -> bytes:
    """Return the trained weights as safetensors bytes."""
    return save({name: value.detach().contiguous().cpu() for name, value in parameters.items()})


def set_weights(parameters: dict[str, torch.nn.Parameter], data: bytes | memoryview) -> None:
    """Copy safetensors bytes into live parameters, in place and with one copy.

    Raises KeyError if a parameter is missing.
    """
    header_size = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + header_size]))
    missing = parameters.keys() - header.keys()
    if missing:
        raise KeyError(f"these weights lack {sorted(missing)}")
    with torch.no_grad(), warnings.catch_warnings():
        # The code only reads the views, so torch's warning about writable memory does not apply.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for name, parameter in parameters.items():
            entry = header[name]
            begin, end = entry["data_offsets"]
            if end > begin:
                dtype = DTYPES[entry["dtype"]]
                start = 8 + header_size + begin
                flat = torch.frombuffer(data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=start)
                parameter.copy_(flat.view(entry["shape"]))


@contextmanager
def exchanged(parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put other weights into the parameters inside the context, without a copy.

    The pointers are exchanged, so the other weights must be on the parameters' device, and no other thread may use the
    model meanwhile.
    """
    mine = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = tensors[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = mine[name]
