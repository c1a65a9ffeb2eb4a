"""Predict the iteration time, the number of iterations and when spot pays. Pure.

The closed forms of engine/exploration/value.py, with preemptions.

T(n) = N gamma / (R + n) + T_train + t_sync        seconds of an iteration with n spot GPUs at work
K(n) = K(0) gain(n)^-e                             iterations to the target, with n spot GPUs all the time
hours = 1 / E[1 / (T K)]                           over the time with each n: iterations far from the target count less
c = T rate / (T(0) rate(0))                        cost of an iteration; spot pays iff K / K(0) < 1 / c

N: images of an iteration. gamma: GPU-seconds of an image. K(0), T(0), rate(0): the values without spot nodes. gain, e:
`gain_of` and `Recipe.gain_exponent`. R: trainer GPUs that sample. T_train: training seconds of one GPU over ranks and
their efficiency (engine/timing/ranks.py). A replay makes progress by the same T and K (`plan_cloud`: `pace_ms`).
With all spot GPUs always at work, the formulas are the closed forms of `engine.exploration.value`.
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
    trainer_nodes: int = 1
    """Equal nodes of the trainer, which share the ranks."""
    never_run: tuple[str, ...] = ()
    """Parts of the recipe that were never run, a sentence each."""

    def ranks(self, trainer_gpus: int) -> int:
        """Return the ranks of a trainer with so many GPUs in each node. Raises ValueError if the job asks for more."""
        groups = self.cost.prompts if self.step is None else self.step.groups
        return self.limits.ranks(self.asked_ranks, gpus=trainer_gpus * self.trainer_nodes, groups=groups)

    def every_gpu_trains(self, trainer_gpus: int) -> bool:
        """Return whether a trainer with so many GPUs in each node has a rank on every GPU."""
        return self.ranks(trainer_gpus) == trainer_gpus * self.trainer_nodes

    def on(self, trainer_gpus: int) -> "Recipe":
        """Return the recipe on trainer nodes with so many GPUs each. Call on the job's own recipe, not on a result.

        Training takes as many GPU-seconds as measured, divided by the ranks and their efficiency. The ranks that sample
        take part in rollouts (`RankLimits.sampling`). The network between the nodes is not counted.
        """
        ranks = self.ranks(trainer_gpus)
        efficiency = 1.0 if self.step is None else self.step.efficiency(ranks).value
        seconds = self.cost.train_seconds * self.cost.reserved_gpus / (ranks * efficiency)
        sampling = min(ranks, self.limits.sampling)
        return replace(self, cost=replace(self.cost, reserved_gpus=sampling, train_seconds=seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class GpusAtWork:
    """Rollout GPUs at work: their mean and variance, and the fewest and the most there can be.

    Whatever depends on the number is averaged over two extremes. Either the number is always the mean S, or all nodes
    come and go together: `most` M for a share of the time, else `fewest` F. The weight of the second is V / ((S - F)
    (M - S)), which is exact for V = 0, for one node, and for nodes that share every outage.
    """

    mean: float
    variance: float = 0.0
    fewest: float = 0.0
    most: float = 0.0

    @property
    def weights(self) -> tuple[tuple[float, float], ...]:
        """Return (share of time, GPUs) of each number that counts."""
        spread = (self.mean - self.fewest) * (self.most - self.mean)
        if spread <= 0 or self.variance <= 0:
            return ((1.0, self.mean),)
        together = min(1.0, self.variance / spread)
        high = (self.mean - self.fewest) / (self.most - self.fewest)
        return (
            (1 - together, self.mean),
            (together * high, self.most),
            (together * (1 - high), self.fewest),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Average progress of a run over the time with each number of GPUs."""

    iteration_seconds: float
    """Seconds of an iteration, over the iterations."""
    iterations_share: float
    """Iterations to the target over those without exploration."""

    @property
    def seconds(self) -> float:
        """Return the seconds of the run over its iterations without exploration: T K / K(0)."""
        return self.iteration_seconds * self.iterations_share


def progress(recipe: Recipe, gpus: GpusAtWork, exponent: float) -> Progress:
    """Return the progress: 1 / T = E[1 / T(n)], and K / K(0) so that 1 / (T K) = E[1 / (T(n) K(n))].

    One node, there for half of the time: 100 s with it and 200 s without, so 133 s on average, and not 120 s, the
    seconds with half a node.
    """
    iterations = done = 0.0
    for part, number in gpus.weights:
        seconds = iteration_seconds(recipe.cost, number)
        iterations += part / seconds
        done += part / (seconds * iterations_share(recipe, candidates_per_prompt(recipe, number), exponent))
    return Progress(iteration_seconds=1 / iterations, iterations_share=iterations / done)


def quickest(recipe: Recipe, gpus: GpusAtWork, exponent: float) -> Progress:
    """Return a bound: no variance, and no lower mean, makes more progress between the same `fewest` and `most`."""
    spread = (gpus.mean - gpus.fewest) * (gpus.most - gpus.mean)
    ends = (replace(gpus, variance=max(0.0, spread)), replace(gpus, variance=0.0), GpusAtWork(mean=gpus.fewest))
    return min((progress(recipe, end, exponent) for end in ends), key=lambda found: found.seconds)


def iteration_seconds(cost: IterationCost, spot_gpus: float) -> float:
    """Return T in seconds with so many GPUs at work. 107 GPU-s x 4, R = 4: 53.5 s with 4 GPUs, and training."""
    gpus = cost.reserved_gpus + spot_gpus
    rollout = cost.prompts * cost.images_per_prompt * cost.rollout_gpu_seconds / gpus
    return rollout + cost.train_seconds + (cost.sync_seconds if spot_gpus else 0.0)


def candidates_per_prompt(recipe: Recipe, spot_gpus: float) -> int:
    """Return the whole candidates that fit beside training: E / P, with E of engine/exploration/value.py.

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
