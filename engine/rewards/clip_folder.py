"""A CLIP model of transformers in a local folder: embeddings of images and texts of length 1.

Used by the scorers `clip`, `pickscore` and `aesthetic`. The folder holds the model, the tokenizer and
`preprocessor_config.json`, as on the model's page. Images are resized with PIL, as in the published scorers; the
torchvision variant is not needed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from engine.diffusion.images import as_pil
from engine.reward_config import LocalModelConfig
from engine.rewards.reward import RewardError

FILES = (("config.json",), ("preprocessor_config.json",), ("tokenizer.json", "vocab.json"))
"""Files beside the weights; of each pair, one."""


class ClipFolder:
    """CLIP of a folder on a device. Raises RewardError if the folder holds no whole CLIP."""

    def __init__(self, config: LocalModelConfig, workdir: str | None, device: str) -> None:
        self.path = Path(workdir or ".") / config.path
        self._batch, self._device = config.batch, device
        self._dtype = dtype_of(config, device)
        if not self.path.is_dir():
            raise RewardError(
                f"reward.model.path is {config.path!r}, and there is no folder {self.path}; copy it there"
            )
        try:
            model = self._load()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = str(error).strip().partition("\n")[0]
            raise RewardError(
                f"the folder {self.path} cannot be read as CLIP ({first}); it needs config.json, the weights, the "
                "tokenizer's files and preprocessor_config.json"
            ) from error
        self._model = model.eval().requires_grad_(False).to(device)
        self.scale = float(model.logit_scale.float().exp())
        """Factor of cosines in CLIP's logits; 100 in the published models."""
        self.dimensions = int(model.config.projection_dim)

    def _load(self) -> Any:
        """Load model, tokenizer and image processor.

        transformers replaces missing files by defaults and missing weights by random ones, so both are looked for here.
        Raises ValueError, and any error of the loaders.
        """
        from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

        for names in FILES:
            if not any((self.path / name).is_file() for name in names):
                raise ValueError(f"there is no {' or '.join(names)}")
        loaded: Any = CLIPModel.from_pretrained(
            self.path, local_files_only=True, torch_dtype=self._dtype, output_loading_info=True
        )
        model, loading_info = loaded  # transformers' type hints leave out the loading information
        if missing := sorted(loading_info["missing_keys"]):
            raise ValueError(f"its weights have no {missing[0]}, and {len(missing)} names are missing in all")
        self._tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        self._processor = CLIPImageProcessorPil.from_pretrained(self.path, local_files_only=True)
        return model

    def image_embeddings(self, images: Tensor) -> Tensor:
        """Return the embeddings [B, D] in fp32 of images [B, 1 or 3, H, W] in [-1, 1]."""
        return self.embeddings_of([as_pil(image) for image in images])

    def embeddings_of(self, images: Sequence[Image.Image]) -> Tensor:
        """Return the embeddings [B, D] in fp32 of images of any sizes."""
        model, parts = self._model, []
        with torch.inference_mode():
            for part in _parts(images, self._batch):
                pixels = self._processor(images=list(part), return_tensors="pt")["pixel_values"]
                pooled = model.vision_model(pixel_values=pixels.to(self._device, self._dtype)).pooler_output
                parts.append(model.visual_projection(pooled).float().cpu())
        return normalize(torch.cat(parts), dim=-1)

    def text_embeddings(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings [B, D] in fp32. Texts beyond 77 tokens are cut. Equal texts are computed once."""
        different = list(dict.fromkeys(texts))
        model, parts = self._model, []
        with torch.inference_mode():
            for part in _parts(different, self._batch):
                # Always the full length: an embedding must not depend on the other texts of its batch.
                tokens = self._tokenizer(
                    part,
                    padding="max_length",
                    truncation=True,
                    max_length=int(model.config.text_config.max_position_embeddings),
                    return_tensors="pt",
                ).to(self._device)
                pooled = model.text_model(**tokens).pooler_output
                parts.append(model.text_projection(pooled).float().cpu())
        embeddings = normalize(torch.cat(parts), dim=-1)
        place = {text: index for index, text in enumerate(different)}
        return embeddings[[place[text] for text in texts]]

    def cosines(self, images: Tensor, texts: Sequence[str]) -> Tensor:
        """Return the cosine [B] of each image and its text."""
        return (self.image_embeddings(images) * self.text_embeddings(texts)).sum(dim=-1)


def dtype_of(config: LocalModelConfig, device: str) -> torch.dtype:
    """Return the number format of a scorer's model: bfloat16 on GPUs and float32 on CPUs, if not set."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def _parts(values: Any, size: int) -> Iterator[Any]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
