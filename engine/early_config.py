"""The section `early` of the job file: groups of the next batch that are sampled one version early (TCSS).

No torch: the launcher checks a job with this module before anything is bought.
"""

from typing import Annotated, Literal

from pydantic import Field

from engine.algorithm_config import AlgorithmConfig
from engine.strict import Positive, Strict

MOST = 0.5
"""Largest share of early groups. Half of the groups one version old cost no learning that could be measured; all of
them did with grpo-guard (tests/benchmarks/results/staleness.md)."""

AUTO_SHARES = (0.0, 0.25, MOST)
"""Shares that `auto` chooses from."""


class EarlyConfig(Strict):
    """Early groups: rollout workers sample a part of the next batch while the trainer trains (TCSS)."""

    share: Annotated[float, Field(ge=0.0, le=MOST)] | Literal["auto"] = 0.0
    """Largest share of a batch's groups that is sampled one weight version early; 0 turns early groups off. Not for
    diffusion-nft, awm, `exploration.mode: in-path`, and `model.compile: on` with `weights: full`. `auto`: the share
    that makes an iteration shortest by the rates measured in the run, up to 0.5; 0 where none makes it 2 % shorter, for
    jobs that may have no early groups, before the rates are known, and with `sp_degree` above 1."""
    min_pool: Positive | None = None
    """Candidates that every prompt of the next batch needs before its early groups are chosen. None: twice
    `algorithm.images_per_prompt`. Without exploration no candidate is needed."""
    patience_seconds: Annotated[float, Field(gt=0.0)] = 10.0
    """Wall seconds without a live spot node after which unfinished early groups are made anew with current weights."""

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the shares that the schedule chooses from, the smallest first."""
        return AUTO_SHARES if isinstance(self.share, str) else (self.share,)


def why_not_early(*, algorithm: AlgorithmConfig, exploration: str, compiles_full: bool) -> str | None:
    """Return the reason why a job may not have early groups, and what to do instead. None: it may.

    `compiles_full`: `model.compile` is on, and all weights are trained.
    """
    off = "leave early.share out"
    if algorithm.image_training is not None:
        return (
            f"algorithm.name is {algorithm.name}, whose loss compares with the weights that made a rollout, and the "
            f"trainer no longer has those of an early group; {off}, or use flow-grpo or grpo-guard"
        )
    if exploration == "in-path":
        return (
            "exploration.mode is in-path, which chooses seeds after all rollouts of a batch with its own weights; "
            f"{off}, or use exploration.mode: stale"
        )
    if compiles_full:
        return (
            "model.compile is on with model.weights: full, so the trainer computes the log-probs of early groups with "
            f"a third copy of all weights, for which it has no room; {off}, or use weights: lora or compile: off"
        )
    return None
