"""Stable Diffusion 3 and 3.5: unpacked latents, CLIP and T5 text side by side, a pooled CLIP vector.

Conventions of the transformer (diffusers 0.39): latent [B, C, H, W], timestep = 1000 sigma, no text mask (padding is
attended to, like in the pipeline used to train the weights).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model_folder import ModelFolder
from engine.models.adapter import Conditioning
from engine.models.pipeline_text import PipelineText
from engine.models.text import EncodedText, TextEncoder, as_conditioning, guided, padded
from engine.models.unread import load_pipeline
from engine.models.vae import decode_images, freeze
from engine.noise_schedule import EVEN, ModelSchedule
from engine.parallel.communicator import SPGroup

SD3_LORA_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


class SD3Adapter:
    """`DiTAdapter` over diffusers' `SD3Transformer2DModel`."""

    doubles_guidance = False
    guidance_pair: SPGroup | None = None

    def __init__(
        self,
        transformer: nn.Module,
        vae: nn.Module,
        text: TextEncoder,
        latent_size: tuple[int, int],
        schedule: ModelSchedule = EVEN,
    ) -> None:
        """Create the adapter. `latent_size`: height and width of the latent; an image is larger by the VAE's factor."""
        self.transformer = transformer
        self.schedule = schedule
        self._vae = freeze(vae)
        self._text = text
        self._size = latent_size
        self.empty = self.encode([""])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return as_conditioning(self._text(prompts))

    def latent_shape(self) -> tuple[int, ...]:
        return (int(self.transformer.config.in_channels), *self._size)  # type: ignore[union-attr, arg-type]

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        return guided(self, x, sigma, conditioning, guidance)

    def branch(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        dtype: torch.dtype = self.transformer.pos_embed.proj.weight.dtype  # type: ignore[union-attr, assignment]
        output: Tensor = self.transformer(
            hidden_states=x.to(dtype),
            encoder_hidden_states=conditioning["hidden"].to(dtype),
            pooled_projections=conditioning["pooled"].to(dtype),
            timestep=1000.0 * sigma,
            return_dict=False,
        )[0]
        return output.float()

    def decode(self, x: Tensor) -> Tensor:
        return decode_images(self._vae, x)

    def lora_targets(self) -> Sequence[str]:
        return SD3_LORA_TARGETS


def load_sd3(folder: ModelFolder, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> SD3Adapter:
    """Load from a local diffusers folder, without its scheduler. Nothing is downloaded."""
    from diffusers import StableDiffusion3Pipeline

    pipeline, transformer = load_pipeline(StableDiffusion3Pipeline, folder, device, dtype)
    for encoder in (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
        if encoder is not None:
            freeze(encoder)

    def encode(prompts: Sequence[str]) -> EncodedText:
        hidden, _, pooled, _ = pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=folder.size.text_tokens,
        )
        return EncodedText(*padded(hidden, None, hidden.shape[1]), pooled)

    latent_size = folder.latent[1:]
    return SD3Adapter(transformer, pipeline.vae, PipelineText(pipeline, encode), latent_size, folder.schedule)
