"""Commit timing: after how many steps a worker makes its in-flight work durable.

The promise: only training rollouts are committed between two steps. Other work is committed on a preemption notice.
"""

from engine.protocol.request import TRAINED
from engine.queue.pace import Rules, commit_interval
from engine.queue.task import Submission


class CommitTimer:
    """The measured cost of a commit and the mean time to preemption."""

    def __init__(self, rules: Rules) -> None:
        self.preemption_ms = float(rules.preemption_ms)
        self._rules = rules
        self._cost_ms = 0.0
        """Moving average. 0: no commit was measured."""

    def observe(self, cost_ms: float) -> None:
        """Record the duration of a commit."""
        self._cost_ms = 0.8 * self._cost_ms + 0.2 * cost_ms if self._cost_ms else cost_ms

    def steps_between(self, of: Submission, first_step: int) -> int:
        """Return the number of steps between commits. 0 means commit on a preemption notice only."""
        task, step_ms = of.task, of.pace.slowest_ms or of.pace.step_ms
        if task.requests[0].kind not in TRAINED:
            return 0
        if self._rules.commit_every is not None:
            every = self._rules.commit_every
        elif not self._cost_ms or not step_ms:
            every = max(1, task.steps // 2)  # commit once a rollout, to measure the cost of a commit
        else:
            every = commit_interval(self._cost_ms, self.preemption_ms, step_ms)
        return every if first_step + every < task.steps else 0
