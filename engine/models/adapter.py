"""What the engine asks of a diffusion transformer, whatever its family.

A family differs in how text is encoded, how latents are packed and what its forward pass is called with;
everything else (sampler, log-probs, loss, queue) is written once against this protocol.
Convention (research notes rl 1): x_s = (1 - s) data + s noise, s = sigma in [0, 1], velocity = dx/ds = noise - data.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

Conditioning = Mapping[str, Tensor]
"""Encoded prompts: named tensors, batch first, padded to one fixed text length so that rows can be mixed."""


class DiTAdapter(Protocol):
    """One loaded model, all of it on one device. Rows of a batch never influence one another."""

    transformer: nn.Module
    """What is trained and published. With LoRA: the wrapped module."""

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Text to conditioning, no gradient; depends on the prompt alone. With guidance, see `velocity`."""

    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one picture's latent, without the batch: [S, C] packed, [C, H, W], or [C, F, H, W]."""

    def velocity(self, x: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float) -> Tensor:
        """The network's dx/dsigma.

        x        [B, *latent_shape]  fp32
        sigma    [B]                 noise level in (0, 1], may differ by row
        guidance 1 computes the conditional branch alone; above 1: v_uncond + guidance (v_cond - v_uncond)
        returns  [B, *latent_shape]  fp32
        """

    def decode(self, x: Tensor) -> Tensor:
        """Latents to pictures in [-1, 1]: [B, C, H, W], or [B, C, F, H, W] for video. No gradient."""

    def lora_targets(self) -> Sequence[str]:
        """Module names that low-rank adapters are put on (research notes rl 1.2)."""


def rows(conditioning: Conditioning, index: Tensor) -> dict[str, Tensor]:
    """The conditioning of some rows of a batch."""
    return {name: value[index] for name, value in conditioning.items()}
