"""OCR rewards: does the picture show the text that was asked for?

The text line recogniser of the rapidocr wheel (PP-OCRv6 small) is called directly as an onnxruntime session: its
wrapper would look for lines first and pad every one to 320 pixels, at ten times the cost. Pictures are scaled to the
recogniser's 48 rows and squeezed to few columns, and its output is decoded greedily (CTC).

    ocr         1 - min(edits, n) / n, graded; text around the target costs nothing (Flow-GRPO's reward)
    ocr_strict  1 if exactly the target is read, else 0
    ocr_smooth  exp(-CTC loss / n): the likelihood of the target per character

The promise: a score depends on the picture and its prompt alone. Every score carries `exact_match` and `similarity`.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.rollout.request import Score

OcrName = Literal["ocr", "ocr_strict", "ocr_smooth"]

ROWS = 48
"""Height that the recogniser was trained at."""

COLUMNS = 72
"""Width that pictures are squeezed to: half the cost of 144 and nearly the same reading (research notes overlap 1)."""

BATCH = 8
"""Pictures per onnxruntime call; larger batches are slower on a CPU (same place)."""

BLANK = 0
"""The CTC class that stands for no character."""


class LineRecogniser:
    """PP-OCRv6 small on one thread. onnxruntime frees the GIL, so it may run beside sampling."""

    def __init__(self, columns: int = COLUMNS) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(_model_file(), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        alphabet = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self.characters = ["", *alphabet, " "]
        self.class_of = {character: index for index, character in enumerate(self.characters)}
        self._columns = columns

    def probabilities(self, pictures: Tensor) -> NDArray[np.float32]:
        """pictures [B, 1 or 3, H, W] in [-1, 1] -> [B, T, classes]"""
        scaled = functional.interpolate(pictures.float().cpu(), size=(ROWS, self._columns), mode="bicubic")
        pixels = scaled.clamp(-1.0, 1.0).expand(-1, 3, -1, -1).contiguous().numpy()
        starts = range(0, len(pixels), BATCH)
        return np.concatenate(
            [self._session.run(None, {self._input: pixels[start : start + BATCH]})[0] for start in starts]
        )

    def read(self, probabilities: NDArray[np.float32]) -> list[str]:
        """Greedy CTC decoding: the best class per column, repeats merged, blanks and spaces dropped."""
        return [self._text(classes) for classes in probabilities.argmax(axis=2).tolist()]

    def _text(self, classes: Sequence[int]) -> str:
        merged = [new for old, new in zip([BLANK, *classes], classes, strict=False) if new != old]
        return _normalised("".join(self.characters[index] for index in merged))

    def likelihood(self, probabilities: NDArray[np.float32], target: str) -> float:
        """exp(-CTC loss / n) of one picture's probabilities [T, classes]: geometric mean over the n characters.

        A character that the recogniser does not know, or more characters than columns: 0.
        """
        if any(character not in self.class_of for character in target):
            return 0.0
        # Only the blank and the target's own characters matter to the loss, out of 18,710 classes.
        alphabet = sorted(set(target))
        columns = probabilities[:, [BLANK, *(self.class_of[character] for character in alphabet)]]
        log_probabilities = torch.from_numpy(columns).double().clamp_min(1e-12).log()
        loss = functional.ctc_loss(
            log_probabilities[:, None],
            torch.tensor([[1 + alphabet.index(character) for character in target]]),
            torch.tensor([len(columns)]),
            torch.tensor([len(target)]),
            blank=0,
            reduction="sum",
        )
        return float(torch.exp(-loss / len(target)))


class OcrReward:
    """One of the three rewards; `columns` is for pictures much wider than those of digits-ocr."""

    def __init__(self, name: OcrName = "ocr", columns: int = COLUMNS) -> None:
        self._name = name
        self._recogniser = _shared_recogniser(columns)

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> list[Score]:
        if pictures.dim() != 4:
            raise ValueError(f"ocr reads pictures [B, C, H, W]; it was given {list(pictures.shape)}")
        probabilities = self._recogniser.probabilities(pictures)
        readings = self._recogniser.read(probabilities)
        return [
            self._score(row, reading, target_text(prompt))
            for row, reading, prompt in zip(probabilities, readings, prompts, strict=True)
        ]

    def _score(self, probabilities: NDArray[np.float32], reading: str, target: str) -> Score:
        metrics = {"exact_match": float(reading == target), "similarity": similarity(reading, target)}
        match self._name:
            case "ocr":
                return Score(reward=metrics["similarity"], metrics=metrics)
            case "ocr_strict":
                return Score(reward=metrics["exact_match"], metrics=metrics)
            case "ocr_smooth":
                smooth = self._recogniser.likelihood(probabilities, target)
                return Score(reward=smooth, metrics={**metrics, "smooth": smooth})


def target_text(prompt: str) -> str:
    """What should be read: the text in double quotes if there is any, else the whole prompt; no spaces, lower case."""
    quoted = re.search(r'"([^"]+)"', prompt)
    target = _normalised(quoted.group(1) if quoted else prompt)
    if not target:
        raise ValueError(f"prompt {prompt!r} asks for no text; an ocr reward needs some, best in double quotes")
    return target


def similarity(reading: str, target: str) -> float:
    """1 - min(edits, n) / n; a reading that contains the target is perfect."""
    edits = 0 if target in reading else edit_distance(reading, target)
    return 1.0 - min(edits, len(target)) / len(target)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein: fewest insertions, deletions and replacements that make b of a."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (left != right))
    return row[-1]


def _normalised(text: str) -> str:
    return "".join(text.split()).lower()


@lru_cache(maxsize=4)
def _shared_recogniser(columns: int) -> LineRecogniser:
    """One session for all rewards of a process: it is 21 MB, and any thread may call it."""
    return LineRecogniser(columns)


def _model_file() -> str:
    package = find_spec("rapidocr")
    if package is None or package.origin is None:
        raise ImportError("the ocr rewards read with rapidocr's recogniser; pip install 'rapidocr>=3.10'")
    return str(Path(package.origin).parent / "models" / "PP-OCRv6_rec_small.onnx")
