"""Wan: video. Latents have a time axis, [C, F, H, W], and images become frames.

Conventions of the transformer (diffusers 0.39): latent [B, C, F, H, W], timestep = 1000 sigma, UMT5 text padded with
zeros and without a mask. Wan 2.2's pair of transformers (each for a range of noise levels) is refused
(engine/model_parts.py): only one of the two would be trained.
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

WAN_LORA_TARGETS = (
    "attn1.to_q",
    "attn1.to_k",
    "attn1.to_v",
    "attn1.to_out.0",
    "attn2.to_q",
    "attn2.to_k",
    "attn2.to_v",
    "attn2.to_out.0",
    "ffn.net.0.proj",
    "ffn.net.2",
)


class WanAdapter:
    """`DiTAdapter` over diffusers' `WanTransformer3DModel`."""

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
        self.empty = self.encode([""])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return as_conditioning(self._text(prompts))

    def latent_shape(self) -> tuple[int, ...]:
        return (int(self.transformer.config.in_channels), *self._size)  # type: ignore[union-attr, arg-type]

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        return guided(self, x, sigma, conditioning, guidance)

    def branch(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        # Not the first parameter's dtype: diffusers keeps some of Wan's parameters in fp32, whatever the loading dtype.
        dtype: torch.dtype = self.transformer.patch_embedding.weight.dtype  # type: ignore[union-attr, assignment]
        output: Tensor = self.transformer(
            hidden_states=x.to(dtype),
            encoder_hidden_states=conditioning["hidden"].to(dtype),
            timestep=1000.0 * sigma,
            return_dict=False,
        )[0]
        return output.float()

    def decode(self, x: Tensor) -> Tensor:
        return decode_video(self._vae, x)

    def lora_targets(self) -> Sequence[str]:
        return WAN_LORA_TARGETS


def load_wan(folder: ModelFolder, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> WanAdapter:
    """Load from a local diffusers folder, without its scheduler. Nothing is downloaded."""
    from diffusers import WanPipeline

    pipeline, transformer = load_pipeline(WanPipeline, folder, device, dtype)
    freeze(pipeline.text_encoder)

    def encode(prompts: Sequence[str]) -> EncodedText:
        hidden, _ = pipeline.encode_prompt(
            prompt=list(prompts), do_classifier_free_guidance=False, max_sequence_length=folder.size.text_tokens
        )
        return EncodedText(*padded(hidden, None, folder.size.text_tokens))

    return WanAdapter(transformer, pipeline.vae, PipelineText(pipeline, encode), folder.latent, folder.schedule)
