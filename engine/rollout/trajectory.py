"""What a rollout leaves behind, finished or not: the latents that training replays, and their log-probs.

The same record is a finished trajectory and the in-flight state of one that a reclaim interrupted: it holds the
steps done so far. It knows neither batch nor SP degree nor worker, and no generator state: noise is a function of
(seed, step), so whoever holds the same weights goes on bit for bit.
"""

from dataclasses import dataclass, replace

import torch
from safetensors.torch import load, save
from torch import Tensor

from engine.rollout.sampler import Plan


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One picture on its way.

    x          [*S]      the latent after `step` denoising steps
    latents    [n, *S]   latents at the trained steps so far, in order, and the one each of them led to at the end
    log_probs  [n]       of the trained steps so far; the last latent has none yet
    """

    step: int
    x: Tensor
    latents: Tensor
    log_probs: Tensor

    @classmethod
    def begin(cls, x: Tensor) -> "Trajectory":
        return cls(step=0, x=x, latents=x.new_zeros((0, *x.shape)), log_probs=x.new_zeros(0))

    def then(self, plan: Plan, next_x: Tensor, log_prob: Tensor) -> "Trajectory":
        """The record after one more step."""
        if not plan.stochastic[self.step]:
            return replace(self, step=self.step + 1, x=next_x)
        latents = self.latents if len(self.latents) else self.x[None]
        # A window's steps follow one another, so each trained step starts where the one before it ended.
        return Trajectory(
            step=self.step + 1,
            x=next_x,
            latents=torch.cat([latents, next_x[None]]),
            log_probs=torch.cat([self.log_probs, log_prob[None]]),
        )

    def to_bytes(self) -> bytes:
        tensors = {"x": self.x, "latents": self.latents, "log_probs": self.log_probs, "step": torch.tensor(self.step)}
        return save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Trajectory":
        """What `to_bytes` wrote; that the bytes are whole is checked by the journal."""
        tensors = load(data)
        return cls(step=int(tensors.pop("step")), **tensors)
