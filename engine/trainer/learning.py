"""Notice a run that cannot learn: batches that change no weights, because nothing in them has a gradient.

    a batch that teaches nothing -> `LEARNS_NOTHING_AFTER` in a row: a warning
                                 -> `algorithm.stop_without_learning` in a row: the run ends as unhealthy

The promise: a run in which no batch changed the weights never ends as finished.
"""

from collections.abc import Sequence

from engine.algorithm.health import Health
from engine.events import LEARNS_NOTHING_AFTER
from engine.trainer.report import Reporter
from engine.trainer.state import TrainerState

REMEDY = (
    "try `spotrl check-reward JOB`: a reward that grades, easier prompts, more images per prompt or a start from "
    "trained weights (model.from) give rewards that differ"
)


class Learning:
    """Counts batches that teach nothing, over restarts of the trainer. `limit`: batches in a row that end the run."""

    def __init__(self, state: TrainerState, reporter: Reporter, *, limit: int) -> None:
        self._state, self._reporter, self._limit = state, reporter, limit
        self._reason = ""

    def judge(self, batch: int, health: Sequence[Health], reward_mean: float) -> None:
        """Record a trained batch. `reward_mean`: of its finite groups."""
        self._reason = why_nothing_learned(health, reward_mean)
        if not self._reason:
            self._state.unlearned, self._state.has_learned = 0, True
            return
        self._state.unlearned += 1
        if self._state.unlearned == LEARNS_NOTHING_AFTER:
            self._reporter.warn(
                f"batch {batch}: {LEARNS_NOTHING_AFTER} batches in a row taught nothing: {self._reason}; the run ends "
                f"as unhealthy after {self._limit} in a row (algorithm.stop_without_learning); {REMEDY}"
            )

    @property
    def failure(self) -> str:
        """Return why the run should end now; empty if it should go on."""
        if self._state.unlearned < self._limit:
            return ""
        return f"{self._state.unlearned} batches in a row taught nothing: {self._reason}; {REMEDY}"

    @property
    def failure_at_end(self) -> str:
        """Return why a run whose iterations are done has failed; empty if a batch changed the weights."""
        if self._state.has_learned or not self._state.unlearned:
            return ""
        reason = self._reason or "no batch had a gradient"
        return f"no batch of this run changed the weights: {reason}; {REMEDY}"


def why_nothing_learned(health: Sequence[Health], reward_mean: float) -> str:
    """Return why no optimiser step of a batch could learn; empty if one could."""
    groups, flat = sum(step.groups for step in health), sum(step.without_variance for step in health)
    skipped = sum(len(step.skipped) for step in health)
    if skipped >= groups:
        return "every group was skipped, because a reward or loss is not finite"
    if flat + skipped >= groups:
        more = f", and {skipped} groups were skipped" if skipped else ""
        return f"the rewards of each group are equal (mean {reward_mean:.3f}){more}"
    if not any(step.gradient_norm for step in health):
        return "the gradient of the trained weights is 0"
    return ""
