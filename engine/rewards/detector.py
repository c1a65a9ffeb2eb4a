"""Objects in an image by a Mask2Former of transformers in a local folder, as GenEval's detector finds them.

GenEval runs mmdet's `mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco`. The same architecture for transformers is
facebook/mask2former-swin-small-coco-instance. In both, an object's confidence is the probability of its class times the
mean probability inside its mask, and its box is the smallest box around its mask.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from engine.reward_config import LocalModelConfig
from engine.rewards.geneval import THRESHOLD
from engine.rewards.reward import RewardError

FILES = ("config.json", "preprocessor_config.json")
"""Files beside the weights."""

GENEVAL_NAMES: Mapping[str, str] = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
}
"""GenEval's names of COCO's classes, where they differ."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoundObject:
    """An object with its mask [H, W] and its box: left, top, right and bottom in pixels."""

    label: str
    confidence: float
    box: tuple[int, int, int, int]
    mask: NDArray[np.bool_]


class Mask2FormerFolder:
    """Mask2Former of a folder on a device. Raises RewardError if the folder holds no whole Mask2Former.

    `dtype: auto` is float32 on every device, because confidences are compared with fixed thresholds.
    """

    def __init__(self, config: LocalModelConfig, workdir: str | None, device: str) -> None:
        self._path = Path(workdir or ".") / config.path
        self._batch, self._device = config.batch, device
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        if not self._path.is_dir():
            raise RewardError(
                f"reward.model.path is {config.path!r}, and there is no folder {self._path}; copy it there"
            )
        try:
            model = self._load()
        except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            first = str(error).strip().partition("\n")[0]
            raise RewardError(
                f"the folder {self._path} cannot be read as Mask2Former ({first}); it needs config.json, the weights "
                "and preprocessor_config.json, like facebook/mask2former-swin-small-coco-instance"
            ) from error
        self._model = model.eval().requires_grad_(False).to(device)
        names = {int(number): str(name) for number, name in model.config.id2label.items()}
        self._names = {number: GENEVAL_NAMES.get(name, name) for number, name in names.items()}

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the classes that the detector knows."""
        return frozenset(self._names.values())

    def detect(self, images: Sequence[Image.Image], threshold: float = THRESHOLD) -> list[list[FoundObject]]:
        """Return the objects of each image with at least this confidence."""
        objects: list[list[FoundObject]] = []
        for start in range(0, len(images), self._batch):
            part = list(images[start : start + self._batch])
            inputs = self._processor(images=part, return_tensors="pt")
            with torch.inference_mode():
                outputs = self._model(
                    pixel_values=inputs["pixel_values"].to(self._device, self._dtype),
                    pixel_mask=inputs["pixel_mask"].to(self._device),
                )
            outputs.class_queries_logits = outputs.class_queries_logits.float()
            outputs.masks_queries_logits = outputs.masks_queries_logits.float()
            segmented = self._processor.post_process_instance_segmentation(
                outputs,
                threshold=threshold,
                target_sizes=[image.size[::-1] for image in part],
                return_binary_maps=True,
            )
            objects += [list(self._objects(segmentation)) for segmentation in segmented]
        return objects

    def _objects(self, segmented: Mapping[str, Any]) -> Iterator[FoundObject]:
        masks = segmented["segmentation"]
        for place, segment in enumerate(segmented["segments_info"]):
            mask = masks[place].cpu().numpy().astype(bool)
            yield FoundObject(
                label=self._names[segment["label_id"]],
                confidence=float(segment["score"]),
                box=box_of(mask),
                mask=mask,
            )

    def _load(self) -> Any:
        """Load model and image processor. transformers fills missing weights at random, so they are looked for here."""
        from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil

        for name in FILES:
            if not (self._path / name).is_file():
                raise ValueError(f"there is no {name}")
        loaded: Any = Mask2FormerForUniversalSegmentation.from_pretrained(
            self._path, local_files_only=True, torch_dtype=self._dtype, output_loading_info=True
        )
        model, info = loaded
        # The weights of the loss are no part of some published files, and no pass needs them.
        if missing := sorted(name for name in info["missing_keys"] if not name.startswith("criterion.")):
            raise ValueError(f"its weights have no {missing[0]}, and {len(missing)} names are missing in all")
        self._processor = Mask2FormerImageProcessorPil.from_pretrained(self._path, local_files_only=True)
        return model


def box_of(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Return the smallest box around a mask [H, W] that is not empty: left, top, right and bottom, the ends outside."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
