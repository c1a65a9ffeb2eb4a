"""LAION's aesthetic score: five linear layers on CLIP's embedding of an image. About 1 to 10; the prompt is ignored.

The folder is that of openai/clip-vit-large-patch14, with the head `sac+logos+ava1-l14-linearMSE.pth` of
christophschuhmann/improved-aesthetic-predictor copied into it. There are no activations between the layers.
"""

import pickle
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.protocol.request import Score
from engine.rewards.clip_folder import ClipFolder
from engine.rewards.reward import RewardError

HEAD = "sac+logos+ava1-l14-linearMSE.pth"
"""Name of the published head."""


class AestheticReward:
    """Scores by the head in the folder of a CLIP model. Raises RewardError if the head is missing or does not fit."""

    def __init__(self, clip: ClipFolder) -> None:
        self._clip, self._layers = clip, _layers_of(clip)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        values = self._clip.image_embeddings(images)
        for weight, bias in self._layers:
            values = linear(values, weight, bias)
        return [Score(reward=value, metrics={}) for value in values[:, 0].tolist()]


def _layers_of(clip: ClipFolder) -> list[tuple[Tensor, Tensor]]:
    """Return weight and bias of each linear layer, in order."""
    file = clip.path / HEAD
    if not file.is_file():
        raise RewardError(f"the folder {clip.path} has no {HEAD}; copy the head of LAION's aesthetic predictor there")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        numbers = sorted(int(name.split(".")[1]) for name in saved if name.endswith(".weight"))
        layers = [(saved[f"layers.{n}.weight"].float(), saved[f"layers.{n}.bias"].float()) for n in numbers]
        widths = [clip.dimensions, *(int(weight.shape[0]) for weight, _ in layers)]
        fits = [int(weight.shape[1]) for weight, _ in layers] == widths[:-1] and widths[-1] == 1 and layers
    except (KeyError, ValueError, IndexError, AttributeError, RuntimeError, pickle.UnpicklingError) as error:
        raise RewardError(
            f"{file} cannot be read as linear layers ({error!r}); copy the published file again"
        ) from error
    if not fits:
        raise RewardError(
            f"{file} has layers of the widths {widths}, and the folder's CLIP embeds in {clip.dimensions} numbers; use "
            "openai/clip-vit-large-patch14"
        )
    return layers
