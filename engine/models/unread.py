"""A transformer whose values are read later, when its parameters are divided over the ranks of a trainer.

    empty_transformer -> parameters are divided (parallel/sharding.py) -> read_values: each rank reads its own rows

A rank then never holds the whole transformer. The largest need is the rank's own part and one tensor. The values are
those of `from_pretrained`: diffusers names the tensors of a file like the parameters, and rounds them to the format of
frozen weights. Pickled files are not read.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.model_folder import ModelFolder
from engine.models.weights import fill_tensors, local_part
from engine.storage.tensor_files import Stored

FILE = "diffusion_pytorch_model.safetensors"
"""File of a folder's weights. Large weights have several files, and FILE.index.json names the file of each tensor."""

_UNREAD = "spotrl_unread"
"""Attribute of a transformer whose values are not read yet: the folder with its files, and the dtype of a whole load.
"""


def load_pipeline(kind: Any, folder: ModelFolder, device: str, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """Return a diffusers pipeline without scheduler, on the device, and its transformer. Nothing is downloaded.

    `kind`: class of the pipeline. With `folder.reads_later`, the pipeline has no transformer, and the returned
    transformer has no values. With `folder.encodes_first`, only the text encoders are on the device.
    """
    left_out = {"scheduler": None, **({"transformer": None} if folder.reads_later else {})}
    pipeline = kind.from_pretrained(folder.path, local_files_only=True, torch_dtype=dtype, **left_out)
    for name, part in pipeline.components.items():
        if isinstance(part, nn.Module) and (name.startswith("text_encoder") or not folder.encodes_first):
            part.to(device)
    return pipeline, empty_transformer(folder.path, dtype) if folder.reads_later else pipeline.transformer


def empty_transformer(path: Path, dtype: torch.dtype) -> nn.Module:
    """Return the transformer of a diffusers folder. Its parameters take no memory. Buffers have values.

    `dtype`: of parameters, and of buffers that the files hold, as with `from_pretrained`.
    """
    # Import here only: the process that forks a node's processes must not load diffusers.
    import diffusers
    from accelerate import init_empty_weights

    _, name = json.loads((path / "model_index.json").read_text("utf-8"))["transformer"]
    kind = getattr(diffusers, name)
    config, before = kind.load_config(path / "transformer", local_files_only=True), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with init_empty_weights(include_buffers=False):  # makes one parameter at a time, and frees its memory
            transformer: nn.Module = kind.from_config(config)
    finally:
        torch.set_default_dtype(before)
    in_files = transformer.state_dict().keys()
    for name, buffer in transformer.named_buffers():
        buffer.data = buffer.data.to(dtype if name in in_files else buffer.dtype)
    setattr(transformer, _UNREAD, (path / "transformer", dtype))
    return transformer


def read_values(transformer: nn.Module, device: torch.device) -> None:
    """Give the parameters memory on the device, and read this rank's part of each. Nothing if they were read before.

    Prints the size of the part. Raises ValueError if the files lack a parameter.
    """
    unread: tuple[Path, torch.dtype] | None = getattr(transformer, _UNREAD, None)
    if unread is None:
        return
    folder, dtype = unread
    # `to_empty` would also drop the values of buffers, which the config gives.
    transformer._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    parameters = {name: parameter.detach() for name, parameter in transformer.named_parameters()}
    tensors, missing = {**parameters, **dict(transformer.named_buffers())}, set(parameters)
    for path in _files(folder):
        stored = Stored.of_path(path)
        names = tensors.keys() & stored.entries().keys()
        fill_tensors({name: tensors[name] for name in names}, stored)
        missing -= names
    if missing:
        raise ValueError(f"the files in {folder} lack {sorted(missing)}; download the model again")
    in_fp32 = set(getattr(transformer, "_keep_in_fp32_modules", None) or ())
    for name, parameter in parameters.items():
        if not in_fp32.intersection(name.split(".")):
            own = local_part(parameter)
            own.copy_(own.to(dtype))
    part, whole = (
        sum(local_part(parameter).nbytes for parameter in parameters.values()),
        sum(map(_nbytes, parameters.values())),
    )
    print(f"read {part / 1e6:.3f} of {whole / 1e6:.3f} MB of the transformer, this rank's part", flush=True)
    delattr(transformer, _UNREAD)


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a whole tensor, whichever part of it is here."""
    return tensor.numel() * tensor.element_size()


def _files(folder: Path) -> list[Path]:
    """Return the files of a transformer's weights. Raises ValueError if there are none as safetensors."""
    index = folder / f"{FILE}.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    if not (folder / FILE).is_file():
        raise ValueError(
            f"{folder} has no {FILE}; download the model as safetensors, or set runtime.trainer_ranks to 1"
        )
    return [folder / FILE]
