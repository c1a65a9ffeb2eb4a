"""OCR rewards: score the match between the text in an image and the requested text.

The size of the images selects the reader:

    at most 48 x 144 (rows x columns)  `LineRecogniser`: the whole image is a line of text, as in digits-ocr
    larger                             `PageReader`: lines are found first, then read in sequence, in reading order

Both use the models in the rapidocr wheel (PP-OCRv6 small); nothing is downloaded. `LineRecogniser` calls the recogniser
as an onnxruntime session: the wheel's own classes would look for lines first and pad each line to 320 pixels, at ten
times the cost. `LineRecogniser` scales images to the recogniser's 48 rows and squeezes images to few columns.

    ocr         1 - min(edits, n) / n, graded; text around the target costs nothing (Flow-GRPO's reward)
    ocr_strict  1 if exactly the target is read, else 0
    ocr_smooth  exp(-CTC loss / n): the likelihood of the target per character; only for images of a single line

The target is the text in the prompt's quotes, else the whole prompt (`requested_text.py`). Spaces and case are ignored,
and the lines of an image are a single text, both like in Flow-GRPO's scorer. Of several quoted texts all count, in any
order; Flow-GRPO's scorer reads the first alone.
The promise: a score depends on the image and its prompt alone. Every score carries `exact_match` and `similarity`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice, permutations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.protocol.request import Score
from engine.rewards.requested_text import normalised, requested_texts

OcrName = Literal["ocr", "ocr_strict", "ocr_smooth"]

ROWS = 48
"""Image height used to train the recogniser."""

COLUMNS = 72
"""Width of squeezed images: half the cost of 144 and nearly equal readings (94 % agree; 480 images)."""

LINE_COLUMNS = 144
"""Limit for a single line. An image with more columns, or with more than `ROWS` rows, may hold several lines, or a line
made unreadable by squeezing."""

LONGEST_SIDE = 512
"""Longest side in pixels for the detector. Larger images are scaled down for the detector, like in Flow-GRPO's
detector. The detected lines are read at full size."""

BATCH = 8
"""Images per onnxruntime call. Larger batches are slower on a CPU (measured)."""

MOST_ORDERS = 24
"""Orders of the quoted texts that are tried: all orders of four texts."""

BLANK = 0
"""The CTC class for no character."""


class LineRecogniser:
    """PP-OCRv6 small on a single thread. onnxruntime releases the GIL, which allows calls in parallel with sampling."""

    def __init__(self, columns: int = COLUMNS) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(_model_file("rec"), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        alphabet = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self.characters = ["", *alphabet, " "]
        self.class_of = {character: index for index, character in enumerate(self.characters)}
        self._columns = columns

    def probabilities(self, images: Tensor) -> NDArray[np.float32]:
        """Return the class probabilities: images [B, 1 or 3, H, W] in [-1, 1] -> [B, T, classes]."""
        scaled = functional.interpolate(images.float().cpu(), size=(ROWS, self._columns), mode="bicubic")
        pixels = scaled.clamp(-1.0, 1.0).expand(-1, 3, -1, -1).contiguous().numpy()
        starts = range(0, len(pixels), BATCH)
        return np.concatenate(
            [self._session.run(None, {self._input: pixels[start : start + BATCH]})[0] for start in starts]
        )

    def read(self, probabilities: NDArray[np.float32]) -> list[str]:
        """Decode greedily (CTC): the best class per column, repeats merged, blanks and spaces dropped."""
        return [self._text(classes) for classes in probabilities.argmax(axis=2).tolist()]

    def _text(self, classes: Sequence[int]) -> str:
        merged = [new for old, new in zip([BLANK, *classes], classes, strict=False) if new != old]
        return normalised("".join(self.characters[index] for index in merged))

    def likelihood(self, probabilities: NDArray[np.float32], target: str) -> float:
        """Return exp(-CTC loss / n) of an image's probabilities [T, classes]: geometric mean over the n characters.

        Return 0 for a character unknown to the recogniser, or for more characters than columns.
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


