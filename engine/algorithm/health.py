"""Diagnostics of an optimiser step, added up over passes, groups and ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.algorithm.objective import Objective, RowLosses, Rows

EARLY = "is_early"
"""Tensor [R] of a pass with early groups: True for their rows."""


@dataclass(kw_only=True)
class Health:
    """Diagnostics of training, summed over the groups of a step. Rows are (image, step) or (image, noise level) pairs.

    `neutral`: names and values of the algorithm's figures for an update without any row (`Objective.neutral`).
    """

    neutral: Mapping[str, float]
    rows: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    gradient_norm: float = 0.0
    groups: int = 0
    without_variance: int = 0
    skipped: list[int] = field(default_factory=list)
    """Numbers of the groups skipped because of a non-finite value."""
    rows_per_forward: int = 0
    """Most rows of a pass in this step. Only a step's own health has the number, not the health of a pass."""
    early_rows: float = 0.0
    """Rows of early groups, and those of them outside the clip range."""
    early_outside: float = 0.0

    def add(self, more: "Health") -> None:
        """Add the rows of another forward pass."""
        self.rows += more.rows
        self.early_rows += more.early_rows
        self.early_outside += more.early_outside
        for name, value in more.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in more.largest.items():
            self.largest[name] = max(self.largest.get(name, value), value)

    def merge(self, share: "Health") -> None:
        """Add another share of the same step."""
        self.add(share)
        self.groups += share.groups
        self.without_variance += share.without_variance
        self.skipped += share.skipped
        self.rows_per_forward = min(self.rows_per_forward, share.rows_per_forward)

    def summary(self) -> dict[str, float]:
        means = {name: value / self.rows for name, value in self.sums.items()}
        return {
            **self.neutral,
            **means,
            **self.largest,
            "gradient_norm": self.gradient_norm,
            "zero_variance_share": self.without_variance / max(1, self.groups),
            "skipped_groups": float(len(self.skipped)),
            "rows_per_forward": float(self.rows_per_forward),
        }


def figures_of(objective: Objective, batch: Rows, losses: RowLosses) -> Health:
    """Return the health of a pass."""
    health = Health(
        neutral=objective.neutral,
        rows=len(batch),
        sums={name: float(values.sum()) for name, values in losses.means.items()},
        largest={name: float(values.max()) for name, values in losses.largest.items()},
    )
    if EARLY in batch.tensors:
        health.early_rows = float(batch[EARLY].sum())
        if "clip_share" in losses.means:
            health.early_outside = float(losses.means["clip_share"][batch[EARLY]].sum())
    return health


def is_finite(total: Tensor, health: Health) -> bool:
    """Return True if the loss of a pass may be trained.

    Clipping can hide a non-finite ratio from the loss, but not from the loss's gradient.
    """
    return bool(torch.isfinite(total)) and all(math.isfinite(value) for value in health.largest.values())
