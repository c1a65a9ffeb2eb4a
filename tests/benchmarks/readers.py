"""Exact match of some weights by readers that did not give the reward.

    python -m tests.benchmarks.readers --json                       the base that ships
    python -m tests.benchmarks.readers --weights FOLDER --json      what `spotrl pull RUN --to FOLDER` wrote, as well

The reward reads with PP-OCRv6 small at 72 columns. The readers:

- v6 at 144 columns: the same model, with wider images.
- v4 at 144 columns: PP-OCRv4 mobile (the wheel rapidocr-onnxruntime 1.4.4), a model of another generation.
- tesseract: Tesseract's LSTM reader, with other training data and other authors (the Debian package tesseract-ocr).
- templates: no model at all. Each digit's cell is compared with the font's own glyphs.

Without tesseract or the wheel its reader is left out, and a line on stderr says what to install.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from engine.config import EngineConfig
from engine.diffusion.sampler import denoise, evaluation_plan
from engine.models.digits import CHARACTERS, WIDTH, render
from engine.models.load import load_adapter, trainable
from engine.prompts import held_out_digits
from engine.protocol.request import Stream, seed_of
from engine.rewards.ocr import OcrReward
from tests.benchmarks.page import load_now, publish

FORWARD = 48
HELD_OUT = 512

GIVES_REWARD = "v6 at 72 columns, which gave the reward"

ENLARGED = 6
"""Tesseract reads letters of 30 pixels best; ours are 9 high."""
MARGIN = 24
"""White pixels around an enlarged image, which Tesseract needs to find a line."""

Pixels = NDArray[np.float32]


class MissingReader(Exception):
    """A reader's program or package is not installed; the message says how to install it."""


def exact_by_reader(weights: Mapping[str, Tensor] | None, held_out: int) -> dict[str, float]:
    """Return the exact match by reader. `weights`: of the transformer, by name; None: the shipped base."""
    prompts = held_out_digits()[:held_out]
    images = drawn(weights, prompts)
    with ThreadPoolExecutor(1) as pool:  # a thread for the rewards' own recogniser, one for the others
        wide = pool.submit(OcrReward("ocr_strict", 144), images, prompts)
        others = {name: exact for name in READERS if (exact := exact_or_none(name, images, prompts)) is not None}
        return {"v6 at 144 columns": float(np.mean([score.reward for score in wide.result()]))} | others


def drawn(weights: Mapping[str, Tensor] | None, prompts: Sequence[str]) -> Tensor:
    """Return the images of an evaluation, [B, 1, 12, 32] in [-1, 1]."""
    config = EngineConfig()
    adapter = load_adapter(config.model)
    if weights is not None:
        with torch.no_grad():
            for name, parameter in trainable(adapter).items():
                parameter.copy_(weights[name])
    plan = evaluation_plan(config.sampler, config.evaluation.steps)
    images = []
    for start in range(0, len(prompts), FORWARD):
        some = prompts[start : start + FORWARD]
        seeds = [seed_of(0, Stream.EVAL, 0, prompt, 0) for prompt in some]
        images.append(adapter.decode(denoise(adapter, plan, adapter.encode(some), seeds)))
    return torch.cat(images)


def exact_or_none(name: str, images: Tensor, prompts: Sequence[str]) -> float | None:
    """Return the share of images read as their prompt; None and a line on stderr if the reader is not installed."""
    try:
        texts = READERS[name](images)
    except MissingReader as missing:
        print(f"left out, {name}: {missing}", file=sys.stderr)
        return None
    return float(np.mean([text == prompt for text, prompt in zip(texts, prompts, strict=True)]))


def read_v4(images: Tensor) -> list[str]:
    """Read with PP-OCRv4 mobile and greedy CTC. images: [B, 1 or 3, H, W] in [-1, 1]"""
    package = find_spec("rapidocr_onnxruntime")
    if package is None or package.origin is None:
        raise MissingReader("the wheel rapidocr-onnxruntime is not installed; `make bench` installs it")
    file = Path(package.origin).parent / "models" / "ch_PP-OCRv4_rec_infer.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    alphabet = ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    scaled = functional.interpolate(images.float(), size=(48, 144), mode="bicubic").clamp(-1.0, 1.0)
    pixels = scaled.expand(-1, 3, -1, -1).contiguous().numpy()
    texts = []
    for start in range(0, len(pixels), 8):
        (classes,) = session.run(None, {session.get_inputs()[0].name: pixels[start : start + 8]})
        for row in classes.argmax(axis=2):
            merged = [int(new) for old, new in zip([0, *row], row, strict=False) if new != old]
            texts.append("".join(alphabet[index] for index in merged).replace(" ", ""))
    return texts


