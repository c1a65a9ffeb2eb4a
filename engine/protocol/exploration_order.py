"""The trainer's exploration order: the order's seeds are tried with stale weights while the trainer trains.

The promise: an order with a field unknown to this version is refused. A coordinator of an older version would otherwise
explore other candidates than the trainer expects.
"""

from collections.abc import Mapping
from typing import Literal, TypedDict

import msgspec

from engine.protocol.request import Scorer

Policy = Literal["uniform", "greedy", "ucb", "bayes"]
"""The planner's policies (engine/exploration/planner.py)."""


class Belief(TypedDict):
    """Number, mean and variance of a prompt's known rewards, as plain JSON."""

    count: float
    mean: float
    variance: float


class ExplorationOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer's exploration order for a batch: plain JSON values."""

    run: str
    run_seed: int
    lineage: int
    batch: int
    prompts: tuple[str, ...]
    keep: int
    most: int
    """Limit of candidates per prompt."""
    policy: Policy
    chunk: int
    counted: int | None
    """Total number of candidates. None: as many as the idle time allows."""
    version: int
    """Version of the weights that sample the candidates."""
    sampler: str
    steps: int
    shape: int
    dtype: str
    scorer: Scorer
    pool: int | None = None
    """Candidates of each prompt from which early groups are chosen. Once every prompt has as many, no more are tried
    before the early rollouts are submitted. None: no early groups are chosen."""
    latents: bool = False
    """True: the final latent of each candidate comes back, because the chosen candidates are trained."""
    priors: Mapping[str, Belief] = msgspec.field(default_factory=dict)
