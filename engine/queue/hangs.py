"""Scorers that do not return: which requests get no score, so that no run waits for a scorer until its money is gone.

    a call hangs: its requests run alone -> a request hangs alone: it has no score
                                         -> the other images of its group have none either: the group is lost already
    a prompt hangs alone in `BATCHES_OF_A_PROMPT` batches: it is scored no more in this run
    `PROMPTS_IN_A_ROW` prompts hang alone, and nothing is scored in between: nothing is scored any more

The promise: a request costs two time limits of the scorer at most. The trainer skips groups without a score, and ends
the run after several in a row.
"""

from collections import Counter
from collections.abc import Sequence

from engine.protocol.request import Kind, RequestId

BATCHES_OF_A_PROMPT = 2
"""Batches in which a scorer may hang for a prompt. Once may be chance; twice is the prompt."""

PROMPTS_IN_A_ROW = 3
"""Prompts in a row for which a scorer may hang: after as many skipped groups in a row the trainer ends the run."""


class Hangs:
    """The hangs of one scorer of a run since the coordinator started."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Kind, int, str], str] = {}
        """The reason for each group (kind, batch, prompt) with an image that hung alone."""
        self._batches_of: Counter[str] = Counter()
        self._in_a_row: dict[str, str] = {}
        """The reason for each prompt that hung alone since the last score."""

    def alone(self, request: RequestId, text: str) -> None:
        """Record that a scorer did not return for a request that was alone in its lease."""
        group = (request.kind, request.batch, request.prompt)
        if group not in self._groups:
            self._groups[group] = text
            self._batches_of[request.prompt] += 1
        self._in_a_row[request.prompt] = text

    def scored(self) -> None:
        """Record a score."""
        if not self.has_stopped:
            self._in_a_row.clear()

    def reasons(self, requests: Sequence[RequestId]) -> tuple[str, ...]:
        """Return `reason` of each request, or an empty tuple if the scorer is called for all."""
        reasons = tuple(map(self.reason, requests))
        return reasons if any(reasons) else ()

    def reason(self, request: RequestId) -> str:
        """Return the reason why a request gets no score. Empty: the scorer is called."""
        if self.has_stopped:
            prompts = ", ".join(repr(prompt) for prompt in self._in_a_row)
            return f"the scorer is not called any more, because it did not return for {prompts}: {self._last}"
        if self._batches_of[request.prompt] >= BATCHES_OF_A_PROMPT:
            return f"the scorer did not return for {request.prompt!r} in {BATCHES_OF_A_PROMPT} batches"
        return self._groups.get((request.kind, request.batch, request.prompt), "")

    @property
    def _last(self) -> str:
        return next(reversed(self._in_a_row.values()))

    @property
    def has_stopped(self) -> bool:
        return len(self._in_a_row) >= PROMPTS_IN_A_ROW
