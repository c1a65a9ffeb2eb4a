"""Text for the model families: encoded once, padded to a fixed length, with an unconditional branch beside the text.

Text encoders are large and differ by family. Adapters therefore take any callable with the promise of `TextEncoder`.
Folders of real weights use the encoder of their diffusers pipeline (`encode_prompt`); tests use a small encoder.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.adapter import Conditioning
from engine.parallel.communicator import SPGroup

SMALLEST_NORM = 1e-12
"""A guided velocity below this norm is not scaled up further: 0 / 0 would be NaN in value and gradient."""

COMES_LAST: ContextVar[bool] = ContextVar("comes_last", default=True)
"""False in a pass of the network that another pass of the same rows follows, before their backward pass."""


@dataclass(frozen=True)
class EncodedText:
    """Prompts in the transformer's input format."""

    hidden: Tensor
    """[B, L, D], with equal L for every prompt."""
    mask: Tensor
    """[B, L] bool: True for text. Families whose transformer takes no mask attend to the padding too."""
    pooled: Tensor | None = None
    """[B, P], for families with a summary vector of the whole prompt; otherwise None."""


class TextEncoder(Protocol):
    """Encodes prompts with frozen weights. A row depends on its own prompt alone, and the length never changes."""

    def __call__(self, prompts: Sequence[str]) -> EncodedText: ...


def as_conditioning(text: EncodedText) -> dict[str, Tensor]:
    """Return named tensors, batch first, without gradient."""
    named = {"hidden": text.hidden.detach(), "mask": text.mask}
    return named if text.pooled is None else {**named, "pooled": text.pooled.detach()}


def padded(hidden: Tensor, mask: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """Cut or zero-pad to a fixed length.

    hidden [B, L, D], mask [B, L] or None for all text -> hidden [B, length, D], mask [B, length] bool
    """
    present = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device) if mask is None else mask.bool()
    missing = max(0, length - hidden.shape[1])
    filled = functional.pad(hidden[:, :length], (0, 0, 0, missing))
    return filled, functional.pad(present[:, :length], (0, missing))


class TwoBranches(Protocol):
    """An adapter whose network has a branch with the prompt and a branch without, for classifier-free guidance."""

    doubles_guidance: bool
    """True: compute both branches as one batch of 2 B rows. False: one after the other."""

    guidance_pair: SPGroup | None
    """Two workers with equal inputs: the first computes the branch with the prompt, the second the other, and both get
    both. The result is that of two passes bit for bit. Passes without gradient only."""

    empty: Conditioning
    """Conditioning of the empty prompt, a single row."""

    def branch(self, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the velocity [B, *S] in fp32 of x [B, *S] at sigma [B]."""


def guided(
    adapter: TwoBranches,
    x: Tensor,
    sigma: Tensor,
    conditioning: Conditioning,
    guidance: float,
    *,
    keeps_norm: bool = False,
) -> Tensor:
    """Apply classifier-free guidance: v_uncond + guidance (v_cond - v_uncond). At 1, skip the unconditional branch.

    keeps_norm   True: give each token's velocity the norm of v_cond, as the Qwen-Image pipeline does
    """
    branch, pair = adapter.branch, adapter.guidance_pair
    if guidance == 1.0:
        return branch(x, sigma, conditioning)
    repeated = {name: value.to(x.device).expand(len(x), *value.shape[1:]) for name, value in adapter.empty.items()}
    if pair is not None:
        mine = branch(x, sigma, conditioning if pair.rank == 0 else repeated)
        assert not mine.requires_grad, "no gradient flows from one worker to another"
        conditional, unconditional = pair.all_gather(mine).chunk(2)
    elif adapter.doubles_guidance:
        doubled = {name: torch.cat((value, repeated[name])) for name, value in conditioning.items()}
        conditional, unconditional = branch(torch.cat((x, x)), torch.cat((sigma, sigma)), doubled).chunk(2)
    else:
        token = COMES_LAST.set(False)
        try:
            conditional = branch(x, sigma, conditioning)
        finally:
            COMES_LAST.reset(token)
        unconditional = branch(x, sigma, repeated)
    combined = unconditional + guidance * (conditional - unconditional)
    return at_norm(combined, conditional) if keeps_norm else combined


def at_norm(velocity: Tensor, like: Tensor) -> Tensor:
    """Scale each token's velocity to the norm of another: [B, N, C] both. Gradients flow through both norms."""
    norm = torch.linalg.vector_norm(velocity, dim=-1, keepdim=True)
    target = torch.linalg.vector_norm(like, dim=-1, keepdim=True)
    scaled: Tensor = velocity * (target / norm.clamp_min(SMALLEST_NORM))
    return scaled
