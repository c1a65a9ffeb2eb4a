"""Exploration of a batch: the planner's choices as requests, handed out while the trainer trains.

The coordinator hands out candidates, because the coordinator sees rewards first and knows the idle workers. Whenever a
spot worker is idle, the planner chooses the candidates to try next. A *counted* budget is handed out in rounds. Each
round starts after all results of the round before, and a repeated run therefore tries the same seeds. An *idle-time*
budget is handed out a forward pass at a time, as long as training is expected to go on. Once every prompt has the pool
of candidates from which early groups are chosen, an idle-time budget waits for the early rollouts: they come before
further candidates.

The promise: a batch restored from its order and from its submitted and finished requests continues with equal choices.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isfinite

from engine.exploration.planner import Planner
from engine.protocol.exploration_order import Belief, ExplorationOrder
from engine.protocol.request import Finished, Kind, RequestId, Stream, seed_of

ROUNDS = 3
"""Rounds of a counted budget: the first round is even, later rounds go to the prompts with the most expected gain."""


class BatchExploration:
    """The candidates of a batch: requested, finished and next. Pure; the caller has the clock."""

    def __init__(self, order: ExplorationOrder) -> None:
        self.order = order
        self._planner = Planner(
            order.prompts,
            keep=order.keep,
            most=order.most,
            policy=order.policy,
            chunk=order.chunk,
            priors=order.priors,
            seed=seed_of(order.run_seed, Stream.CONTROL, order.batch, "planner", 0),
        )
        self._index = {
            self._request(prompt, index): (prompt, index) for prompt in order.prompts for index in range(order.most)
        }
        self._asked: set[RequestId] = set()
        self._settled: set[RequestId] = set()
        self._sound: Counter[str] = Counter()
        """By prompt: candidates with a finite reward, or without a result yet."""
        self._has_early = False
        """True once early rollouts of the batch were submitted."""

    @property
    def pending(self) -> int:
        """Return the number of requested candidates without a result."""
        return len(self._asked) - len(self._settled)

    @property
    def open(self) -> int | None:
        """Return the number of results missing from a counted budget. None: the budget is not counted."""
        if self.order.counted is None:
            return None
        return min(self.order.counted, len(self._index)) - len(self._settled)

    def more(self, fit: int) -> tuple[RequestId, ...]:
        """Return the next candidates.

        `fit`: number of candidates for the rest of the idle time; ignored by a counted budget.
        """
        if self.order.counted is None:
            return () if self._waits_for_early_rollouts() else self._ask(min(fit, self.order.shape))
        candidates_left = self.order.counted - len(self._asked)
        if self.order.policy == "uniform":
            return self._ask(candidates_left)
        first = max(self.order.keep * len(self.order.prompts), self.order.counted // 2)
        later = -(-(self.order.counted - first) // (ROUNDS - 1))
        return () if self.pending else self._ask(min(candidates_left, self._passes(later if self._asked else first)))

    def took(self, requests: Iterable[RequestId]) -> None:
        """Record submitted requests: candidates requested by an earlier process, and early rollouts of the batch."""
        for request in requests:
            if request.kind is Kind.EARLY and request.batch == self.order.batch:
                self._has_early = True
            if request in self._index and request not in self._asked:
                self._asked.add(request)
                self._sound[request.prompt] += 1
                self._planner.took(*self._index[request])

    def take_back(self, requests: Iterable[RequestId]) -> None:
        """Undo the request of candidates that could not be submitted. `more` then returns the candidates again."""
        for request in requests:
            self._asked.discard(request)
            self._sound[request.prompt] -= 1
            self._planner.take_back(*self._index[request])

    def settled(self, request: RequestId, reward: float) -> None:
        """Record a candidate's reward, or NaN for a candidate without any result.

        Calls may come in any order. A repeated call changes nothing.
        """
        if request in self._asked and request not in self._settled:
            self._settled.add(request)
            self._sound[request.prompt] -= not isfinite(reward)
            self._planner.tell(*self._index[request], reward)

    def add_results(self, results: Sequence[Finished]) -> None:
        """Record the rewards of finished candidates."""
        for result in results:
            self.settled(result.request, result.score.reward)

    def beliefs(self) -> dict[str, Belief]:
        """Return the moments of the prompts' rewards, for a later order's `priors`."""
        return self._planner.beliefs()

    def _waits_for_early_rollouts(self) -> bool:
        """Return True if the pool is complete or under way, and the early groups are not chosen yet."""
        pool = self.order.pool
        return (
            pool is not None
            and not self._has_early
            and all(self._sound[prompt] >= pool for prompt in self.order.prompts)
        )

    def _passes(self, count: int) -> int:
        """Round up to whole forward passes: a partial pass takes as long as a full pass."""
        return -(-count // self.order.shape) * self.order.shape

    def _ask(self, count: int) -> tuple[RequestId, ...]:
        chosen = tuple(self._request(prompt, index) for prompt, index in self._planner.ask(max(0, count)))
        self._asked.update(chosen)
        self._sound.update(request.prompt for request in chosen)
        return chosen

    def _request(self, prompt: str, index: int) -> RequestId:
        order = self.order
        return RequestId(
            run=order.run,
            lineage=order.lineage,
            batch=order.batch,
            prompt=prompt,
            seed=seed_of(order.run_seed, Stream.TRAIN, order.batch, prompt, index),
            kind=Kind.EXPLORE,
        )
