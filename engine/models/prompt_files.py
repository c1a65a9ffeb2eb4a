"""Encoded prompts on a node's disk, one file a prompt: `FOLDER/ENCODER/PROMPT.safetensors`, both digests.

All processes of a node share the folder. A file begins with the digest of its tensors; a file that does not match, for
example after a power cut, counts as missing and is written again. A full disk loses speed only.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from engine.models.text import EncodedText

IN_MEMORY = 256
"""Prompts that a process keeps in memory beside the files: 1 GB with FLUX, whose prompts are the largest."""

_DIGEST_BYTES = 32
_WHOLE_FILE, _SAMPLES = 1 << 20, 64
"""Files up to a megabyte count whole in an encoder's digest, larger files by 64 samples of 64 kB."""


class PromptFiles:
    """Encoded prompts in memory and, with a folder, on the disk. Each prompt is an `EncodedText` of one row."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._memory: OrderedDict[str, EncodedText] = OrderedDict()

    def keep_in(self, folder: Path, encoder: str) -> None:
        """Keep prompts on the disk from now on. `encoder`: digest of everything that changes an encoding but the text.

        Raises OSError if the folder cannot be made.
        """
        path = folder / encoder
        path.mkdir(parents=True, exist_ok=True)
        self._folder = path
        for prompt, row in self._memory.items():
            self._write(prompt, row)

    def has(self, prompt: str) -> bool:
        """Return True if the prompt is in memory, or its file exists. The file may turn out damaged."""
        return prompt in self._memory or (self._folder is not None and self._path(prompt).is_file())

    def get(self, prompt: str) -> EncodedText | None:
        """Return a prompt's encoding on the CPU, or None if there is none, or only a damaged file."""
        if prompt in self._memory:
            self._memory.move_to_end(prompt)
            return self._memory[prompt]
        encoded = self._read(prompt)
        if encoded is not None:
            self._remember(prompt, encoded)
        return encoded

    def put(self, prompt: str, row: EncodedText) -> None:
        """Keep a prompt's encoding of one row."""
        row = EncodedText(row.hidden.cpu(), row.mask.cpu(), None if row.pooled is None else row.pooled.cpu())
        self._remember(prompt, row)
        self._write(prompt, row)

    def _remember(self, prompt: str, row: EncodedText) -> None:
        self._memory[prompt] = row
        while len(self._memory) > IN_MEMORY:
            self._memory.popitem(last=False)

    def _path(self, prompt: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.blake2b(prompt.encode(), digest_size=16).hexdigest()}.safetensors"

    def _read(self, prompt: str) -> EncodedText | None:
        if self._folder is None:
            return None
        try:
            raw = self._path(prompt).read_bytes()
        except FileNotFoundError:
            return None
        head, body = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != head:
            return None
        return _unpacked(load(body))

    def _write(self, prompt: str, row: EncodedText) -> None:
        if self._folder is None:
            return
        body = save(_packed(row))
        path = self._path(prompt)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            # No fsync: the digest finds a file that a power cut damaged, and the prompt is encoded again.
            fresh.write_bytes(hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body)
            fresh.replace(path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            print(f"an encoded prompt was not kept in {path.parent}: {error}", flush=True)


def _packed(row: EncodedText) -> dict[str, Tensor]:
    """Return a row as tensors for a file, without the zeros behind its last token."""
    used = row.hidden[0].ne(0).any(dim=1).nonzero()
    tokens = int(used[-1]) + 1 if len(used) else 0
    tensors = {"hidden": row.hidden[:, :tokens].contiguous(), "mask": row.mask.contiguous()}
    return tensors if row.pooled is None else {**tensors, "pooled": row.pooled.contiguous()}


def _unpacked(tensors: dict[str, Tensor]) -> EncodedText:
    hidden, mask = tensors["hidden"], tensors["mask"]
    filled = torch.nn.functional.pad(hidden, (0, 0, 0, mask.shape[1] - hidden.shape[1]))
    return EncodedText(filled, mask, tensors.get("pooled"))


def joined(rows: Sequence[EncodedText], device: torch.device) -> EncodedText:
    """Return rows as one batch on the device."""
    pooled = [row.pooled.to(device) for row in rows if row.pooled is not None]
    return EncodedText(
        torch.cat([row.hidden.to(device) for row in rows]),
        torch.cat([row.mask.to(device) for row in rows]),
        torch.cat(pooled) if pooled else None,
    )


def digest_of_files(folders: Sequence[Path], more: Sequence[str]) -> str:
    """Return a digest of the files in these folders, and of further texts. Large files count by samples."""
    digest = hashlib.blake2b(digest_size=16)
    for text in more:
        digest.update(f"{text}\0".encode())
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
                for part in _parts(file):
                    digest.update(part)
    return digest.hexdigest()


def _parts(file: Path) -> list[bytes]:
    size = file.stat().st_size
    if size <= _WHOLE_FILE:
        return [file.read_bytes()]
    parts = []
    with file.open("rb") as opened:
        for sample in range(_SAMPLES):
            opened.seek((size - (1 << 16)) * sample // (_SAMPLES - 1))
            parts.append(opened.read(1 << 16))
    return parts
