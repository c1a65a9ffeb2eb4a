"""The record of a rollout, finished or in flight: the latents replayed by training, and their log-probs.

The same record is a finished trajectory and the in-flight state of a trajectory interrupted by a preemption: the
record holds the steps done until then. The record names neither batch nor worker and holds no generator state, because
noise is a function of (seed, step). A worker with the same weights resumes bit for bit at the same SP degree. Across SP
degrees the results differ by rounding, and therefore the record stores the SP degree of each step.
"""

from dataclasses import dataclass, replace

import torch
from safetensors.torch import load, save
from torch import Tensor

from engine.diffusion.sampler import Plan


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The trajectory of an image after `step` denoising steps.

    x          [*S]      the latent after `step` denoising steps
    latents    [n, *S]   latents at the trained steps until now, in order, plus the latent after the last trained step;
                         empty if the plan records none
    log_probs  [n]       of the trained steps until now; the last latent has none yet
    degrees    [step]    SP degree of each step; uint8
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
        """Return the SP degree of the steps. None: the degrees differ, or no step is done."""
        degrees = self.degrees.unique()
        return int(degrees) if len(degrees) == 1 else None

    def then(self, plan: Plan, next_x: Tensor, log_prob: Tensor, degree: int = 1) -> "Trajectory":
        """Return the record after another step at this SP degree."""
        degrees = torch.cat([self.degrees, torch.tensor([degree], dtype=torch.uint8)])
        if self.step not in plan.trained_steps:
            return replace(self, step=self.step + 1, x=next_x, degrees=degrees)
        latents = self.latents if len(self.latents) else self.x[None]
        # A window's steps are consecutive, hence each trained step starts at the end of the step before.
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
        """Return the trajectory written by `to_bytes`. The journal checks the integrity of the bytes."""
        tensors = load(data)
        return cls(step=int(tensors.pop("step")), **tensors)
