"""Score finished latents: decode the images, then call the reward, or the reward's student for candidates."""

import threading
from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from engine.models.adapter import DiTAdapter
from engine.protocol.request import Score, Scorer
from engine.rewards.reward import Reward


class ImageScorer:
    """Scorer of one worker. Scoring threads share it: one decodes or loads at a time, and rewards run side by side.

    `load_student` returns None if the reward has none.
    """

    def __init__(self, adapter: DiTAdapter, reward: Reward, load_student: Callable[[], Reward | None]) -> None:
        self._adapter, self.reward, self._load_student = adapter, reward, load_student
        self._one_thread = threading.Lock()

    def __call__(self, latents: Tensor, prompts: list[str], scorer: Scorer) -> tuple[list[Score], Tensor]:
        with self._one_thread:
            images = self._adapter.decode(latents).cpu()
            reward = self.reward if scorer == "reward" else self._student_or_reward
        return list(reward(images, prompts)), images

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
