"""The adapter of every family that is one file (engine/families/): the code that all of them share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.family import Family
from engine.model_folder import ModelFolder
from engine.models.adapter import Conditioning
from engine.models.pipeline_text import PipelineText
from engine.models.text import EncodedText, TextEncoder, as_conditioning, guided, padded
from engine.models.unread import load_pipeline
from engine.models.vae import decoded, freeze
from engine.noise_schedule import EVEN, ModelSchedule
from engine.parallel.communicator import SPGroup


class FamilyAdapter:
    """`DiTAdapter` over a transformer of diffusers, by the functions of its family."""

    doubles_guidance = False
    guidance_pair: SPGroup | None = None

    def __init__(
        self,
        family: Family,
        transformer: nn.Module,
        vae: nn.Module,
        text: TextEncoder,
        latent_size: tuple[int, int],
        schedule: ModelSchedule = EVEN,
    ) -> None:
        """Create the adapter. `latent_size`: height and width of the VAE's latent, multiples of `family.packed`."""
        self.transformer = transformer
        self.schedule = schedule
        self._family = family
        self._vae = freeze(vae)
        self._text = text
        self._size = latent_size[0] // family.packed, latent_size[1] // family.packed
        self.empty = self.encode([""])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return as_conditioning(self._text(prompts))

    def latent_shape(self) -> tuple[int, ...]:
        return (int(self.transformer.config.in_channels), *self._size)  # type: ignore[union-attr, arg-type]

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        return guided(self, x, sigma, conditioning, guidance)

    def branch(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # Not the first parameter's dtype: adapters are fp32, whatever the frozen weights are.
        dtype = next(p.dtype for name, p in self.transformer.named_parameters() if "lora" not in name)
        hidden, mask = conditioning["hidden"].to(dtype), conditioning["mask"]
        return self._family.forward(self.transformer, x.to(dtype), sigma, hidden, mask).float()

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        return decoded(self._vae, self._family.to_decoder(self._vae, x))

    def lora_targets(self) -> Sequence[str]:
        return self._family.lora_targets(self.transformer)


def load_by_family(
    family: Family, folder: ModelFolder, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> FamilyAdapter:
    """Load from a local diffusers folder, without its scheduler. Nothing is downloaded."""
    import diffusers

    pipeline: Any
    pipeline, transformer = load_pipeline(getattr(diffusers, family.pipeline.name), folder, device, dtype)
    freeze(pipeline.text_encoder)

    def encode(prompts: Sequence[str]) -> EncodedText:
        hidden, mask = family.encode(pipeline, list(prompts), folder.size.text_tokens)
        return EncodedText(*padded(hidden, mask, folder.size.text_tokens))

    vae = pipeline.vae  # the pipeline keeps its configuration only, from the next line on
    text = PipelineText(pipeline, encode)
    return FamilyAdapter(family, transformer, vae, text, folder.latent[1:], folder.schedule)
