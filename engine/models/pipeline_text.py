"""The text encoders of a diffusers pipeline: every prompt is encoded once, then the encoders leave the GPU.

    load: encoders on the GPU -> prepare(the job's prompts) -> encoders on the CPU -> the transformer to the GPU
    a prompt that was not prepared: the encoders come back, encode it and the next prompts of the job, and leave again

Text encoders are large: 16.6 GB of Qwen-Image's 58 GB. Prompts are encoded one at a time, so an encoding does not
depend on the prompts beside it, and every node of a run with the same kind of device computes the same bits.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from engine.models.adapter import DiTAdapter
from engine.models.prompt_files import PromptFiles, digest_of_files, joined
from engine.models.text import EncodedText, TextEncoder
from engine.out_of_memory import free_memory
from engine.versions import installed_versions

MOST_AHEAD = 2000
"""Prompts encoded at once ahead of their use: a minute on an H100 with Qwen-Image, and 8 GB of disk with FLUX."""

ROOM = 1.25
"""Free GPU memory that the encoders need to come back, in sizes of their weights: the weights and their activations."""


class PipelineText:
    """A `TextEncoder` on a pipeline's text encoders. See the module docstring.

    Until `prepare`, the encoders stay where they are, and prompts are kept in memory only.
    """

    def __init__(self, pipeline: Any, encode: TextEncoder) -> None:
        """Take the text encoders of a loaded pipeline. `encode`: calls the pipeline's `encode_prompt`.

        The pipeline keeps no more than the configs of its other modules, because diffusers moves the tokens of a prompt
        to the device of the pipeline's first module, and later that is not the encoders' device.
        """
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module) and not name.startswith("text_encoder"):
                vars(pipeline)[name] = SimpleNamespace(config=part.config, dtype=part.dtype)
        self._pipeline, self._encode = pipeline, encode
        self._encoders = [component for component in pipeline.components.values() if isinstance(component, nn.Module)]
        self.device = next(self._encoders[0].parameters()).device
        self._files = PromptFiles()
        self._ahead: Sequence[str] = ()
        self._leaves = self._said = False

    def __call__(self, prompts: Sequence[str]) -> EncodedText:
        encoded = {prompt: self._files.get(prompt) for prompt in dict.fromkeys(prompts)}
        missing = [prompt for prompt, row in encoded.items() if row is None]
        if missing:
            self._come_back(missing[0])
            encoded |= {prompt: self._encoded(prompt) for prompt in missing}
            self._encode_ahead(missing[-1])
            self._leave()
        return joined([row for prompt in prompts if (row := encoded[prompt]) is not None], self.device)

    def prepare(self, prompts: Sequence[str], folder: Path, *, first: int = 0) -> None:
        """Encode the job's prompts, at most `MOST_AHEAD` of them, and let the encoders leave the GPU.

        `prompts`: distinct, in the order of their use. `folder`: for files that all processes of the node share.
        `first`: number of the first prompt to encode; processes that begin at different prompts share the work.
        """
        try:
            self._files.keep_in(folder, self._digest())
        except OSError as error:
            print(f"encoded prompts are not kept in {folder}: {error}", flush=True)
        self._ahead = prompts
        some = prompts[:MOST_AHEAD]
        begun, encoded = time.perf_counter(), 0
        for prompt in [*some[first:], *some[:first]]:
            encoded += self._encode_if_missing(prompt)
        seconds = time.perf_counter() - begun
        print(f"encoded {encoded} prompts in {seconds:.1f} s, of {len(some)} that the job uses first", flush=True)
        self._leaves = True
        self._leave()

    @property
    def is_on_gpu(self) -> bool:
        return any(parameter.is_cuda for encoder in self._encoders for parameter in encoder.parameters())

    def _encode_ahead(self, after: str) -> None:
        """Encode the job's prompts after this prompt, which will be used next."""
        if self._leaves and after in self._ahead:
            start = self._ahead.index(after) + 1
            for prompt in self._ahead[start : start + MOST_AHEAD]:
                self._encode_if_missing(prompt)

    def _encode_if_missing(self, prompt: str) -> bool:
        if self._files.has(prompt):
            return False
        self._encoded(prompt)
        return True

    @torch.no_grad()
    def _encoded(self, prompt: str) -> EncodedText:
        row = self._encode([prompt])
        self._files.put(prompt, row)
        return row

    def _leave(self) -> None:
        if self._leaves:
            self._move(torch.device("cpu"))
            if self.device.type == "cuda":
                free_memory()

    def _come_back(self, prompt: str) -> None:
        """Move the encoders to the GPU, or leave them on the CPU if the GPU has no room."""
        if not self._leaves:
            return
        if self.device.type == "cuda":
            free_memory()
            weights = sum(p.numel() * p.element_size() for encoder in self._encoders for p in encoder.parameters())
            if torch.cuda.mem_get_info(self.device)[0] > ROOM * weights:
                self._move(self.device)
        if not self._said:
            self._said = True
            where = "GPU" if self.is_on_gpu else "CPU"
            print(f"prompt {prompt!r} was not prepared: the text encoders encode it on the {where}", flush=True)

    def _move(self, device: torch.device) -> None:
        for encoder in self._encoders:
            encoder.to(device)

    def _digest(self) -> str:
        """Return a digest of everything that changes an encoding: files, text length, dtype, device and versions."""
        probe = self._encoded("")
        shape = f"{tuple(probe.hidden.shape)} {probe.hidden.dtype} {self.device.type}"
        versions = [f"{name} {version}" for name, version in sorted(installed_versions().items())]
        path = Path(self._pipeline.name_or_path)
        parts = [name for name in sorted(self._pipeline.components) if name.startswith(("text_encoder", "tokenizer"))]
        return digest_of_files([path / name for name in parts], [type(self._pipeline).__name__, shape, *versions])


def prepare_prompts(
    adapter: DiTAdapter, prompts: Callable[[], Sequence[str]], folder: Path, *, share: float = 0.0
) -> None:
    """Encode the job's prompts once, if the model has text encoders that can leave the GPU.

    `prompts`: called only then. `share`: 0 to 1, the part of the prompts before this process's first.
    """
    text = getattr(adapter, "_text", None)  # shipped models, and adapters of tests, have small encoders of their own
    if isinstance(text, PipelineText):
        texts = prompts()
        text.prepare(texts, folder, first=int(share * min(len(texts), MOST_AHEAD)))
