"""How long an iteration takes, how many it takes, when spot nodes pay: papers 6.2 with nodes that come and go. Pure.

T = N gamma (1 / (R + S) + V / (R + S)^3) + T_train + t_sync      seconds of an iteration
K = K(0) gain^-e                                                  iterations to the target
c = T rate / (T(0) rate(0))                                       cost of an iteration; spot pays iff K / K(0) < 1 / c

R trainer GPUs, S spot GPUs that are there on average, V the variance of their number. With V = 0 and every spot GPU
there all the time these are the closed forms of `engine.exploration.value`. In the reference recipe c > 1: spot beside
the trainer makes each iteration dearer, and is bought for what exploration saves in iterations.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import floor

from engine.exploration.value import IterationCost, selection_gain, variance_gain
from launcher.market.estimate import Estimate

TRAINED_ON_GPUS = 1
"""The engine trains on one GPU of its node (engine/runtime/agent.py); the others idle, and are counted as idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is known of a job's iterations before it runs."""

    cost: IterationCost
    """As measured on `cost.reserved_gpus`."""
    iterations: Estimate
    """To the target, without exploration."""
    explores: bool
    """Whether spot nodes try seeds while the trainer trains."""
    rho: float
    """Correlation of old weights' rewards with new ones."""
    gain_exponent: Estimate
    """e: iterations fall with the e-th power of how much more the trained rewards differ. 0: exploration is no use."""
    copy_bytes: int
    """Of new weights, once an iteration to each zone with rollout nodes."""
    measured_on: str
    """The machine of the figures."""
    source: str
    trained_on_gpus: int = TRAINED_ON_GPUS
    never_run: tuple[str, ...] = ()
    """What of this nobody has ever run, a sentence each."""

    def on(self, trainer_gpus: int) -> "Recipe":
        """Return the recipe on a node with so many GPUs, of which `trained_on_gpus` are used at most.

        Training is assumed to take as many GPU-seconds on any number of GPUs.
        """
        used = min(trainer_gpus, self.trained_on_gpus)
        seconds = self.cost.train_seconds * self.cost.reserved_gpus / used
        return replace(self, cost=replace(self.cost, reserved_gpus=used, train_seconds=seconds))


def iteration_seconds(cost: IterationCost, spot_gpus: float, variance: float = 0.0) -> float:
    """T. `variance` is V, in GPUs squared.

    E[1 / (R + n)] = 1 / (R + S) + V / (R + S)^3 to second order: when nodes vanish together, slow moments cost more
    than quick ones bring. 107 GPU-s x 4, R = 4, S = 4, V = 4: 428 (1/8 + 4/512) = 56.8 s instead of 53.5 s.
    """
    gpus = cost.reserved_gpus + spot_gpus
    rollout = cost.prompts * cost.images_per_prompt * cost.rollout_gpu_seconds * (1 / gpus + variance / gpus**3)
    return rollout + cost.train_seconds + (cost.sync_seconds if spot_gpus else 0.0)


def candidates_per_prompt(recipe: Recipe, spot_gpus: float) -> int:
    """Whole candidates that fit beside training: E / P of papers 6.2; 0 if no more fit than are trained anyway."""
    cost = recipe.cost
    if not recipe.explores:
        return 0
    seconds = max(0.0, cost.train_seconds - cost.guard_seconds - cost.sync_seconds)
    fit = floor(spot_gpus * seconds / cost.candidate_gpu_seconds)
    each = (fit if cost.max_candidates is None else min(fit, cost.max_candidates)) // cost.prompts
    return each if each > cost.images_per_prompt else 0


@cache
def gain_of(keep: int, candidates: int, rho: float) -> float:
    """How much more the trained rewards differ, as a ratio of variances: 1 + rho^2 (V(keep / candidates) - 1)."""
    return variance_gain(rho, selection_gain(keep / candidates)) if candidates > keep else 1.0


def iterations_share(recipe: Recipe, candidates: int, exponent: float) -> float:
    """K / K(0): what exploration leaves of the iterations. A gain of 2 at e = 1/2 leaves 71 %."""
    return float(gain_of(recipe.cost.images_per_prompt, candidates, recipe.rho) ** -exponent)


@dataclass(frozen=True, kw_only=True, slots=True)
class WhenSpotPays:
    """Whether rollout nodes beside the trainer pay, as far as that can be said before the run."""

    gpus: float
    """Of rollout nodes, that are there on average."""
    market: str
    """How they are bought: spot, on-demand, or both."""
    cost_ratio: float
    """c: dollars of an iteration over those of the trainer alone."""
    iterations_share: float
    """What exploration is expected to leave of the iterations."""

    @property
    def costs_more(self) -> bool:
        """An iteration gets dearer: c > 1."""
        return self.cost_ratio > 1

    @property
    def pays_below(self) -> float:
        """1 / c: spot pays if fewer than this share of the iterations are needed."""
        return 1 / self.cost_ratio

    @property
    def pays(self) -> bool:
        """K / K(0) < 1 / c."""
        return self.iterations_share < self.pays_below

    def statement(self) -> str:
        """For a person. The figures are of the plan; whether the iterations are saved, the run shows."""
        gpus = f"{self.gpus:.3g} {self.market} GPUs (there on average)"
        if not self.costs_more:
            return f"with {gpus} an iteration costs x{self.cost_ratio:.2f} of the trainer alone: it pays by itself"
        verdict = "expected" if self.pays else "not expected"
        return (
            f"adding {gpus} makes an iteration cost x{self.cost_ratio:.2f} of the trainer alone; it pays only if "
            f"exploration saves more than {1 - self.pays_below:.0%} of the iterations "
            f"({verdict}: {1 - self.iterations_share:.0%})"
        )
