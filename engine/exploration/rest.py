"""Rest of exploration: batches without candidates, where idle time is too short to choose a seed.

    explored batch: no prompt has more candidates than it trains -> short     `SHORT` short ones in a row -> a rest
    a rest is over -> one batch is explored -> short: the next rest; else exploration goes on

Candidates of a short batch change nothing that is trained: each prompt trains its first seeds anyway. They cost time
all the same where rollout GPUs are hardly idle, because early groups wait for their pool. Pure.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

SHORT = 3
"""Short batches in a row before the first rest: a batch is also short if most spot nodes were lost in it. Assumed."""

REST_BATCHES = 10
"""Batches of a rest: a trial then costs at most an eleventh of what it would cost in every batch. Assumed."""


class Rest:
    """The short batches of a run, and its rest."""

    def __init__(self, *, short: int = 0, until: int = 0) -> None:
        """`short`: short batches in a row. `until`: first batch that may be explored again."""
        self.short, self.until = short, until

    def rests(self, batch: int) -> bool:
        """Return True if the batch is not explored."""
        return batch < self.until

    def explored(self, batch: int, prompts: Iterable[str], *, keep: int) -> None:
        """Record a batch by the prompt of each candidate. A batch without any candidate counts for nothing.

        `keep`: candidates of a prompt that are trained.
        """
        counts = Counter(prompts)
        if not counts:
            return
        self.short = self.short + 1 if max(counts.values()) <= keep else 0
        if self.short >= SHORT:
            self.until = batch + 1 + REST_BATCHES

    def to_dict(self) -> dict[str, Any]:
        """Return the state for a restarted trainer."""
        return {"short": self.short, "until": self.until}
