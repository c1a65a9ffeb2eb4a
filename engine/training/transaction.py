"""The transactional update: groups come one by one, one optimiser step comes of them, or nothing at all.

    begin(manifest, minibatch) -> add(group)* -> commit() | abort()

`begin` fixes which groups belong to the step and what the loss is divided by, so the streamed update equals the
one-shot update whatever the order of arrival. With `order: fixed` gradients are added up by group number, and the
result is equal bit for bit. A group without variance adds nothing but stays in the denominator; a group whose reward
or loss is not finite is skipped and counted. `abort` leaves no trace.

All trained steps of a group go through the network together (time-step parallelism, TSP): the rows of one forward
pass are (picture, step) pairs.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from engine.config import AlgorithmConfig
from engine.models.adapter import DiTAdapter, rows
from engine.models.load import ReferencePolicy
from engine.rollout.request import Manifest
from engine.rollout.sampler import Plan, log_prob, policy
from engine.rollout.trajectory import Trajectory
from engine.training.advantages import group_advantages
from engine.training.loss import gaussian_kl, grpo_loss

ROWS_PER_FORWARD = 64
"""(picture, step) pairs per forward pass of training; more leave the cache of a CPU core (research notes rl 5)."""

ADAM_BETAS = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """One prompt's finished rollouts, in the order of its seeds in the manifest."""

    prompt: str
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...]


@dataclass(kw_only=True)
class Health:
    """Numbers that say whether training is sound, gathered over the groups of a step. Rows: (picture, step) pairs."""

    rows: int = 0
    ratio_sum: float = 0.0
    ratio_max: float = 0.0
    clipped: float = 0.0
    kl_sum: float = 0.0
    dlogp_sum: float = 0.0
    gradient_norm: float = 0.0
    groups: int = 0
    without_variance: int = 0
    skipped: list[int] = field(default_factory=list)
    """Numbers of the groups that were left out because something in them was not finite."""

    def summary(self) -> dict[str, float]:
        rows = max(1, self.rows)
        return {
            "ratio_mean": self.ratio_sum / rows if self.rows else 1.0,
            "ratio_max": self.ratio_max if self.rows else 1.0,
            "clip_share": self.clipped / rows,
            "kl": self.kl_sum / rows,
            "dlogp_abs_mean": self.dlogp_sum / rows,
            "gradient_norm": self.gradient_norm,
            "zero_variance_share": self.without_variance / max(1, self.groups),
            "skipped_groups": float(len(self.skipped)),
        }


class Trainer:
    """Owns the optimiser; hands out one transaction at a time."""

    def __init__(
        self,
        adapter: DiTAdapter,
        parameters: dict[str, nn.Parameter],
        config: AlgorithmConfig,
        reference: ReferencePolicy | None = None,
    ) -> None:
        """`reference`: needed when config.kl_beta is above 0."""
        self.adapter = adapter
        self.parameters = parameters
        self.config = config
        self.reference = reference
        self.optimizer = torch.optim.AdamW(
            parameters.values(), lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0
        )

    def begin(self, manifest: Manifest, minibatch: int, plan: Plan, *, std: float | None = None) -> "Transaction":
        """One optimiser step over the groups of one mini-batch. `std`: of the batch or of earlier ones, by mode."""
        return Transaction(self, manifest, minibatch, plan, std)

    def optimizer_state(self) -> dict[str, Tensor]:
        """AdamW's moments by parameter name; empty before the first step."""
        state = {}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{name}|{key}"] = value
        return state

    def load_optimizer_state(self, state: dict[str, Tensor]) -> None:
        """Go on exactly where `optimizer_state` was taken."""
        self.optimizer.state.clear()
        for full_name, value in state.items():
            name, key = full_name.rsplit("|", 1)
            self.optimizer.state[self.parameters[name]][key] = value.clone()


