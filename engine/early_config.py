"""The section `early` of the job file: groups of the next batch that are sampled one version early (TCSS).

No torch: the launcher checks a job with this module before anything is bought.
"""

from typing import Annotated

from pydantic import Field

from engine.strict import Positive, Strict


class EarlyConfig(Strict):
    """Early groups: rollout workers sample a part of the next batch while the trainer trains (TCSS)."""

    share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """Largest share of a batch's groups that is sampled one weight version early; 0 turns early groups off. Not for
    diffusion-nft, `exploration.mode: in-path`, and workers whose log-probs the trainer computes again (`model.compile:
    on`, and `weights: lora` in half precision)."""
    min_pool: Positive | None = None
    """Candidates that every prompt of the next batch needs before its early groups are chosen. None: twice
    `algorithm.images_per_prompt`. Without exploration no candidate is needed."""
    patience_seconds: Annotated[float, Field(gt=0.0)] = 10.0
    """Wall seconds without a live spot node after which unfinished early groups are made anew with current weights."""


def why_not_early(*, algorithm: str, exploration: str, recomputes: str) -> str | None:
    """Return the reason why a job may not have early groups, and what to do instead. None: it may.

    `recomputes`: the setting for which the trainer computes old log-probs again; empty: workers' log-probs are used.
    """
    off = "leave early.share out"
    if algorithm == "diffusion-nft":
        return (
            "algorithm.name is diffusion-nft, whose loss compares with the weights that made a rollout, and the "
            f"trainer no longer has those of an early group; {off}, or use flow-grpo or grpo-guard"
        )
    if exploration == "in-path":
        return (
            "exploration.mode is in-path, which chooses seeds after all rollouts of a batch with its own weights; "
            f"{off}, or use exploration.mode: stale"
        )
    if recomputes:
        return (
            f"{recomputes}, so the trainer computes the log-probs of rollouts again, and it no longer has the weights "
            f"of early groups; {off}"
        )
    return None
