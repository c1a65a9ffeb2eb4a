r"""Calls of a scorer in threads of their own, and the time in which a call must return.

    waits for a turn -> runs -> done
                         \-> late: given up; its thread runs on, and its scores are dropped

Python cannot end a thread. A call that was given up therefore keeps its thread, which is a daemon: it never keeps a
process from ending. A process that works for nothing else than rollouts ends after such a call (worker.py).
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from engine.protocol.request import Score, Scorer
from engine.reward_config import NODE_SCORER_SECONDS, RewardConfig
from engine.worker.scoring import ImageScorer

SHORTEST_SECONDS, SLOWEST_CALLS = 60.0, 20.0
"""A first try may take `SLOWEST_CALLS` times as long as the slowest call that returned, and never less than
`SHORTEST_SECONDS`. The second try has the whole time, so a slow call in a thousand loses no score."""


class ScorerHangs(RuntimeError):
    """A scorer did not return, and its threads still run in this process. The process should start anew."""


@dataclass(kw_only=True)
class ScoreLimits:
    """The times in which the calls of a process's scorers must return."""

    reward: RewardConfig | None = None
    """None: every call has NODE_SCORER_SECONDS."""
    _slowest: dict[Scorer, float] = field(default_factory=dict)

    def seconds(self, scorer: Scorer, images: int) -> float:
        """Return the time of a call with so many images."""
        config = self._config(scorer)
        if config is None:
            return NODE_SCORER_SECONDS
        whole = config.limit_seconds(images)
        if whole is None:
            return float("inf")
        # A server's seconds tell nothing of its next answer, and the user's own number is kept.
        adapts = images > 1 and config.timeout_seconds is None and not config.asks_a_server
        if not adapts or scorer not in self._slowest:
            return whole
        return min(whole, max(SHORTEST_SECONDS, SLOWEST_CALLS * self._slowest[scorer]))

    def returned(self, scorer: Scorer, seconds: float) -> None:
        """Record the seconds of a call that returned."""
        self._slowest[scorer] = max(seconds, self._slowest.get(scorer, 0.0))

    def late(self, scorer: Scorer, images: int) -> str:
        """Return the sentence about a call that did not return."""
        config, kind = self._config(scorer), "reward" if scorer == "reward" else "student"
        name = "" if config is None else f" {config.label}"
        whose = "an image" if images == 1 else f"{images} images"
        return f"{kind}{name} gave no score for {whose} in {self.seconds(scorer, images):g} s (reward.timeout_seconds)"

    def _config(self, scorer: Scorer) -> RewardConfig | None:
        if self.reward is None or scorer == "reward":
            return self.reward
        return self.reward.student_reward  # None: the shipped student


class ScoringCall:
    """One call of a scorer, in its own thread."""

    def __init__(
        self,
        scorer: ImageScorer,
        latents: Tensor,
        prompts: Sequence[str],
        name: Scorer,
        no_score: Sequence[str],
        *,
        turns: threading.Semaphore,
        limits: ScoreLimits,
    ) -> None:
        """Start the call. `turns`: as many as calls may run at once."""
        self._scorer, self._latents, self._prompts, self._name = scorer, latents, prompts, name
        self._no_score, self._turns, self._limits = no_score, turns, limits
        self._lock, self._holds_turn = threading.Lock(), False
        self._begun: float | None = None
        self.limit_seconds = limits.seconds(name, len(prompts))
        self.images: Tensor | None = None
        """The decoded images, once they are decoded."""
        self.scores: Future[list[Score]] = Future()
        self.thread = threading.Thread(target=self._run, name="score", daemon=True)
        self.thread.start()

    @property
    def seconds_left(self) -> float:
        """Return the time until the call is late. A call that waits for its turn has its whole time."""
        return self.limit_seconds - (0.0 if self._begun is None else time.monotonic() - self._begun)

    @property
    def is_late(self) -> bool:
        return self.seconds_left <= 0.0 and not self.scores.done()

    def give_up(self) -> None:
        """Let the next call have the turn of this call."""
        self._free_turn()

    def _run(self) -> None:
        self._turns.acquire()
        self._holds_turn = True
        self._begun = time.monotonic()
        try:
            self.images = self._scorer.decode(self._latents)
            scores = self._scorer.score(self._latents, self.images, self._prompts, self._name, self._no_score)
        except BaseException as error:  # a user's reward may raise anything; the caller reports the fault
            self._free_turn()
            self.scores.set_exception(error)
            return
        self._limits.returned(self._name, time.monotonic() - self._begun)
        self._free_turn()
        self.scores.set_result(scores)

    def _free_turn(self) -> None:
        with self._lock:
            if self._holds_turn:
                self._holds_turn = False
                self._turns.release()
