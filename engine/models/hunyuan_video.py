"""HunyuanVideo: video, with the text of a language model beside a pooled CLIP vector, and distilled guidance.

Conventions of the transformer (diffusers 0.39): latent [B, C, F, H, W], timestep = 1000 sigma, guidance = 1000 times
the job's, text with a mask. The published model was distilled with guidance as an input (6 in its pipeline): the
adapter passes the guidance in, and no unconditional branch exists. A transformer without that input uses
classifier-free guidance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model_folder import ModelFolder
from engine.models.adapter import Conditioning
from engine.models.pipeline_text import PipelineText
from engine.models.text import EncodedText, TextEncoder, as_conditioning, guided, padded
from engine.models.unread import load_pipeline
from engine.models.vae import decode_video, freeze
from engine.noise_schedule import EVEN, ModelSchedule
from engine.parallel.communicator import SPGroup

HUNYUAN_VIDEO_LORA_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)


class HunyuanVideoAdapter:
    """`DiTAdapter` over diffusers' `HunyuanVideoTransformer3DModel`."""

    doubles_guidance = False
    guidance_pair: SPGroup | None = None

    def __init__(
        self,
        transformer: nn.Module,
        vae: nn.Module,
        text: TextEncoder,
        latent_size: tuple[int, int, int],
        schedule: ModelSchedule = EVEN,
    ) -> None:
        """Create the adapter. `latent_size`: frames, height and width of the latent."""
        self.transformer = transformer
        self.schedule = schedule
        self._vae = freeze(vae)
        self._text = text
        self._size = latent_size
        self._takes_guidance = bool(transformer.config.guidance_embeds)  # type: ignore[union-attr]
        self.empty = self.encode([""])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return as_conditioning(self._text(prompts))

    def latent_shape(self) -> tuple[int, ...]:
        return (int(self.transformer.config.in_channels), *self._size)  # type: ignore[union-attr, arg-type]

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        if self._takes_guidance:
            return self._forward(x, sigma, conditioning, 1000.0 * torch.full_like(sigma, guidance))
        return guided(self, x, sigma, conditioning, guidance)

    def branch(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._forward(x, sigma, conditioning, None)

    def _forward(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: Tensor | None) -> Tensor:
        dtype: torch.dtype = self.transformer.x_embedder.proj.weight.dtype  # type: ignore[union-attr, assignment]
        output: Tensor = self.transformer(
            hidden_states=x.to(dtype),
            encoder_hidden_states=conditioning["hidden"].to(dtype),
            encoder_attention_mask=conditioning["mask"],
            pooled_projections=conditioning["pooled"].to(dtype),
            timestep=1000.0 * sigma,
            guidance=guidance,
            return_dict=False,
        )[0]
        return output.float()

    def decode(self, x: Tensor) -> Tensor:
        return decode_video(self._vae, x)

    def lora_targets(self) -> Sequence[str]:
        return HUNYUAN_VIDEO_LORA_TARGETS


def load_hunyuan_video(
    folder: ModelFolder, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> HunyuanVideoAdapter:
    """Load from a local diffusers folder, without its scheduler. Nothing is downloaded."""
    from diffusers import HunyuanVideoPipeline

    pipeline, transformer = load_pipeline(HunyuanVideoPipeline, folder, device, dtype)
    freeze(pipeline.text_encoder)
    freeze(pipeline.text_encoder_2)

    def encode(prompts: Sequence[str]) -> EncodedText:
        hidden, pooled, mask = pipeline.encode_prompt(prompt=list(prompts), max_sequence_length=folder.size.text_tokens)
        return EncodedText(*padded(hidden, mask, folder.size.text_tokens), pooled)

    return HunyuanVideoAdapter(
        transformer, pipeline.vae, PipelineText(pipeline, encode), folder.latent, folder.schedule
    )
