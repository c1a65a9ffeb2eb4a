"""FLUX.1: packed latent tokens with positions, T5 text, a pooled CLIP vector, and often distilled guidance.

Conventions of the transformer (diffusers 0.39): tokens [B, N, 4 C], timestep = sigma in [0, 1], `img_ids` and `txt_ids`
for the rotary embedding, no text mask. FLUX.1-dev was distilled with guidance as an input: the adapter passes the
guidance in, and no unconditional branch exists. FLUX.1-schnell has no guidance input and uses classifier-free guidance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model_folder import ModelFolder
from engine.models.adapter import Conditioning
from engine.models.pipeline_text import PipelineText
from engine.models.qwen_image import PATCH, unpack
from engine.models.text import EncodedText, TextEncoder, as_conditioning, guided, padded
from engine.models.unread import load_pipeline
from engine.models.vae import decode_images, freeze
from engine.noise_schedule import EVEN, ModelSchedule
from engine.parallel.communicator import SPGroup

FLUX_LORA_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


class FluxAdapter:
    """`DiTAdapter` over diffusers' `FluxTransformer2DModel`."""

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
        """Create the adapter.

        `latent_size`: even height and width of the latent; an image is larger by the VAE's factor.
        """
        self.transformer = transformer
        self.schedule = schedule
        self._vae = freeze(vae)
        self._text = text
        self._rows, self._columns = latent_size[0] // PATCH, latent_size[1] // PATCH
        self._positions = grid_positions(self._rows, self._columns)
        self._takes_guidance = bool(transformer.config.guidance_embeds)  # type: ignore[union-attr]
        self.empty = self.encode([""])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return as_conditioning(self._text(prompts))

    def latent_shape(self) -> tuple[int, ...]:
        return (self._rows * self._columns, int(self.transformer.config.in_channels))  # type: ignore[union-attr, arg-type]

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        if self._takes_guidance:
            return self._forward(x, sigma, conditioning, torch.full_like(sigma, guidance))
        return guided(self, x, sigma, conditioning, guidance)

    def branch(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._forward(x, sigma, conditioning, None)

    def _forward(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: Tensor | None) -> Tensor:
        dtype: torch.dtype = self.transformer.x_embedder.weight.dtype  # type: ignore[union-attr, assignment]
        hidden = conditioning["hidden"].to(dtype)
        output: Tensor = self.transformer(
            hidden_states=x.to(dtype),
            encoder_hidden_states=hidden,
            pooled_projections=conditioning["pooled"].to(dtype),
            timestep=sigma,
            img_ids=self._positions.to(x.device),
            txt_ids=torch.zeros(hidden.shape[1], 3, device=x.device),
            guidance=guidance,
            return_dict=False,
        )[0]
        return output.float()

    def decode(self, x: Tensor) -> Tensor:
        return decode_images(self._vae, unpack(x, self._rows, self._columns))

    def lora_targets(self) -> Sequence[str]:
        return FLUX_LORA_TARGETS


def grid_positions(rows: int, columns: int) -> Tensor:
    """Return row and column of every token: [rows columns, 3], the first number unused."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).reshape(-1, 3).float()


def load_flux(folder: ModelFolder, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> FluxAdapter:
    """Load from a local diffusers folder, without its scheduler. Nothing is downloaded."""
    from diffusers import FluxPipeline

    pipeline, transformer = load_pipeline(FluxPipeline, folder, device, dtype)
    freeze(pipeline.text_encoder)
    freeze(pipeline.text_encoder_2)

    def encode(prompts: Sequence[str]) -> EncodedText:
        hidden, pooled, _ = pipeline.encode_prompt(
            prompt=list(prompts), prompt_2=None, max_sequence_length=folder.size.text_tokens
        )
        return EncodedText(*padded(hidden, None, hidden.shape[1]), pooled)

    latent_size = folder.latent[1:]
    return FluxAdapter(transformer, pipeline.vae, PipelineText(pipeline, encode), latent_size, folder.schedule)
