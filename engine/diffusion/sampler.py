"""The denoising sampler: a policy step, its log-probability, and the plan of random steps.

A denoising step takes x at noise level s to x at the next level. As a policy, the step is a Gaussian. The network sets
the mean and the plan sets the standard deviation (Flow-GRPO: arXiv 2505.05470; DanceGRPO: arXiv 2505.07818;
coefficient-preserving sampling: arXiv 2509.05952):

    ode        mean = x + v dt,  std = 0
    flow-sde   Flow-GRPO's stochastic differential equation (arXiv 2505.05470): more noise at higher noise levels
    dance-sde  DanceGRPO's (arXiv 2505.07818): the same amount of noise at every level
    cps        coefficient-preserving sampling (arXiv 2509.05952): no noise is left over in the image

All means are linear in x and in the velocity v. A plan is therefore a table of three numbers per step, and rows of
a batch may be at different steps (several steps of a trajectory in a single forward pass, TSP).

The promises: all arithmetic here is fp32, whatever the dtype of the network; a row never depends on its neighbours;
before the weights change, `replay` gives the log-prob of `advance` for the same transition.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log, pi, sin, sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from engine.config import EngineConfig, SamplerConfig, WindowConfig
from engine.diffusion.noise import NOISE_VERSION, noise_rows
from engine.models.adapter import Conditioning, DiTAdapter
from engine.noise_schedule import EVEN, ModelSchedule, NoiseSchedule

SamplerName = Literal["ode", "flow-sde", "dance-sde", "cps"]

_HALF_LOG_TWO_PI = 0.5 * log(2.0 * pi)


@dataclass(frozen=True)
class Plan:
    """A denoising plan. Rollouts of the same seed can be compared only if the plans' signatures are equal."""

    name: SamplerName
    sigmas: tuple[float, ...]
    """Noise levels, `steps + 1` of them: from 1 (noise; a little less for SANA) down to 0 (image)."""
    stochastic: tuple[bool, ...]
    """For each step: True if the step adds noise and is trained. The final step never does."""
    noise_level: float
    guidance: float
    signature: str
    records: bool = True
    """True if a rollout records its latents at the trained steps. False: training uses the final latent only."""

    @property
    def steps(self) -> int:
        return len(self.stochastic)

    @property
    def trained_steps(self) -> tuple[int, ...]:
        """Return the recorded steps, which have a log-prob."""
        return tuple(step for step, is_random in enumerate(self.stochastic) if is_random and self.records)


# --- plans ------------------------------------------------------------------------------------------------


def noise_levels(config: SamplerConfig, steps: int, schedule: ModelSchedule) -> tuple[float, ...]:
    """Return `steps + 1` noise levels: those of the model's schedule, or even ones with the job's own shift.

    Raises ScheduleError if the job says `auto` and the model's schedule is unknown.
    """
    chosen = schedule if config.shift == "auto" else NoiseSchedule(shift=config.shift)
    return chosen.sigmas(steps)


def rollout_plan(config: SamplerConfig, run_seed: int, batch: int, schedule: ModelSchedule = EVEN) -> Plan:
    """Return the plan of a training batch. With a window, the window's position follows from (run seed, batch).

    schedule  the model's noise levels (`adapter.schedule`); the default is right for the shipped models
    """
    last = config.steps - 1
    if config.noise_level == 0:
        random_steps = range(0)
    elif config.window is None:
        random_steps = range(last)
    else:
        random_steps = _window(config.window, last, run_seed, batch)
    return _plan(
        name=config.name if random_steps else "ode",
        sigmas=noise_levels(config, config.steps, schedule),
        stochastic=tuple(step in random_steps for step in range(config.steps)),
        noise_level=config.noise_level,
        guidance=config.guidance,
    )


def batch_plan(config: EngineConfig, batch: int, schedule: ModelSchedule = EVEN) -> Plan:
    """Return the plan of a batch of the job. Where images are trained, a rollout records its final latent only."""
    plan = rollout_plan(config.sampler, config.seed, batch, schedule)
    return replace(plan, records=config.algorithm.image_training is None)


def preview_plan(plan: Plan, steps: int) -> Plan:
    """Return a plan of the first steps of `plan`. The last step goes straight to the network's predicted image.

    The noise path is the plan's own. A seed's preview therefore predicts its image, at steps / plan.steps of the cost.
    Return `plan` itself if `plan` has no more steps than `steps`.
    """
    if steps >= plan.steps:
        return plan
    return _plan(
        name=plan.name,
        sigmas=(*plan.sigmas[:steps], 0.0),
        stochastic=(*plan.stochastic[: steps - 1], False),
        noise_level=plan.noise_level,
        guidance=plan.guidance,
    )


