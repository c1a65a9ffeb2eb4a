"""Expected value of exploration, and when spot GPUs pay. Closed forms of ours, for the idea of Spotlight
(arXiv 2606.19004).

    E = S max(0, T_train - guard - sync) / gamma    T = N gamma / (R + S) + T_train + sync
    c = T (R + S (1 - d)) / (T0 R)

S spot and R reserved GPUs, N images of gamma GPU-seconds each, spot discount d, T0: T of the reserved GPUs alone.

Exploration costs no time, because candidates run while the trainer trains; the cost is the spot GPUs. Spot GPUs also
take part of the rollout work. Rollout work alone rarely pays for the spot GPUs: fewer iterations must pay. The results
are expectations from assumed figures; `engine.exploration.ranking` measures the real gain of a run.
"""

from dataclasses import dataclass
from math import floor
from statistics import NormalDist
from typing import Literal

ASSUMED_RHO = 0.7
"""Correlation of stale with fresh rewards before any measurement: below the 0.87 to 0.97 measured one version stale on
`digits-ocr`, above the 0.52 of six versions (measured: 12 prompts of 32 seeds)."""


def selection_gain(kept_share: float) -> float:
    """Return V(f): variance of the kept rewards over the variance of all, if the share f is kept, half from each end.

    V(f) = 1 + 2 z phi(z) / f with z = Phi^-1(1 - f / 2): a normal distribution cut at both ends.
    V is 1 if all are kept, and rises without limit as f falls. Raises ValueError for a share of 0 or less.
    """
    if not kept_share > 0:
        raise ValueError(f"a share of {kept_share} of the candidates is kept; keep more than none")
    if kept_share >= 1:
        return 1.0
    normal = NormalDist()
    z = -normal.inv_cdf(kept_share / 2)
    return 1 + 2 * z * normal.pdf(z) / kept_share


def variance_gain(rho: float, selection: float) -> float:
    """Return the expected variance of the kept seeds' *fresh* rewards, relative to a random choice: 1 + rho^2 (V - 1).

    `rho`: correlation of stale with fresh rewards among all candidates; `selection`: V of the stale rewards. If fresh
    rewards depend linearly on stale rewards, the share rho^2 of their variance grows with V and the rest stays (papers
    6.3).
    """
    return 1 + rho**2 * (selection - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationCost:
    """The cost of an iteration without spot, and of a candidate. Measured in a run, or assumed by a plan."""

    prompts: int
    images_per_prompt: int
    """Trained images per prompt."""
    reserved_gpus: int
    """On-demand GPUs. On-demand GPUs train and take part in rollouts."""
    rollout_gpu_seconds: float
    """GPU-seconds of a trained image, scoring included."""
    candidate_gpu_seconds: float
    """GPU-seconds of an explored candidate, scoring included; less than a rollout's with fewer steps or bfloat16."""
    train_seconds: float
    sync_seconds: float = 0.0
    """Seconds until spot workers have the new weights."""
    guard_seconds: float = 0.0
    """Exploration ends this many seconds before the trainer's expected end."""
    max_candidates: int | None = None
    """Limit of candidates per batch, whatever the time."""


def candidates_that_fit(cost: IterationCost, spot_gpus: int) -> int:
    """Return the candidates finished by spot GPUs while the trainer trains: E."""
    seconds = max(0.0, cost.train_seconds - cost.guard_seconds - cost.sync_seconds)
    fit = floor(spot_gpus * seconds / cost.candidate_gpu_seconds)
    return fit if cost.max_candidates is None else min(fit, cost.max_candidates)


def iteration_seconds(cost: IterationCost, spot_gpus: int) -> float:
    """Return T: rollouts on all GPUs, then training, then the weight transfer to spot GPUs, if any."""
    rollout = cost.prompts * cost.images_per_prompt * cost.rollout_gpu_seconds / (cost.reserved_gpus + spot_gpus)
    return rollout + cost.train_seconds + (cost.sync_seconds if spot_gpus else 0.0)


def relative_cost(cost: IterationCost, spot_gpus: int, spot_discount: float) -> float:
    """Return c: dollars per iteration, relative to the reserved GPUs alone. Above 1, spot costs extra.

    `spot_discount`: 1 - spot price / on-demand price of a GPU.
    """
    gpus = cost.reserved_gpus + spot_gpus * (1 - spot_discount)
    return iteration_seconds(cost, spot_gpus) * gpus / (iteration_seconds(cost, 0) * cost.reserved_gpus)


def spot_pays(iterations_ratio: float, cost_ratio: float) -> bool:
    """Return True if spot GPUs make the whole run cheaper: iterations_ratio < 1 / cost_ratio.

    `iterations_ratio`: iterations to the target with exploration, divided by the iterations without.
    `cost_ratio`: the result of `relative_cost`.
    """
    return iterations_ratio < 1 / cost_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedExploration:
    """The expected gain of exploration per iteration. `basis` names the source of rho."""

    candidates_per_prompt: int
    """0 if no more candidates fit than are trained: then no seed is explored and every gain is 1."""
    selection_gain: float
    rho: float
    basis: Literal["assumed", "measured"]
    variance_gain: float
    """Variance of the trained rewards relative to a random choice of seeds."""
    spot_idle_share: float | None
    """Share of an iteration in which spot GPUs would be idle without exploration; None without spot."""
    relative_cost: float
    pays_below: float
    """1 / relative_cost: spot pays if exploration cuts the iterations to less than this share."""


def expected_exploration(
    cost: IterationCost,
    spot_gpus: int,
    spot_discount: float,
    *,
    rho: float = ASSUMED_RHO,
    basis: Literal["assumed", "measured"] = "assumed",
) -> ExpectedExploration:
    """Return the exploration by `spot_gpus` and its value, if stale and fresh rewards correlate by `rho`."""
    per_prompt = candidates_that_fit(cost, spot_gpus) // cost.prompts
    fits = per_prompt > cost.images_per_prompt
    selection = selection_gain(cost.images_per_prompt / per_prompt) if fits else 1.0
    ratio = relative_cost(cost, spot_gpus, spot_discount)
    return ExpectedExploration(
        candidates_per_prompt=per_prompt if fits else 0,
        selection_gain=selection,
        rho=rho,
        basis=basis,
        variance_gain=variance_gain(rho, selection),
        spot_idle_share=cost.train_seconds / iteration_seconds(cost, spot_gpus) if spot_gpus else None,
        relative_cost=ratio,
        pays_below=1 / ratio,
    )
