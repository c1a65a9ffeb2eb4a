"""The recipe of a job: the figures of its iterations that are known before the run. No decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.algorithm_config import AlgorithmName
from engine.exploration.value import IterationCost
from engine.timing.ranks import StepWork
from engine.trainer_ranks import ONE, Asked, RankLimits
from launcher.market.estimate import Basis, Estimate


def _exponent(mean: float, high: float, measured: str) -> Estimate:
    source = (
        "assumed: iterations fall with a power of the trained rewards' variance; 0 is no use. Measured on digits-ocr, "
        f"candidates of old weights, 4 of 12 kept: {measured} (tests/benchmarks/results/algorithms.md)"
    )
    return Estimate(mean=mean, low=0.0, high=high, basis=Basis.ASSUMED, source=source)


GAIN_EXPONENTS: Mapping[AlgorithmName, Estimate] = {
    "flow-grpo": _exponent(0.5, 1.0, "x1.76 fewer (1.57 to 1.98), an exponent of 1.05 at rho .7"),
    "grpo-guard": _exponent(0.5, 1.0, "x1.55 fewer (1.42 to 1.71), an exponent of .82 at rho .7"),
    "diffusion-nft": _exponent(0.26, 0.4, "x1.15 fewer (1.09 to 1.22), an exponent of .26 at rho .7"),
}
"""What exploration saves, by algorithm. The means of flow-grpo and grpo-guard are below what digits-ocr gave, because
another model may gain less. The mean of diffusion-nft is what digits-ocr gave."""


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
