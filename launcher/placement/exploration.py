"""Predict the benefit of a job's exploration from assumptions, before any measurement. Pure."""

from dataclasses import dataclass

from engine.config import CandidateBudget
from engine.exploration.value import ASSUMED_RHO, selection_gain, variance_gain
from launcher.job.schema import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorationOutlook:
    """Prediction for a batch with a counted budget.

    `gain`: ratio by which the variance of the trained rewards grows.
    """

    candidates_per_prompt: float
    keep: int
    gain: float
    rho: float | None
    """Assumed correlation of the rewards with old and new weights; None: candidates are made with current weights."""


def exploration_outlook(job: Job) -> ExplorationOutlook | None:
    """Return the prediction. None without exploration, or if the budget is idle time.

    With an idle-time budget, the number of candidates is known only after the first batches.
    """
    exploration, keep = job.exploration, job.algorithm.images_per_prompt
    if exploration.mode == "none" or not isinstance(exploration.budget, CandidateBudget):
        return None
    each = exploration.budget.candidates / job.algorithm.prompts_per_batch
    best = selection_gain(min(1.0, keep / each))
    rho = None if exploration.mode == "in-path" else ASSUMED_RHO
    gain = best if rho is None else variance_gain(rho, best)
    return ExplorationOutlook(candidates_per_prompt=each, keep=keep, gain=gain, rho=rho)