class Transaction:
    """See the module's story. Use it once."""

    def __init__(self, trainer: Trainer, manifest: Manifest, minibatch: int, plan: Plan, std: float | None) -> None:
        self._trainer = trainer
        self._manifest = manifest
        self._plan = plan
        self._std = std
        self._wanted = manifest.minibatches[minibatch]
        pictures = sum(len(manifest.groups[number].seeds) for number in self._wanted)
        self._planned_rows = pictures * len(plan.trained_steps)
        self._held: dict[int, FinishedGroup] = {}
        self._added: set[int] = set()
        self.health = Health()
        trainer.optimizer.zero_grad(set_to_none=True)

    @property
    def missing(self) -> list[int]:
        """Group numbers that were not added yet."""
        return [number for number in self._wanted if number not in self._added]

    def add(self, number: int, group: FinishedGroup) -> None:
        """Add one group's gradient. Raises ValueError for a group that is not in this step or was added before."""
        if number not in self._wanted or number in self._added:
            raise ValueError(f"group {number} of batch {self._manifest.batch} is not wanted: missing {self.missing}")
        self._added.add(number)
        if self._trainer.config.order == "arrival":
            self._accumulate(number, group)
            return
        self._held[number] = group
        for following in self._wanted:
            if following not in self._added:
                return
            if following in self._held:
                self._accumulate(following, self._held.pop(following))

    def commit(self) -> Health:
        """Take the optimiser step. Raises ValueError while groups are missing.

        A gradient that is not finite takes no step: its groups count as skipped.
        """
        if self.missing:
            raise ValueError(f"groups {self.missing} of batch {self._manifest.batch} have not been added")
        trainer = self._trainer
        parameters = trainer.parameters.values()
        norm = torch.nn.utils.clip_grad_norm_(parameters, trainer.config.gradient_clip)
        self.health.gradient_norm = float(norm)
        if math.isfinite(self.health.gradient_norm):
            # Every parameter takes part in every step, so that the step does not depend on which groups had variance.
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            trainer.optimizer.step()
        else:
            self.health.gradient_norm = 0.0
            self.health.skipped = list(self._wanted)
        trainer.optimizer.zero_grad(set_to_none=True)
        return self.health

    def abort(self) -> None:
        """Forget it all: weights and optimiser are as they were."""
        self._held.clear()
        self._trainer.optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, number: int, group: FinishedGroup) -> None:
        self.health.groups += 1
        if not all(math.isfinite(reward) for reward in group.rewards):
            self.health.skipped.append(number)
            return
        config = self._trainer.config
        rewards = torch.tensor([group.rewards], dtype=torch.float32)
        advantages = group_advantages(rewards, config.std, scale=self._std, clip=config.advantage_clip)[0]
        if not advantages.any():
            self.health.without_variance += 1
            if config.kl_beta == 0:
                return
        parameters = self._trainer.parameters.values()
        # With one forward pass a bad loss is seen before anything is added; with several it must be taken back.
        several = sum(len(t.log_probs) for t in group.trajectories) > ROWS_PER_FORWARD
        before = [p.grad.clone() if several and p.grad is not None else p.grad for p in parameters]
        if not self._backward(group, advantages):
            self.health.skipped.append(number)
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _backward(self, group: FinishedGroup, advantages: Tensor) -> bool:
        """Backpropagate all rows of a group; False (and a gradient to be thrown away) when a loss is not finite."""
        trainer, plan, config = self._trainer, self._plan, self._trainer.config
        trained = torch.tensor(plan.trained_steps)
        # [pictures, steps, ...] to rows
        x = torch.cat([t.latents[:-1] for t in group.trajectories])
        next_x = torch.cat([t.latents[1:] for t in group.trajectories])
        old = torch.cat([t.log_probs for t in group.trajectories])
        step = trained.repeat(len(group.trajectories))
        advantage = advantages.repeat_interleave(len(trained))
        conditioning = trainer.adapter.encode([group.prompt])
        device = next(iter(trainer.parameters.values())).device
        for some in torch.arange(len(x)).split(ROWS_PER_FORWARD):
            same_prompt = rows(conditioning, torch.zeros(len(some), dtype=torch.long, device=device))
            at, to = x[some].to(device), next_x[some].to(device)
            mean, std = policy(trainer.adapter, plan, same_prompt, at, step[some].to(device))
            new = log_prob(to, mean, std)
            loss, seen = grpo_loss(new, old[some].to(device), advantage[some].to(device), config.clip_range)
            if config.kl_beta > 0 and trainer.reference is not None:
                with trainer.reference.active():
                    reference_mean, _ = policy(trainer.adapter, plan, same_prompt, at, step[some].to(device))
                kl = gaussian_kl(mean, reference_mean, std)
                loss = loss + config.kl_beta * kl
                self.health.kl_sum += float(kl.detach().sum())
            total = loss.sum() / self._planned_rows
            if not torch.isfinite(total):
                return False
            total.backward()
            self.health.rows += len(some)
            self.health.ratio_sum += seen.ratio_mean * len(some)
            self.health.ratio_max = max(self.health.ratio_max, seen.ratio_max)
            self.health.clipped += seen.clip_share * len(some)
            self.health.dlogp_sum += float((new.detach() - old[some].to(device)).abs().sum())
        return True


class Average:
    """Exponential moving average of the trained weights: what evaluation and `spotrl pull` use."""

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self._parameters = parameters
        self._decay = decay
        self.tensors = {name: value.detach().clone() for name, value in parameters.items()}

    @torch.no_grad()
    def follow(self) -> None:
        """Move towards the live weights; once per iteration."""
        for name, value in self._parameters.items():
            self.tensors[name].lerp_(value.detach(), 1.0 - self._decay)
