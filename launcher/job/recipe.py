"""The recipe of a job: the figures of its iterations that are known before the run, and what follows from them. Pure.

T(n) = (N - M) gamma / (R s + n) + T_train + t_sync  seconds of an iteration with n spot GPUs at work
K(n) = K(0) gain(n)^-e                             iterations to the target, with n spot GPUs all the time

N: images of an iteration. M: those of them that were candidates, made beside training. gamma: GPU-seconds of an
image on a rollout GPU. R: trainer GPUs that sample, each s times as quick as a rollout GPU. T_train: training seconds
of one GPU over ranks and their efficiency (engine/timing/ranks.py). With spot nodes that come and go, the plan averages
T and K over time (`launcher.placement.forecast`). Closed forms of ours, after Spotlight (arXiv 2606.19004).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor
from typing import Literal

from engine.algorithm_config import FACTS, AlgorithmName
from engine.exploration.value import selection_gain, variance_gain
from engine.timing.ranks import StepWork
from engine.trainer_ranks import ONE, Asked, RankLimits
from launcher.market.estimate import Basis, Estimate

End = Literal["good", "bad"]
"""End of the interval of an uncertain figure."""


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


def gain_exponent(name: AlgorithmName) -> Estimate:
    """Return what exploration saves. An algorithm that was not measured counts as one that trains the same rows."""
    if name in GAIN_EXPONENTS:
        return GAIN_EXPONENTS[name]
    like: AlgorithmName = "diffusion-nft" if FACTS[name].trains_images else "flow-grpo"
    measured = GAIN_EXPONENTS[like]
    return replace(measured, source=f"{name} was not measured and counts as {like}: {measured.source}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Figures of a job's iterations known before the run."""

    prompts: int
    images_per_prompt: int
    """Trained images per prompt."""
    sampling_gpus: int
    """GPUs of the trainer that sample while they have no group to train. R."""
    sampling_speed: float = 1.0
    """Images that a GPU of the trainer samples while a rollout GPU samples one. s."""
    rollout_gpu_seconds: float
    """GPU-seconds of a trained image on a rollout GPU. gamma."""
    candidate_gpu_seconds: float
    """GPU-seconds of an explored candidate; less than a rollout's with fewer steps or bfloat16."""
    train_seconds: float
    sync_seconds: float = 0.0
    """Seconds until spot workers have the new weights."""
    guard_seconds: float = 0.0
    """Exploration ends this many seconds before the trainer's expected end."""
    max_candidates: int | None = None
    """Limit of candidates per batch, whatever the time."""
    iterations: Estimate
    """Iterations to the target, without exploration."""
    explores: bool
    """True if spot nodes try seeds while the trainer trains."""
    trains_candidates: bool = False
    """True: candidates made beside training are trained as they are, and not rolled out again."""
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
        groups = self.prompts if self.step is None else self.step.groups
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
        seconds = self.train_seconds * self.sampling_gpus / (ranks * efficiency)
        sampling = min(ranks, self.limits.sampling)
        return replace(self, sampling_gpus=sampling, train_seconds=seconds)

    def at_end(self, end: End) -> "Recipe":
        """Return the recipe with the iterations and the gain of exploration at their good end, or at their bad end."""
        is_good, iterations, exponent = end == "good", self.iterations, self.gain_exponent
        return replace(
            self,
            iterations=replace(iterations, mean=iterations.low if is_good else iterations.high),
            gain_exponent=replace(exponent, mean=exponent.high if is_good else exponent.low),
        )

    def seconds(self, spot_gpus: float) -> float:
        """Return T in seconds with so many GPUs at work. 107 GPU-s x 4, R = 4: 53.5 s with 4 GPUs, and training."""
        images = self.prompts * self.images_per_prompt
        if self.trains_candidates:
            images -= min(images, self._candidates(spot_gpus))
        rollout = images * self.rollout_gpu_seconds / (self.sampling_gpus * self.sampling_speed + spot_gpus)
        return rollout + self.train_seconds + (self.sync_seconds if spot_gpus else 0.0)

    def _candidates(self, spot_gpus: float) -> int:
        """Return the whole candidates that fit beside training."""
        if not self.explores:
            return 0
        seconds = max(0.0, self.train_seconds - self.guard_seconds - self.sync_seconds)
        fit = floor(spot_gpus * seconds / self.candidate_gpu_seconds)
        return fit if self.max_candidates is None else min(fit, self.max_candidates)

    def candidates_per_prompt(self, spot_gpus: float) -> int:
        """Return the whole candidates of a prompt that fit beside training.

        0 if the number does not exceed the number of trained images, because exploration then has no choice.
        """
        of_prompt = self._candidates(spot_gpus) // self.prompts
        return of_prompt if of_prompt > self.images_per_prompt else 0

    def gain(self, candidates: float) -> float:
        """Return the gain of the trained rewards as a ratio of variances: 1 + rho^2 (V(keep / candidates) - 1).

        `candidates`: of a prompt.
        """
        keep = self.images_per_prompt
        return variance_gain(self.rho, selection_gain(keep / candidates)) if candidates > keep else 1.0

    def iterations_share(self, candidates: int, exponent: float) -> float:
        """Return K / K(0): the share of the iterations that remains with exploration.

        A gain of 2 at e = 1/2 leaves 71 %.
        """
        return float(self.gain(candidates) ** -exponent)
