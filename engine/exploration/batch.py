"""The exploration of one batch: the planner's choices as requests, dealt while the trainer trains.

The coordinator deals, because it hears rewards first and knows who is idle: whenever a spot worker has nothing else
to do, the planner says which candidates are worth trying next. A *counted* budget is dealt in rounds, each after all
of the round before it are in, so that a repeated run tries the same seeds; an *idle-time* budget is dealt a forward
pass at a time, as long as training is expected to go on.

The promise: a batch restored from its order and from what was submitted and finished deals on alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from engine.exploration.planner import Belief, Planner, Policy
from engine.rollout.request import Finished, Kind, RequestId, Stream, seed_of

ROUNDS = 3
"""Of a counted budget that the planner shares out: the first round is even, the others go where it found most."""


@dataclass(frozen=True, kw_only=True)
class ExplorationOrder:
    """What the trainer asks for: plain JSON values."""

    run: str
    run_seed: int
    lineage: int
    batch: int
    prompts: tuple[str, ...]
    keep: int
    most: int
    """Candidates that a prompt may get."""
    policy: Policy
    chunk: int
    counted: int | None
    """Candidates in all; None: what idle time allows."""
    version: int
    """Of the weights that try them."""
    sampler: str
    steps: int
    shape: int
    dtype: str
    scorer: Literal["reward", "student"]
    priors: Mapping[str, Belief] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ExplorationOrder":
        """Raises ValueError for an order that this version does not understand."""
        known = {one.name for one in fields(cls)}
        if set(raw) - known or "prompts" not in raw:
            raise ValueError(f"not an order to explore: it has {sorted(raw)}")
        return cls(**{**raw, "prompts": tuple(raw["prompts"])})


class BatchExploration:
    """Candidates of one batch: which were asked for, which are in, which come next. Pure; the caller has the clock."""

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

    @property
    def pending(self) -> int:
        """Asked for and not in yet."""
        return len(self._asked) - len(self._settled)

    @property
    def open(self) -> int | None:
        """How many of a counted budget are still to come; None when it is not counted."""
        if self.order.counted is None:
            return None
        return min(self.order.counted, len(self._index)) - len(self._settled)

    def more(self, fit: int) -> tuple[RequestId, ...]:
        """The next candidates. `fit`: how many the idle time still allows; a counted budget does not look at it."""
        if self.order.counted is None:
            return self._ask(min(fit, self.order.shape))
        left = self.order.counted - len(self._asked)
        if self.order.policy == "uniform":
            return self._ask(left)
        first = max(self.order.keep * len(self.order.prompts), self.order.counted // 2)
        later = -(-(self.order.counted - first) // (ROUNDS - 1))
        return () if self.pending else self._ask(min(left, self._passes(later if self._asked else first)))

    def took(self, requests: Iterable[RequestId]) -> None:
        """These were asked for by an earlier process."""
        for request in requests:
            if request in self._index and request not in self._asked:
                self._asked.add(request)
                self._planner.took(*self._index[request])

    def settled(self, request: RequestId, reward: float) -> None:
        """A candidate is in, or will never be (NaN). In any order; twice is once."""
        if request in self._asked and request not in self._settled:
            self._settled.add(request)
            self._planner.tell(*self._index[request], reward)

    def heard(self, results: Sequence[Finished]) -> None:
        for result in results:
            self.settled(result.request, result.score.reward)

    def beliefs(self) -> dict[str, Belief]:
        """What is known of the prompts, for a later order's `priors`."""
        return self._planner.beliefs()

    def _passes(self, count: int) -> int:
        """So many, in whole forward passes: a pass that is not full takes as long as one that is."""
        return -(-count // self.order.shape) * self.order.shape

    def _ask(self, count: int) -> tuple[RequestId, ...]:
        chosen = tuple(self._request(prompt, index) for prompt, index in self._planner.ask(max(0, count)))
        self._asked.update(chosen)
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
