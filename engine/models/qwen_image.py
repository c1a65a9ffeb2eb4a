"""Qwen-Image: packed latent tokens, a text stream with a mask, true classifier-free guidance.

Conventions of the transformer (diffusers 0.39): tokens [B, N, 4 C] of 2 x 2 latent patches, timestep = sigma in [0, 1],
`img_shapes` for the rotary embedding, no pooled text. As in the diffusers pipeline, each token's guided velocity gets
the norm of the conditional velocity, in rollout, training and evaluation. Gradients flow through the norms.
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

PATCH = 2

QWEN_LORA_TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)


class QwenImageAdapter:
    """`DiTAdapter` over diffusers' `QwenImageTransformer2DModel`."""

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
        self.empty = self.encode([""])

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return as_conditioning(self._text(prompts))

    def latent_shape(self) -> tuple[int, ...]:
        return (self._rows * self._columns, int(self.transformer.config.in_channels))  # type: ignore[union-attr, arg-type]

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        return guided(self, x, sigma, conditioning, guidance, keeps_norm=True)

    def branch(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        dtype: torch.dtype = self.transformer.img_in.weight.dtype  # type: ignore[union-attr, assignment]
        output: Tensor = self.transformer(
            hidden_states=x.to(dtype),
            encoder_hidden_states=conditioning["hidden"].to(dtype),
            encoder_hidden_states_mask=conditioning["mask"],
            timestep=sigma,
            img_shapes=[[(1, self._rows, self._columns)]] * len(x),
            return_dict=False,
        )[0]
        return output.float()

    def decode(self, x: Tensor) -> Tensor:
        return decode_images(self._vae, unpack(x, self._rows, self._columns))

    def lora_targets(self) -> Sequence[str]:
        return QWEN_LORA_TARGETS


def unpack(x: Tensor, rows: int, columns: int) -> Tensor:
    """Turn tokens of 2 x 2 patches into a latent: [B, rows columns, 4 C] -> [B, C, 2 rows, 2 columns].

    Also FLUX's packing.
    """
    channels = x.shape[2] // (PATCH * PATCH)
    cut = x.reshape(-1, rows, columns, channels, PATCH, PATCH)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, PATCH * rows, PATCH * columns)


def load_qwen_image(folder: ModelFolder, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> QwenImageAdapter:
    """Load from a local diffusers folder, without its scheduler. Nothing is downloaded."""
    from diffusers import QwenImagePipeline

    pipeline, transformer = load_pipeline(QwenImagePipeline, folder, device, dtype)
    freeze(pipeline.text_encoder)

    def encode(prompts: Sequence[str]) -> EncodedText:
        # An empty prompt has no token behind the template; the upstream code uses a blank too.
        hidden, mask = pipeline.encode_prompt(prompt=[prompt or " " for prompt in prompts])
        return EncodedText(*padded(hidden, mask, folder.size.text_tokens))

    latent_size = folder.latent[1:]
    return QwenImageAdapter(transformer, pipeline.vae, PipelineText(pipeline, encode), latent_size, folder.schedule)
