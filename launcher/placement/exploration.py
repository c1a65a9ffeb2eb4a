"""What a job's exploration is expected to add, as far as that can be said before anything was measured. Pure."""

from dataclasses import dataclass

from engine.config import CandidateBudget
from engine.exploration.value import ASSUMED_RHO, selection_gain, variance_gain
from launcher.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplorationOutlook:
    """Of a batch with a counted budget. `gain`: how much more the trained rewards differ (their variance)."""

    candidates_per_prompt: float
    keep: int
    gain: float
    rho: float | None
    """Assumed correlation of old weights' rewards with new ones; None: candidates are made with current weights."""


def exploration_outlook(job: Job) -> ExplorationOutlook | None:
    """None when nothing is explored, or when the budget is idle time: how many fit is known after the first batches."""
    exploration, keep = job.exploration, job.algorithm.images_per_prompt
    if exploration.mode == "none" or not isinstance(exploration.budget, CandidateBudget):
        return None
    each = exploration.budget.candidates / job.algorithm.prompts_per_batch
    best = selection_gain(min(1.0, keep / each))
    rho = None if exploration.mode == "in-path" else ASSUMED_RHO
    gain = best if rho is None else variance_gain(rho, best)
    return ExplorationOutlook(candidates_per_prompt=each, keep=keep, gain=gain, rho=rho)
