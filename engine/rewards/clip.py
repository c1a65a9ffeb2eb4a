"""Scores of image and prompt by one CLIP model.

    clip       logits / 30     = 100 cos / 30 with the published scale, as in flow_grpo
    pickscore  logits / 26     PickScore (arXiv 2305.01569), trained on human choices, as in flow_grpo

logits = exp(logit_scale) * cos(embedding of the image, embedding of the prompt). The published model of `clip` is
openai/clip-vit-large-patch14, and of `pickscore` yuvalkirstain/PickScore_v1.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from engine.protocol.request import Score
from engine.rewards.clip_folder import ClipFolder

ClipName = Literal["clip", "pickscore"]

DIVISOR: dict[ClipName, float] = {"clip": 30.0, "pickscore": 26.0}
"""Logit that counts as a score of 1."""


class ClipReward:
    """Scores by the logits of a CLIP model."""

    def __init__(self, name: ClipName, clip: ClipFolder) -> None:
        self._factor, self._clip = clip.scale / DIVISOR[name], clip

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        cosines = self._clip.cosines(images, prompts)
        return [Score(reward=self._factor * cosine, metrics={}) for cosine in cosines.tolist()]
