"""A student of the ocr rewards for digits-ocr: a small network that reads four digits about a hundred times faster.

Exploration only needs to distinguish the seeds of a prompt. The recogniser takes longer for an image than the model
takes to generate the image. A student with nearly as good a ranking therefore tries more seeds in the same idle time
(measured on digits-ocr). The chosen seeds are sampled again and scored with the reward itself: no image is trained or
reported with a student's score.

The promise: a score depends on the image and its prompt alone, to the last bit.
"""

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.models.digits import CHARACTERS, HEIGHT, WIDTH
from engine.protocol.request import Score

STUDENT = Path(__file__).with_name("digits_student.safetensors")
"""The shipped student, in fp32. `python -m engine.tasks.train_student` makes the student again."""

NOTHING = len(string.digits)
"""The class after the ten digits: no digit at the position."""

BLOCK = 16
"""Fixed number of images per forward pass: kernels for another batch size may round differently."""

CHANNELS, HIDDEN = 16, 128


class DigitReader(nn.Module):
    """Three convolutions, two of them with stride 2, and two linear layers: 0.12 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(1, CHANNELS, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.decide = nn.Sequential(
            nn.Linear(2 * CHANNELS * (HEIGHT // 4) * (WIDTH // 4), HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, CHARACTERS * (NOTHING + 1)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits: [B, 1, 12, 32] in [-1, 1] -> [B, 4, 11], per position the ten digits and `NOTHING`."""
        logits: Tensor = self.decide(self.look(images).flatten(1))
        return logits.view(-1, CHARACTERS, NOTHING + 1)


class DigitsStudent:
    """`Reward` for exploration: the expected share of characters the recogniser reads as requested, in [0, 1]."""

    def __init__(self, reader: DigitReader) -> None:
        self._reader = reader.eval().requires_grad_(False)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        """Score images [B, 1, 12, 32] for prompts of four digits. Raises ValueError for any other input.

        The student was trained on no other input.
        """
        if images.shape[1:] != (1, HEIGHT, WIDTH):
            raise ValueError(f"the student scores images [B, 1, {HEIGHT}, {WIDTH}]; it was given {list(images.shape)}")
        asked = torch.tensor([digits_of(prompt) for prompt in prompts])
        probabilities = self._read(images.float().cpu()).softmax(dim=2)
        shares = probabilities.gather(2, asked[:, :, None]).mean(dim=(1, 2))
        return [Score(reward=share, metrics={}) for share in shares.tolist()]

    @torch.no_grad()
    def _read(self, images: Tensor) -> Tensor:
        """Return the logits [B, 4, 11], computed in blocks padded with blank images."""
        missing = -len(images) % BLOCK
        filled = torch.cat([images, images.new_ones(missing, *images.shape[1:])])
        return torch.cat([self._reader(block) for block in filled.split(BLOCK)])[: len(images)]


def digits_of(prompt: str) -> list[int]:
    """Return the four classes of a string of four digits."""
    if len(prompt) != CHARACTERS or not set(prompt) <= set(string.digits):
        raise ValueError(
            f"prompt {prompt!r} is not {CHARACTERS} digits, and the student reads nothing else; "
            "score it with the reward itself"
        )
    return [int(digit) for digit in prompt]


def load_digits_student(path: Path = STUDENT) -> DigitsStudent:
    """Load the shipped student."""
    reader = DigitReader()
    reader.load_state_dict(load_file(path))
    return DigitsStudent(reader)
