"""Trained weights as safetensors: bytes for small models and tests, files in pieces for everything else."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.storage.tensor_files import PIECE_BYTES, Stored, TensorEntry, TensorFile, header_of, write_pieces

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Dtypes of tensors, by the names of safetensors."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def get_weights(parameters: dict[str, torch.nn.Parameter]) -> bytes:
    """Return the trained weights as safetensors bytes: one copy of all weights, for small models."""
    return save({name: value.detach().contiguous().cpu() for name, value in parameters.items()})


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    whole: Callable[[str], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> TensorFile:
    """Write tensors durably to a file, one by one and each in pieces: the same bytes as safetensors writes.

    `whole`: returns the whole tensor of a name, if the tensors are divided over ranks. `dtype`: of the numbers in the
    file; None: as they are. The tensors must not change meanwhile. Raises OSError, e.g. if the disk is full.
    """
    formats = {name: tensor.dtype if dtype is None else dtype for name, tensor in tensors.items()}
    header, names = header_of(
        {
            name: (DTYPE_NAMES[formats[name]], tensor.shape, tensor.numel() * formats[name].itemsize)
            for name, tensor in tensors.items()
        }
    )

    def pieces() -> Iterator[bytes | memoryview]:
        yield header
        for name in names:
            tensor = tensors[name] if whole is None else whole(name)
            flat = tensor.detach().reshape(-1)  # copies one tensor if its memory has another order
            step = PIECE_BYTES // flat.element_size()
            for at in range(0, len(flat), step):
                piece = flat[at : at + step].to(formats[name]).cpu().view(torch.uint8)
                yield piece.numpy().data

    return write_pieces(path, pieces())


def set_weights(parameters: Mapping[str, torch.nn.Parameter], data: bytes | memoryview | Stored) -> None:
    """Copy stored weights into live parameters, in place and in pieces.

    Raises KeyError if a parameter is missing, ValueError if the data is not whole.
    """
    fill_tensors({name: parameter.detach() for name, parameter in parameters.items()}, data)


def fill_tensors(tensors: Mapping[str, Tensor], data: bytes | memoryview | Stored) -> None:
    """Copy stored tensors into these tensors, which may have another dtype, device or layout.

    Of a tensor whose rows are divided over ranks, only this rank's rows are read. Raises as `set_weights`.
    """
    stored = data if isinstance(data, Stored) else Stored.of_bytes(data)
    entries = stored.entries()
    missing = tensors.keys() - entries.keys()
    if missing:
        raise KeyError(f"these weights lack {sorted(missing)}")
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    for name, target in tensors.items():
        entry = entries[name]
        if isinstance(target, DTensor):
            _check_shape(target, entry)
            first, own = first_row(target), local_part(target)
            if len(own):
                _fill(own, entry.rows(first, len(own)), stored, buffer)
        else:
            _fill(target, entry, stored, buffer)


def read_tensors(data: bytes | memoryview | Stored, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return new tensors on a device with stored values. Raises ValueError if the data is not whole."""
    stored = data if isinstance(data, Stored) else Stored.of_bytes(data)
    tensors = {
        name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)
        for name, entry in stored.entries().items()
    }
    fill_tensors(tensors, stored)
    return tensors


def read_each(data: Stored, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors by name, one at a time, on the CPU. Raises ValueError if the data is not whole.

    `names`: of the wanted tensors, in this order; None: all.
    """
    buffer, entries = torch.empty(PIECE_BYTES, dtype=torch.uint8), data.entries()
    for name in entries if names is None else names:
        entry = entries[name]
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        _fill(tensor, entry, data, buffer)
        yield name, tensor


def _fill(target: Tensor, entry: TensorEntry, stored: Stored, buffer: Tensor) -> None:
    dtype = DTYPES[entry.dtype]
    _check_shape(target, entry)
    in_place = target.is_contiguous()
    flat = (target if in_place else torch.empty(target.shape, dtype=dtype)).view(-1)
    for begin in range(0, entry.size, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, entry.size - begin)]
        stored.read_into(entry.at + begin, piece.numpy().data)
        first = begin // dtype.itemsize
        flat[first : first + len(piece) // dtype.itemsize].copy_(piece.view(dtype))
    if not in_place:
        target.copy_(flat.view(target.shape))


def _check_shape(target: Tensor, entry: TensorEntry) -> None:
    if entry.shape != tuple(target.shape):
        raise ValueError(f"a tensor of shape {list(entry.shape)} does not fit into {list(target.shape)}")


@contextmanager
def exchanged(parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put other weights into the parameters inside the context, without a copy.

    The pointers are exchanged, so the other weights must be on the parameters' device, and no other thread may use the
    model meanwhile. Of parameters that are divided over ranks, the values are exchanged, with a copy of one part.
    """
    divided = {name: tensors[name] for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    if divided:
        _exchange_values(parameters, divided)
        try:
            yield
        finally:
            _exchange_values(parameters, divided)
        return
    mine = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = tensors[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = mine[name]


@torch.no_grad()
def _exchange_values(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        mine, its = local_part(parameters[name]), local_part(tensor)
        kept = mine.clone()
        mine.copy_(its)
        its.copy_(kept)


def first_row(tensor: DTensor) -> int:
    """Return the number of this rank's first row. FSDP2 cuts the rows like `torch.chunk`."""
    rows, mesh = tensor.shape[0], tensor.device_mesh
    rows_per_rank = -(-rows // mesh.size())
    return min(rows, mesh.get_local_rank() * rows_per_rank)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is divided over ranks. The part shares its memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
