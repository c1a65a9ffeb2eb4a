"""word_readings: does `reward: ocr` read perfect renderings of words at the size of real models?

    python -m tests.benchmarks.word_readings [--size 512]

Draws each word black on white with Pillow's own font, as wide as the image (less a margin) and half as wide, and
prints one JSON line per width: exact match, mean reward, CPU milliseconds per image (one thread; loading apart).
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from engine.rewards.ocr import OcrReward

WORDS = [
    "Bakery",
    "Coffee",
    "Library",
    "Harbour",
    "Museum",
    "Station",
    "Garden",
    "Theatre",
    "Hospital",
    "School",
    "Market",
    "Airport",
    "Bridge",
    "Castle",
    "Forest",
    "Island",
    "Mountain",
    "River",
    "Valley",
    "Window",
    "Kitchen",
    "Summer",
    "Winter",
    "Spring",
    "Autumn",
    "Monday",
    "Friday",
    "Orange",
    "Purple",
    "Yellow",
    "Silver",
    "Golden",
    "Hotel",
    "Pharmacy",
    "Welcome",
]

WIDTHS = {"full": 0.9, "half": 0.45}
"""Share of the image's width that a word takes."""


def image_of(text: str, width: float, size: int = 512) -> Tensor:
    """Draw lines of text in the middle of a white image [3, size, size] in [-1, 1]; the longest has this width."""
    at_100 = ImageFont.load_default(100)
    longest = max(at_100.getlength(line) for line in text.splitlines())
    image = Image.new("RGB", (size, size), "white")
    font = ImageFont.load_default(100 * width * size / longest)
    ImageDraw.Draw(image).text((size / 2, size / 2), text, font=font, fill="black", anchor="mm")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="rows and columns of an image")
    size = parser.parse_args().size
    reward, prompts = OcrReward("ocr"), [f'a sign that says "{word}"' for word in WORDS]
    reward(image_of("loads", 0.9, size)[None], ["loads"])
    for name, width in WIDTHS.items():
        images = torch.stack([image_of(word, width, size) for word in WORDS])
        begun = time.process_time()
        scores = reward(images, prompts)
        milliseconds = 1000 * (time.process_time() - begun) / len(WORDS)
        exact = statistics.mean(score.metrics["exact_match"] for score in scores)
        mean = statistics.mean(score.reward for score in scores)
        row = {"width": name, "words": len(WORDS), "exact_match": exact, "reward": mean, "cpu_ms": milliseconds}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