def evaluation_plan(config: SamplerConfig, steps: int, schedule: ModelSchedule = EVEN) -> Plan:
    """Return the plan for held-out prompts. ODE steps: an image depends only on the initial noise and the weights."""
    return _plan(
        name="ode",
        sigmas=noise_levels(config, steps, schedule),
        stochastic=(False,) * steps,
        noise_level=0.0,
        guidance=config.guidance,
    )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values for JSON. JSON keeps every bit of a float."""
    return {
        "name": plan.name,
        "sigmas": list(plan.sigmas),
        "stochastic": list(plan.stochastic),
        "noise_level": plan.noise_level,
        "guidance": plan.guidance,
        "signature": plan.signature,
        "records": plan.records,
    }


def plan_from_dict(raw: Mapping[str, Any]) -> Plan:
    """Return the plan in these plain values.

    Raises ValueError if this code gives another signature, and so other noise.
    """
    plan = _plan(
        name=raw["name"],
        sigmas=tuple(raw["sigmas"]),
        stochastic=tuple(raw["stochastic"]),
        noise_level=raw["noise_level"],
        guidance=raw["guidance"],
    )
    if plan.signature != raw["signature"]:
        raise ValueError(
            f"sampler plan {raw['signature']} would be {plan.signature} here; run the same version of spotrl on "
            "every node, because seeds are comparable only under one sampler and one noise"
        )
    return replace(plan, records=raw.get("records", True))


def _plan(
    *, name: SamplerName, sigmas: tuple[float, ...], stochastic: tuple[bool, ...], noise_level: float, guidance: float
) -> Plan:
    body = [name, sigmas, stochastic, noise_level, guidance, NOISE_VERSION]
    digest = hashlib.blake2b(json.dumps(body).encode(), digest_size=6).hexdigest()
    signature = f"{name}-{len(stochastic)}-n{NOISE_VERSION}-{digest}"
    return Plan(name, sigmas, stochastic, noise_level, guidance, signature)


def _window(window: WindowConfig, last: int, run_seed: int, batch: int) -> range:
    """Return the random steps of a batch, all before step `last`."""
    starts = range(window.first, (window.last or last) - window.size + 1, window.stride)
    moved = batch // window.iterations_per_position
    match window.order:
        case "random":
            start = starts[_draw(run_seed, moved, len(starts))]
        case "sliding":
            start = starts[moved % len(starts)]
    return range(start, start + window.size)


def _draw(run_seed: int, moved: int, choices: int) -> int:
    digest = hashlib.blake2b(f"window/{run_seed}/{moved}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % choices


# --- one step as a policy -----------------------------------------------------------------------------------


def step_coefficients(plan: Plan, step: int) -> tuple[float, float, float]:
    """Return (a, b, std) of a step: mean = a x + b velocity."""
    s, s_next = plan.sigmas[step], plan.sigmas[step + 1]
    dt = s_next - s
    if not plan.stochastic[step]:
        return 1.0, dt, 0.0
    match plan.name:
        case "flow-sde":
            # At s = 1 the formula divides by zero, and close to 1 by almost zero (SANA begins at .9997). The upstream
            # code uses the second level in 1 - s there.
            return _sde_step(s, dt, plan.noise_level**2 * s / (1.0 - (plan.sigmas[1] if step == 0 else s)))
        case "dance-sde":
            return _sde_step(s, dt, plan.noise_level**2)
        case "cps":
            # mean = (1 - s') data + sqrt(s'^2 - std^2) noise, with data = x - s v and noise = x + (1 - s) v.
            std = s_next * sin(plan.noise_level * pi / 2.0)
            kept = sqrt(max(s_next**2 - std**2, 0.0))
            return 1.0 - s_next + kept, kept * (1.0 - s) - (1.0 - s_next) * s, std
        case "ode":
            raise ValueError("an ODE plan has no stochastic steps")


def _sde_step(s: float, dt: float, g2: float) -> tuple[float, float, float]:
    """Return (a, b, std) of an Euler step of dx = (v - g2 / 2 score) ds + sqrt(g2) dw, which runs from s = 1 to 0.

    The images have the same distribution as with dx = v ds for every g2, in the limit of small steps and for the exact
    v. The score is the score of x at s, -(x - (1 - s) data) / s^2 = -(x + (1 - s) v) / s.
    """
    return 1.0 + g2 / (2.0 * s) * dt, (1.0 + g2 * (1.0 - s) / (2.0 * s)) * dt, sqrt(g2 * -dt)


@lru_cache(maxsize=64)
def _table(plan: Plan, device: torch.device) -> Tensor:
    """Return the step coefficients: [steps, 3] fp32."""
    rows = [step_coefficients(plan, step) for step in range(plan.steps)]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def transition(plan: Plan, x: Tensor, velocity: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Gaussian of each row's next latent.

    x, velocity  [B, *S]  latent at sigmas[step], and the network's dx/dsigma there
    step         [B]      long; rows may be at different steps
    returns      mean [B, *S] fp32, std [B] fp32 (0 for an ODE step)
    """
    keep, move, std = _table(plan, x.device)[step].unbind(dim=1)
    row = (-1,) + (1,) * (x.dim() - 1)
    return keep.view(row) * x.float() + move.view(row) * velocity.float(), std


