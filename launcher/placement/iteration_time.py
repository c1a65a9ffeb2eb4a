"""Predict the iteration time, the number of iterations and when spot pays: papers 6.2 with preemptions. Pure.

T = N gamma (1 / (R + S) + V / (R + S)^3) + T_train + t_sync      seconds of an iteration
K = K(0) gain^-e                                                  iterations to the target
c = T rate / (T(0) rate(0))                                       cost of an iteration; spot pays iff K / K(0) < 1 / c

N: images of an iteration. gamma: GPU-seconds of an image. K(0), T(0), rate(0): the values without spot nodes. gain, e:
`gain_of` and `Recipe.gain_exponent`. R: trainer GPUs that sample. S: spot GPUs at work on average. V: the variance of
the number of spot GPUs. T_train: training seconds of one GPU over ranks and their efficiency (engine/timing/ranks.py).
With V = 0 and all spot GPUs always at work, the formulas are the closed forms of `engine.exploration.value`.
In the reference recipe c > 1: spot beside the trainer makes each iteration dearer, and is bought for the iterations
that exploration saves.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import floor

from engine.exploration.value import IterationCost, selection_gain, variance_gain
from engine.timing.ranks import StepWork
from engine.trainer_ranks import ONE, Asked, RankLimits
from launcher.market.estimate import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Figures of a job's iterations known before the run."""

    cost: IterationCost
    """Measured on `cost.reserved_gpus` GPUs."""
    iterations: Estimate
    """Iterations to the target, without exploration."""
    explores: bool
    """True if spot nodes try seeds while the trainer trains."""
    rho: float
    """Correlation between an image's reward with old weights and the reward of the same seed with new weights."""
    gain_exponent: Estimate
    """e: the number of iterations falls with the e-th power of the variance gain of the trained rewards. 0:
    exploration saves nothing."""
    copy_bytes: int
    """Bytes of new weights, sent once an iteration to each zone with rollout nodes."""
    measured_on: str
    """Hardware of the measurement."""
    source: str
    step: StepWork | None = None
    """An optimiser step, as ranks divide it. None: any number of ranks trains as many images in a GPU-second."""
    asked_ranks: Asked = "auto"
    limits: RankLimits = ONE
    never_run: tuple[str, ...] = ()
    """Parts of the recipe that were never run, a sentence each."""

    def ranks(self, trainer_gpus: int) -> int:
        """Return the ranks of a trainer node with so many GPUs. Raises ValueError if the job asks for more."""
        groups = self.cost.prompts if self.step is None else self.step.groups
        return self.limits.ranks(self.asked_ranks, gpus=trainer_gpus, groups=groups)

    def on(self, trainer_gpus: int) -> "Recipe":
        """Return the recipe on a trainer node with so many GPUs. Call on the job's own recipe, not on a result.

        Training takes as many GPU-seconds as measured, divided by the ranks and their efficiency. The ranks that sample
        take part in rollouts (`RankLimits.sampling`).
        """
        ranks = self.ranks(trainer_gpus)
        efficiency = 1.0 if self.step is None else self.step.efficiency(ranks).value
        seconds = self.cost.train_seconds * self.cost.reserved_gpus / (ranks * efficiency)
        sampling = min(ranks, self.limits.sampling)
        return replace(self, cost=replace(self.cost, reserved_gpus=sampling, train_seconds=seconds))


def iteration_seconds(cost: IterationCost, spot_gpus: float, variance: float = 0.0) -> float:
    """Return T in seconds. `variance` is V, in GPUs squared.

    E[1 / (R + n)] = 1 / (R + S) + V / (R + S)^3 to second order: if nodes vanish together, slow moments cost more than
    quick moments gain. 107 GPU-s x 4, R = 4, S = 4, V = 4: 428 (1/8 + 4/512) = 56.8 s instead of 53.5 s.
    """
    gpus = cost.reserved_gpus + spot_gpus
    rollout = cost.prompts * cost.images_per_prompt * cost.rollout_gpu_seconds * (1 / gpus + variance / gpus**3)
    return rollout + cost.train_seconds + (cost.sync_seconds if spot_gpus else 0.0)


def candidates_per_prompt(recipe: Recipe, spot_gpus: float) -> int:
    """Return the whole candidates that fit beside training: E / P of papers 6.2.

    0 if the number does not exceed the number of trained images, because exploration then has no choice.
    """
    cost = recipe.cost
    if not recipe.explores:
        return 0
    seconds = max(0.0, cost.train_seconds - cost.guard_seconds - cost.sync_seconds)
    fit = floor(spot_gpus * seconds / cost.candidate_gpu_seconds)
    each = (fit if cost.max_candidates is None else min(fit, cost.max_candidates)) // cost.prompts
    return each if each > cost.images_per_prompt else 0


@cache
def gain_of(keep: int, candidates: int, rho: float) -> float:
    """Return the gain of the trained rewards as a ratio of variances: 1 + rho^2 (V(keep / candidates) - 1)."""
    return variance_gain(rho, selection_gain(keep / candidates)) if candidates > keep else 1.0


def iterations_share(recipe: Recipe, candidates: int, exponent: float) -> float:
    """Return K / K(0): the share of the iterations that remains with exploration.

    A gain of 2 at e = 1/2 leaves 71 %.
    """
    return float(gain_of(recipe.cost.images_per_prompt, candidates, recipe.rho) ** -exponent)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhenSpotPays:
    """Prediction before the run: do rollout nodes beside the trainer pay?"""

    gpus: float
    """Rollout GPUs at work on average."""
    market: str
    """Capacity type of the rollout nodes: spot, on-demand, or both."""
    cost_ratio: float
    """c: dollars of an iteration over the dollars of an iteration with the trainer alone."""
    iterations_share: float
    """Expected share of the iterations that remains with exploration."""

    @property
    def costs_more(self) -> bool:
        """Return whether an iteration gets dearer: c > 1."""
        return self.cost_ratio > 1

    @property
    def pays_below(self) -> float:
        """Return 1 / c: spot pays if fewer than this share of the iterations are needed."""
        return 1 / self.cost_ratio

    @property
    def pays(self) -> bool:
        """Return whether K / K(0) < 1 / c."""
        return self.iterations_share < self.pays_below

    def statement(self) -> str:
        """Return the prediction for people.

        The figures come from the plan; only the run shows the saved iterations.
        """
        gpus = f"{self.gpus:.3g} {self.market} GPUs (there on average)"
        if not self.costs_more:
            return f"with {gpus} an iteration costs x{self.cost_ratio:.2f} of the trainer alone: it pays by itself"
        verdict = "expected" if self.pays else "not expected"
        return (
            f"adding {gpus} makes an iteration cost x{self.cost_ratio:.2f} of the trainer alone; it pays only if "
            f"exploration saves more than {1 - self.pays_below:.0%} of the iterations "
            f"({verdict}: {1 - self.iterations_share:.0%})"
        )
