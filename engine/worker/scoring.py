"""Score finished latents: decode the images, then call the reward, or the reward's student for candidates."""

import threading
from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor

from engine.models.adapter import DiTAdapter
from engine.protocol.request import Score, Scorer
from engine.rewards.reward import Reward
from engine.rewards.scorable import scores_of, unsound


class ImageScorer:
    """Scorer of one worker. Scoring threads share it: one decodes or loads at a time, and rewards run side by side.

    `load_student` returns None if the reward has none.
    """

    def __init__(self, adapter: DiTAdapter, reward: Reward, load_student: Callable[[], Reward | None]) -> None:
        self._adapter, self.reward, self._load_student = adapter, reward, load_student
        self._one_thread = threading.Lock()

    def decode(self, latents: Tensor) -> Tensor:
        with self._one_thread:
            return self._adapter.decode(latents).cpu()

    def score(
        self, latents: Tensor, images: Tensor, prompts: Sequence[str], scorer: Scorer, no_score: Sequence[str] = ()
    ) -> list[Score]:
        """Score decoded images. An image that is not finite, or whose latents are not, has no score."""
        with self._one_thread:
            reward = self.reward if scorer == "reward" else self._student_or_reward
        faults = unsound(images, latents)
        reasons = [earlier or reason for earlier, reason in zip(no_score or [""] * len(prompts), faults, strict=True)]
        return scores_of(reward, images, prompts, reasons)

    @cached_property
    def _student_or_reward(self) -> Reward:
        """Return the scorer for candidates. The caller holds the lock."""
        student = self._load_student()
        if student is not None:
            return student
        print(
            "this job has no student (reward.student): the reward itself scores what is explored, which takes longer",
            flush=True,
        )
        return self.reward
