"""What a rollout leaves behind, finished or not: the latents that training replays, and their log-probs.

The same record is a finished trajectory and the in-flight state of one that a reclaim interrupted: it holds the
steps done so far. It knows neither batch nor worker, and no generator state: noise is a function of
(seed, step), so whoever holds the same weights goes on bit for bit, if as many workers share the picture as before:
across SP degrees, differences are rounding. So it says how many shared each step.
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
    degrees    [step]    how many workers shared each step; uint8
    """

    step: int
    x: Tensor
    latents: Tensor
    log_probs: Tensor
    degrees: Tensor

    @classmethod
    def begin(cls, x: Tensor) -> "Trajectory":
        none = torch.zeros(0, dtype=torch.uint8)
        return cls(step=0, x=x, latents=x.new_zeros((0, *x.shape)), log_probs=x.new_zeros(0), degrees=none)

    @property
    def degree(self) -> int | None:
        """How many workers shared it; None: not always as many, or it is not begun."""
        found = self.degrees.unique()
        return int(found) if len(found) == 1 else None

    def then(self, plan: Plan, next_x: Tensor, log_prob: Tensor, degree: int = 1) -> "Trajectory":
        """The record after one more step, which `degree` workers shared."""
        degrees = torch.cat([self.degrees, torch.tensor([degree], dtype=torch.uint8)])
        if not plan.stochastic[self.step]:
            return replace(self, step=self.step + 1, x=next_x, degrees=degrees)
        latents = self.latents if len(self.latents) else self.x[None]
        # A window's steps follow one another, so each trained step starts where the one before it ended.
        return Trajectory(
            step=self.step + 1,
            x=next_x,
            latents=torch.cat([latents, next_x[None]]),
            log_probs=torch.cat([self.log_probs, log_prob[None]]),
            degrees=degrees,
        )

    def to_bytes(self) -> bytes:
        tensors = {"x": self.x, "latents": self.latents, "log_probs": self.log_probs, "degrees": self.degrees}
        tensors["step"] = torch.tensor(self.step)
        return save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Trajectory":
        """What `to_bytes` wrote; that the bytes are whole is checked by the journal."""
        tensors = load(data)
        return cls(step=int(tensors.pop("step")), **tensors)
