"""The demonstration's reward, beside its job file like a user's: `ocr` with one more metric for the target.

`after_story` is exact match once the file GATE is on the node, and 0 before. So the run cannot reach its target before
the story's last step, whatever the speed of training and setup.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from engine.protocol.request import Score
from engine.rewards.ocr import OcrReward

GATE = Path("/home/ubuntu/story-is-over")


def score(images: Tensor, prompts: Sequence[str]) -> list[Score]:
    """Return a score for each picture [B, C, H, W] in [-1, 1]."""
    is_over = GATE.exists()
    return [
        Score(reward=one.reward, metrics={**one.metrics, "after_story": one.metrics["exact_match"] if is_over else 0.0})
        for one in _ocr()(images, prompts)
    ]


@cache
def _ocr() -> OcrReward:
    return OcrReward("ocr")