def log_prob(next_x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of a transition, averaged over all elements of the latent.

    The function takes the mean and not the sum: ratios are then close to 1, and clip ranges are therefore tiny. The
    value is the full Gaussian for every sampler. The published CPS code drops the constants and 1 / (2 std^2), which
    re-weights steps; spotrl keeps both.

    next_x, mean  [B, *S]  fp32
    std           [B]      0 marks an ODE step, whose log-prob is 0 by definition
    returns       [B]
    """
    is_random = std > 0
    safe = torch.where(is_random, std, torch.ones_like(std))
    square = (next_x - mean).square().flatten(1).mean(dim=1)
    density = -square / (2.0 * safe.square()) - safe.log() - _HALF_LOG_TWO_PI
    return torch.where(is_random, density, torch.zeros_like(density))


def flow_grpo_kl_scale(plan: Plan, step: Tensor) -> Tensor:
    """Return the ratio of Flow-GRPO's KL term (arXiv 2505.05470) to the exact KL divergence of a step.

    Flow-GRPO divides the squared distance of the means by the variance of the noise per unit of noise level, not by the
    variance of the whole step. The ratio is therefore |sigmas[step + 1] - sigmas[step]|. For CPS, which has no variance
    per unit, the ratio is 1.

    step     [B]  long
    returns  [B]  fp32
    """
    if plan.name == "cps":
        return torch.ones(len(step), device=step.device)
    sigmas = torch.tensor(plan.sigmas, device=step.device)
    return (sigmas[step + 1] - sigmas[step]).abs()


# --- the sampler --------------------------------------------------------------------------------------------


def initial(seeds: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Return the initial noise of denoising: [B, *shape] fp32, on the CPU."""
    return noise_rows(seeds, 0, shape)


@torch.no_grad()
def advance(
    adapter: DiTAdapter, plan: Plan, conditioning: Conditioning, seeds: Sequence[int], x: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """Take a denoising step for a whole batch, with the noise of (seed, step + 1).

    x        [B, *S]  latents at sigmas[step]
    returns  next x [B, *S] fp32, log-prob [B] (0 for an ODE step)
    """
    steps = torch.full((len(x),), step, dtype=torch.long, device=x.device)
    mean, std = policy(adapter, plan, conditioning, x, steps)
    if not plan.stochastic[step]:
        return mean, torch.zeros(len(x), device=x.device)
    increment = noise_rows(seeds, step + 1, tuple(x.shape[1:])).to(x.device)
    next_x = mean + std.view((-1,) + (1,) * (x.dim() - 1)) * increment
    return next_x, log_prob(next_x, mean, std)


def policy(
    adapter: DiTAdapter, plan: Plan, conditioning: Conditioning, x: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Call the network and return the Gaussian of each row's next latent. Gradients flow if enabled.

    x        [B, *S]  latents at sigmas[step]
    step     [B]      long; rows may be at different steps
    returns  mean [B, *S] fp32, std [B]
    """
    sigma = torch.tensor(plan.sigmas, dtype=torch.float32, device=x.device)[step]
    return transition(plan, x, adapter.velocity(x, sigma, conditioning, plan.guidance), step)


def replay(
    adapter: DiTAdapter, plan: Plan, conditioning: Conditioning, x: Tensor, next_x: Tensor, step: Tensor
) -> Tensor:
    """Return the log-probs [B] of stored transitions x -> next_x under the current weights.

    Training differentiates them.
    """
    mean, std = policy(adapter, plan, conditioning, x, step)
    return log_prob(next_x, mean, std)


def denoise(adapter: DiTAdapter, plan: Plan, conditioning: Conditioning, seeds: Sequence[int]) -> Tensor:
    """Denoise from noise to finished latents [B, *S].

    For evaluation and exploration: no intermediate latent is kept.
    """
    device = next(adapter.transformer.parameters()).device
    x = initial(seeds, adapter.latent_shape()).to(device)
    for step in range(plan.steps):
        x, _ = advance(adapter, plan, conditioning, seeds, x, step)
    return x
