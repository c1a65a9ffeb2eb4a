"""Expected gain of exploration: the variance of the rewards that are trained, after Spotlight
(arXiv 2606.19004). Closed forms of ours.

The results are expectations from assumed figures; `engine.exploration.ranking` measures the real gain of a run. When
spot GPUs pay for themselves: `launcher.job.recipe`.
"""

from functools import cache
from statistics import NormalDist

ASSUMED_RHO = 0.7
"""Correlation of stale with fresh rewards before any measurement: below the 0.87 to 0.97 measured one version stale on
`digits-ocr`, above the 0.52 of six versions (measured: 12 prompts of 32 seeds)."""


@cache
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
    rewards depend linearly on stale rewards, the share rho^2 of their variance grows with V and the rest stays.
    """
    return 1 + rho**2 * (selection - 1)