def read_tesseract(images: Tensor) -> list[str]:
    """Read one line of digits with Tesseract, in one process on one thread. images: [B, 1, H, W] in [-1, 1]"""
    program = shutil.which("tesseract")
    if program is None:
        raise MissingReader("there is no program tesseract; `apt-get install tesseract-ocr` brings it")
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, image in enumerate(enlarged(images)):
            files.append(f"{folder}/{number}.png")
            Image.fromarray(image).save(files[-1])
        names = Path(folder, "names.txt")
        names.write_text("\n".join(files))
        # Page segmentation mode 7 treats an image as one line of text.
        command = [program, str(names), "stdout", "--psm", "7", "-c", "tessedit_char_whitelist=0123456789"]
        environ = os.environ | {"OMP_THREAD_LIMIT": "1"}
        read = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    pages = read.stdout.split("\f")[: len(files)]
    return ["".join(page.split()) for page in pages]


def enlarged(images: Tensor) -> NDArray[np.uint8]:
    """Enlarge [B, 1, H, W] in [-1, 1] to [B, h, w] grey values, `ENLARGED` times as large and with a white margin."""
    large = functional.interpolate(images.float(), scale_factor=ENLARGED, mode="bicubic").clamp(-1.0, 1.0)
    framed = functional.pad(large, (MARGIN,) * 4, value=1.0)
    return ((framed[:, 0] + 1.0) * 127.5).round().to(torch.uint8).numpy()


def read_templates(images: Tensor) -> list[str]:
    """Read each cell as the digit with the best correlated rendering, moved by at most a pixel. images: [B, 1, H, W]"""
    grey = images.float().numpy()[:, 0]
    texts = [""] * len(grey)
    for place in range(CHARACTERS):
        digits, glyphs = templates(place)
        best = (standardised(cell_of(grey, place)) @ glyphs.T).argmax(axis=1)
        texts = [text + digits[index] for text, index in zip(texts, best, strict=True)]
    return texts


@cache
def templates(place: int) -> tuple[str, Pixels]:
    """Return the digits and their renderings in that place, standardised: [10 x 9 shifts], [10 x 9, pixels]."""
    shifts = range(-1, 2)
    glyphs = [
        (digit, render(" " * place + digit, Placed(right, down)))
        for digit in "0123456789"
        for right in shifts
        for down in shifts
    ]
    pixels = np.stack([glyph for _, glyph in glyphs])
    return "".join(digit for digit, _ in glyphs), standardised(cell_of(pixels, place))


class Placed(random.Random):
    """A random generator that makes `render` draw black ink, moved by this many pixels; the ink is drawn first."""

    def __init__(self, right: int, down: int) -> None:
        super().__init__(0)
        self._numbers = iter((0, right, down))

    def randint(self, a: int, b: int) -> int:
        return next(self._numbers)


def cell_of(images: Pixels, place: int) -> Pixels:
    """[B, H, W] -> [B, H x width of a cell]"""
    width = WIDTH // CHARACTERS
    return images[:, :, place * width : (place + 1) * width].reshape(len(images), -1)


def standardised(rows: Pixels) -> Pixels:
    """[B, pixels] with mean 0 and length 1 a row; a row of one value is all zeros."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-6)


READERS: Mapping[str, Callable[[Tensor], list[str]]] = {
    "v4 at 144 columns": read_v4,
    "tesseract": read_tesseract,
    "templates": read_templates,
}
"""Readers that are independent of the one that gives the reward."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a folder that `spotrl pull` wrote, of a digits-ocr run")
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the last line is always JSON")
    options = parser.parse_args()
    load1 = load_now()
    torch.set_num_threads(1)
    found = {"base": checked(None)}
    if options.weights is not None:
        (file,) = options.weights.glob("transformer/*.safetensors")
        found["trained"] = checked(load_file(file))
    publish(
        "readers",
        question="do readers that did not give the reward see what training gained?",
        command=f"python -m tests.benchmarks.readers{' --weights FOLDER' if options.weights else ''} --json",
        result={"exact_match": found},
        runs=1,
        seeds=[0],
        load1=load1,
        rows=[{"reader": name, **{whose: f"{of[name]:.3f}" for whose, of in found.items()}} for name in found["base"]],
        text=TEXT,
    )


TEXT = f"""
Measured: exact match on {HELD_OUT} held-out strings, ODE 8 steps, fixed noise, averaged weights. Trained: a run of the
quickstart's job, seed 0, whose weights `spotrl pull RUN --to FOLDER` wrote. Training saw none of the other readers: a
gain that they do not see would be reward hacking. Tesseract and the templates share nothing with PP-OCR: Tesseract has
another model, other training data and other authors, and the templates are the font's own glyphs and no model at all.
"""


def checked(weights: Mapping[str, Tensor] | None) -> dict[str, float]:
    """Return the exact match by every reader, the reward's own first."""
    prompts = held_out_digits()[:HELD_OUT]
    own = OcrReward("ocr_strict")(drawn(weights, prompts), prompts)
    return {GIVES_REWARD: float(np.mean([score.reward for score in own]))} | exact_by_reader(weights, HELD_OUT)


if __name__ == "__main__":
    main()
