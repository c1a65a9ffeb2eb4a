"""The interface between the transactional update and an algorithm's loss.

    finished group -> rows (image x step, or image x noise level) -> constants, without gradient -> losses

Every algorithm is one file with one class: `flow_grpo.py`, `grpo_guard.py`, `flow_dppo.py`, `diffusion_nft.py` and
`awm.py`. What the launcher must know of it is a row of `FACTS` (engine/algorithm_config.py). A row never depends on
another row, and losses are returned unreduced: the update fixes the divisor before the first loss arrives (invariant
4).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from engine.diffusion.sampler import Plan
from engine.diffusion.trajectory import Trajectory
from engine.models.adapter import Conditioning, DiTAdapter
from engine.models.adapter import rows as rows_of


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """A prompt's finished rollouts, in the order of its seeds in the manifest.

    `is_early`: all of them were sampled one weight version early.
    """

    prompt: str
    seeds: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...]
    is_early: bool = False


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a forward pass. Every tensor has a row in its first dimension; the algorithm names the tensors."""

    conditioning: Conditioning
    tensors: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def at(self, some: Tensor) -> "Rows":
        """Return some of the rows. `some`: their indices."""
        return Rows(conditioning=rows_of(self.conditioning, some), tensors=rows_of(self.tensors, some))

    def with_tensors(self, more: Mapping[str, Tensor]) -> "Rows":
        return replace(self, tensors={**self.tensors, **more})


@dataclass(frozen=True, kw_only=True)
class RowLosses:
    """The losses of some rows, and figures about them without gradient.

    loss     [R]  of each row, with gradient
    means    named figures, each [R], of which reports show the mean
    largest  named figures, each [R], of which reports show the largest value
    """

    loss: Tensor
    means: Mapping[str, Tensor] = field(default_factory=dict)
    largest: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """The loss of an algorithm. All methods are pure but for the network's forward passes."""

    records_trajectory: bool
    """True if a rollout must record its latents at every trained step. False: training uses the final latent only."""
    needs_log_probs: bool
    """True if the loss uses the log-probs of the rollout."""
    neutral: Mapping[str, float]
    """Health figures of an update without any row: names and values of `RowLosses.means` and `RowLosses.largest`."""
    trains_equal_rewards: bool
    """True if a group of equal rewards has a gradient too, because the loss has a term besides the advantages."""

    def rows_per_image(self, plan: Plan) -> int:
        """Return the number of training rows of an image."""

    def rows(self, group: FinishedGroup, advantages: Tensor, plan: Plan) -> Mapping[str, Tensor]:
        """Return a group as training rows. advantages [K]; returns named tensors with the same number of rows."""

    def constants(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> Mapping[str, Tensor]:
        """Return named tensors, one row each, that do not depend on the trained weights. Called without gradient.

        The tensors are network outputs under the old or the reference weights.
        """

    def losses(self, adapter: DiTAdapter, plan: Plan, rows: Rows) -> RowLosses:
        """Return the losses under the trained weights. `rows`: with the tensors of `constants`."""
