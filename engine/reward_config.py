"""Define the job file's `reward` section. The module does not import torch, like `engine/config.py`."""

from typing import Literal

from engine.strict import Positive, Strict


class RewardConfig(Strict):
    """Training objective: a built-in scorer by name, or a `package.module:function` of the user's own."""

    name: str = "ocr"
    """Name of the scorer. `ocr` and `ocr_strict` read images of at most 48 x 144 pixels as one line of text, and find
    the lines first in larger images. `ocr_smooth` reads one line only."""
    frames: Positive | None = None
    """Frames of a video to score, evenly spaced from the first to the last: the score of a video is the mean of its
    frames' scores. None: the scorer gets whole videos, which only a function of the user's own can score. Image models
    have no frames."""
    placed: Literal["with_rollout"] = "with_rollout"
    """Place of the scorer. `with_rollout`: the worker that made the image scores the image. The only choice."""

    def check_scores(self, model: str, *, is_video: bool) -> None:
        """Check that the reward can score the model's images or videos. Raises ValueError."""
        if is_video and self.frames is None and ":" not in self.name:
            raise ValueError(
                f"model.name is {model}, and reward {self.name} scores images, not videos; set "
                f"reward: {{name: {self.name}, frames: 3}}, or use a function of your own (module:function)"
            )
        if not is_video and self.frames is not None:
            raise ValueError(f"reward.frames is {self.frames}, but {model} makes images; leave frames out")
