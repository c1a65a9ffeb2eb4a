"""The engine's interface to a diffusion transformer of any family.

Families differ in text encoding, latent packing and the arguments of the forward pass. All other code (sampler,
log-probs, loss, queue) is written once against this protocol.
Convention, of rectified flow: x_s = (1 - s) data + s noise, s = sigma in [0, 1], velocity = dx/ds = noise - data.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from engine.noise_schedule import ModelSchedule
from engine.parallel.communicator import SPGroup

Conditioning = Mapping[str, Tensor]
"""Encoded prompts: named tensors, batch first, padded to a fixed text length to allow mixed rows."""


class DiTAdapter(Protocol):
    """A loaded model, completely on a single device. Rows of a batch never influence one another."""

    transformer: nn.Module
    """The trained and published module. With LoRA: the wrapped module."""

    schedule: ModelSchedule
    """Noise levels of the model's own pipeline, for `sampler.shift: auto`."""

    doubles_guidance: bool
    """True: `velocity` computes both branches of classifier-free guidance as one batch of twice the rows."""

    guidance_pair: SPGroup | None
    """Two workers of which each computes one branch of guidance in `velocity`, without gradient. None: this worker
    computes both."""

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Encode prompts to conditioning without gradient.

        A row depends on its prompt alone. With guidance, see `velocity`.
        """

    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of an image's latent without the batch: [S, C] packed, [C, H, W], or [C, F, H, W]."""

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        """Return the network's dx/dsigma.

        x        [B, *latent_shape]  fp32
        sigma    [B]                 noise level in (0, 1], may differ by row
        guidance 1 computes the conditional branch alone; above 1: v_uncond + guidance (v_cond - v_uncond), and what the
                 family's pipeline does besides (Qwen-Image: the norm of v_cond; FLUX.1-dev: an input of the network)
        returns  [B, *latent_shape]  fp32
        """

    def decode(self, x: Tensor) -> Tensor:
        """Decode latents to images in [-1, 1]: [B, C, H, W], or [B, C, F, H, W] for video. No gradient."""

    def lora_targets(self) -> Sequence[str]:
        """Return the module names for low-rank adapters, as in the published recipes."""


def rows(conditioning: Conditioning, index: Tensor) -> dict[str, Tensor]:
    """Return the conditioning of some rows of a batch."""
    return {name: value[index] for name, value in conditioning.items()}