class PageReader:
    """rapidocr's detector and recogniser on a single thread, for images with any number of lines."""

    def __init__(self) -> None:
        from rapidocr import RapidOCR  # imports OpenCV, not needed by the shipped tasks

        self._read = RapidOCR(
            params={
                "Global.log_level": "critical",  # an image without text is normal, not a warning
                "Global.use_cls": False,  # Flow-GRPO's scorer does not look for upside-down lines either
                "Det.model_path": _model_file("det"),
                "Det.limit_type": "max",
                "Det.limit_side_len": LONGEST_SIDE,
                "Rec.model_path": _model_file("rec"),
                "EngineConfig.onnxruntime.intra_op_num_threads": 1,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def read(self, images: Tensor) -> list[str]:
        """Return the text of each image, top to bottom and left to right. images [B, 1 or 3, H, W] in [-1, 1].

        Lines read with less than 50 % confidence are left out.
        """
        colour = images.float().cpu().expand(-1, 3, -1, -1).flip(1)  # OpenCV's order: blue, green, red
        pixels = ((colour + 1.0) * 127.5).round().clamp(0.0, 255.0).to(torch.uint8).permute(0, 2, 3, 1)
        return [normalised("".join(_in_order(self._read(page)))) for page in pixels.contiguous().numpy()]


def _in_order(output: Any) -> list[str]:
    """Return the texts of rapidocr's output in reading order: top to bottom, and left to right on a line.

    rapidocr's own order takes a word for another line if the word stands 10 pixels higher. Here two words are on one
    line if they share at least half of the lower word's height.
    """
    texts, boxes = getattr(output, "txts", None), getattr(output, "boxes", None)
    if not texts or boxes is None:
        return list(texts or ())  # any other output type means boxes without any readable text
    words = [
        Word(top=float(box[:, 1].min()), bottom=float(box[:, 1].max()), left=float(box[:, 0].min()), text=text)
        for box, text in zip(np.asarray(boxes), texts, strict=True)
    ]
    lines: list[list[Word]] = []
    for word in sorted(words, key=lambda word: word.top + word.bottom):
        line = next((line for line in lines if line[0].shares_line(word)), None)
        if line is None:
            lines.append([word])
        else:
            line.append(word)
    return [word.text for line in lines for word in sorted(line, key=lambda word: word.left)]


@dataclass(frozen=True, kw_only=True)
class Word:
    """A text in an image, and its place in pixels."""

    top: float
    bottom: float
    left: float
    text: str

    def shares_line(self, word: "Word") -> bool:
        shared = min(self.bottom, word.bottom) - max(self.top, word.top)
        return shared >= 0.5 * min(self.bottom - self.top, word.bottom - word.top)


class OcrReward:
    """An OCR reward, selected by name. `columns` is the width of squeezed single-line images."""

    def __init__(self, name: OcrName = "ocr", columns: int = COLUMNS) -> None:
        self._name = name
        self._columns = columns

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        if images.dim() != 4:
            raise ValueError(f"ocr reads images [B, C, H, W]; it was given {list(images.shape)}")
        rows, columns = images.shape[2:]
        if rows <= ROWS and columns <= LINE_COLUMNS:
            return self._score_lines(images, prompts)
        if self._name == "ocr_smooth":
            raise ValueError(
                f"ocr_smooth reads images of one line, at most {ROWS} x {LINE_COLUMNS} pixels; it was given "
                f"{rows} x {columns}: use ocr or ocr_strict"
            )
        readings = _shared_page_reader().read(images)
        return [
            self._score(reading, requested_texts(prompt)) for reading, prompt in zip(readings, prompts, strict=True)
        ]

    def _score_lines(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        recogniser = _shared_recogniser(self._columns)
        probabilities = recogniser.probabilities(images)
        scores = []
        for row, reading, prompt in zip(probabilities, recogniser.read(probabilities), prompts, strict=True):
            texts = requested_texts(prompt)
            smooth = recogniser.likelihood(row, "".join(texts)) if self._name == "ocr_smooth" else None
            scores.append(self._score(reading, texts, smooth))
        return scores

    def _score(self, reading: str, texts: tuple[str, ...], smooth: float | None = None) -> Score:
        metrics = reading_metrics(reading, texts)
        if smooth is not None:
            return Score(reward=smooth, metrics={**metrics, "smooth": smooth})
        return Score(reward=metrics["exact_match" if self._name == "ocr_strict" else "similarity"], metrics=metrics)


def target_text(prompt: str) -> str:
    """Return the requested texts as one, in the order of the prompt. Raises ValueError if the prompt asks for none."""
    return "".join(requested_texts(prompt))


@lru_cache(maxsize=1024)
def _orders(texts: tuple[str, ...]) -> frozenset[str]:
    """Return the texts as one, in each order in which an image may show them."""
    return frozenset("".join(order) for order in islice(permutations(texts), MOST_ORDERS))


def reading_metrics(reading: str, texts: tuple[str, ...]) -> dict[str, float]:
    """Return the metrics of a reading: `similarity` to the requested texts in their best order, and `exact_match`.

    A reading that contains each text is perfect, whatever else is there.
    """
    contains_all = all(reading.count(text) >= texts.count(text) for text in texts)
    best = 1.0 if contains_all else max(similarity(reading, target) for target in _orders(texts))
    return {"exact_match": float(reading in _orders(texts)), "similarity": best}


def unreadable_characters(prompt: str) -> str:
    """Return the characters of the requested texts that the recogniser cannot read, each once."""
    return "".join(dict.fromkeys(character for character in target_text(prompt) if character not in _readable()))


@lru_cache(maxsize=1)
def _readable() -> frozenset[str]:
    """Return the characters of all texts that the recogniser can read, normalised."""
    return frozenset("".join(map(normalised, _shared_recogniser(COLUMNS).class_of)))


def similarity(reading: str, target: str) -> float:
    """Return 1 - min(edits, n) / n. A reading that contains the target is perfect."""
    edits = 0 if target in reading else edit_distance(reading, target)
    return 1.0 - min(edits, len(target)) / len(target)


def edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance: fewest insertions, deletions and replacements to turn a into b."""
    row = list(range(len(b) + 1))
    for i, letter_a in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, letter_b in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (letter_a != letter_b))
    return row[-1]


@lru_cache(maxsize=4)
def _shared_recogniser(columns: int) -> LineRecogniser:
    """Return the shared session of a process: the session takes 21 MB, and any thread may call the session."""
    return LineRecogniser(columns)


@lru_cache(maxsize=1)
def _shared_page_reader() -> PageReader:
    return PageReader()


def _model_file(kind: Literal["det", "rec"]) -> str:
    package = find_spec("rapidocr")
    if package is None or package.origin is None:
        raise ImportError("the ocr rewards read with rapidocr's models; pip install 'rapidocr>=3.10'")
    return str(Path(package.origin).parent / "models" / f"PP-OCRv6_{kind}_small.onnx")
