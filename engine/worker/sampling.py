"""Sample the images of one lease, step by step.

    committed states or initial noise -> forward pass -> record -> look up -> next step

The whole shape named by the work is computed, padded with copies, so an image's bits do not depend on the worker.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from engine.diffusion.sampler import Plan, advance, initial
from engine.diffusion.trajectory import Trajectory
from engine.models.adapter import DiTAdapter
from engine.models.half import precision
from engine.parallel.communicator import TornGroup
from engine.protocol.request import TRAINED, Work
from engine.timing.work import WorkSeconds
from engine.worker.coordinator_calls import CoordinatorCalls
from engine.worker.group_member import GroupMember
from engine.worker.image_inputs import ImageInputs


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """The images of a lease after the last step. `degree`: number of workers that shared them."""

    work: Work
    trajectories: list[Trajectory]
    degree: int
    step_seconds: float
    """Median seconds of a step."""


@dataclass(kw_only=True)
class ImageSampler:
    """Samples the images of one worker."""

    adapter: DiTAdapter
    calls: CoordinatorCalls
    group: GroupMember
    step_seconds: float
    """Minimum wall seconds of a denoising step."""
    seconds: WorkSeconds
    """Seconds of a pass on the reference machine."""
    trace: Callable[[Work, int], None]
    """Callback after every step, with the number of finished steps."""
    resume: Literal["exact", "close", "restart"]
    """Treatment of interrupted images (engine/config.py)."""
    go_on: Callable[[Work, list[Trajectory]], bool]
    """Called between steps. False: the lease was revoked or given back."""
    give_back: Callable[[Work, list[Trajectory]], None]
    """Called when the group broke."""

    def sample(self, work: Work) -> Sampled | None:
        """Denoise all images of a lease. Returns None if the lease was revoked or given back."""
        inputs = ImageInputs.of(work, self.adapter)
        trajectories = self._begin(work, inputs.seeds)
        x = torch.stack([trajectories[i].x for i in inputs.filled]).to(self.device)
        seconds: list[float] = []
        pass_seconds = self.seconds.forward(len(inputs.filled))
        try:
            self.group.hand_out(work, x, trajectories[0].step)
            with precision(self.adapter.transformer, work.dtype):
                for step in range(trajectories[0].step, inputs.plan.steps):
                    begun = time.perf_counter()
                    x, log_probs = advance(self.adapter, inputs.plan, inputs.conditioning, inputs.seeds, x, step)
                    self.group.finish()
                    if x.is_cuda:
                        torch.cuda.synchronize(x.device)  # queued work can be neither timed nor stopped
                    trajectories = self._record(inputs.plan, work, trajectories, x, log_probs)
                    time.sleep(max(0.0, begun + self.step_seconds - time.perf_counter()))
                    seconds.append(time.perf_counter() - begun)
                    self.calls.usage.meter.done(max(self.step_seconds, pass_seconds) / self.group.degree)
                    self.trace(work, step + 1)
                    last = step + 1 == inputs.plan.steps
                    if not last and not self.group.agree(self.go_on(work, trajectories), self.device):
                        return None
        except TornGroup:
            self.group.tore()
            self.give_back(work, trajectories)
            return None
        return Sampled(
            work=work, trajectories=trajectories, degree=self.group.degree, step_seconds=median(seconds or [0.0])
        )

    @property
    def device(self) -> torch.device:
        return next(self.adapter.transformer.parameters()).device

    def _begin(self, work: Work, seeds: Sequence[int]) -> list[Trajectory]:
        """Return the start state of the images: the committed states if a resume is allowed, else the initial noise."""
        if work.attempts[0].step and self.resume != "restart":
            names = [str(attempt.state) for attempt in work.attempts]
            states = self.calls.states(names)
            trajectories = [Trajectory.from_bytes(states[name]) for name in names]
            if self.resume == "close" or all(t.degree == self.group.degree for t in trajectories):
                return trajectories
        noise = initial(seeds[: len(work.attempts)], self.adapter.latent_shape())
        return [Trajectory.begin(x) for x in noise]

    def _record(
        self, plan: Plan, work: Work, trajectories: list[Trajectory], x: Tensor, log_probs: Tensor
    ) -> list[Trajectory]:
        if work.attempts[0].request.kind not in TRAINED:
            return [
                replace(t, step=t.step + 1, x=row)  # never resumed, and only the final latents are used
                for t, row in zip(trajectories, x, strict=False)
            ]
        kept = zip(trajectories, x.cpu(), log_probs.cpu(), strict=False)
        return [t.then(plan, row, p, self.group.degree) for t, row, p in kept]
