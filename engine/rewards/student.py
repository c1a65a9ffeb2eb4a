"""A student of the ocr rewards for digits-ocr: a small network that reads four digits about a hundred times faster.

Exploration only has to tell seeds of one prompt apart. The recogniser takes longer for a picture than drawing it does,
so a student that ranks almost as well tries more seeds in the same idle time (research notes overlap 1). Whatever it
chose is drawn again and scored with the reward itself: no picture is trained or reported with a student's score.

The promise: a score depends on the picture and its prompt alone, to the last bit.
"""

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engine.models.digits import CHARACTERS, HEIGHT, WIDTH
from engine.rollout.request import Score

STUDENT = Path(__file__).with_name("digits_student.safetensors")
"""The shipped student, in fp32. `python -m engine.rewards.train_student` makes it again."""

NOTHING = len(string.digits)
"""The class after the ten digits: this place shows no digit."""

BLOCK = 16
"""Pictures per forward pass, always: the kernels chosen for another number may round differently."""

CHANNELS, HIDDEN = 16, 128


class DigitReader(nn.Module):
    """Three convolutions, two of them of stride 2, and two linear layers: 0.12 M parameters."""

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

    def forward(self, pictures: Tensor) -> Tensor:
        """[B, 1, 12, 32] in [-1, 1] -> logits [B, 4, 11]: for each place, the ten digits and `NOTHING`."""
        logits: Tensor = self.decide(self.look(pictures).flatten(1))
        return logits.view(-1, CHARACTERS, NOTHING + 1)


class DigitsStudent:
    """`Reward` of exploration: the share of characters that the recogniser is expected to read as asked, in [0, 1]."""

    def __init__(self, reader: DigitReader) -> None:
        self._reader = reader.eval().requires_grad_(False)

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> list[Score]:
        """pictures [B, 1, 12, 32]; prompts of four digits. Raises ValueError for others: it was shown nothing else."""
        if pictures.shape[1:] != (1, HEIGHT, WIDTH):
            raise ValueError(
                f"the student scores pictures [B, 1, {HEIGHT}, {WIDTH}]; it was given {list(pictures.shape)}"
            )
        asked = torch.tensor([digits_of(prompt) for prompt in prompts])
        probabilities = self._read(pictures.float().cpu()).softmax(dim=2)
        shares = probabilities.gather(2, asked[:, :, None]).mean(dim=(1, 2))
        return [Score(reward=share, metrics={}) for share in shares.tolist()]

    @torch.no_grad()
    def _read(self, pictures: Tensor) -> Tensor:
        """Logits [B, 4, 11], made in blocks that are filled up with blank pictures."""
        missing = -len(pictures) % BLOCK
        filled = torch.cat([pictures, pictures.new_ones(missing, *pictures.shape[1:])])
        return torch.cat([self._reader(block) for block in filled.split(BLOCK)])[: len(pictures)]


def digits_of(prompt: str) -> list[int]:
    """The four classes of a string of four digits."""
    if len(prompt) != CHARACTERS or not set(prompt) <= set(string.digits):
        raise ValueError(
            f"prompt {prompt!r} is not {CHARACTERS} digits, and the student reads nothing else; "
            "score it with the reward itself"
        )
    return [int(digit) for digit in prompt]


def load_digits_student(path: Path = STUDENT) -> DigitsStudent:
    """The shipped student."""
    reader = DigitReader()
    reader.load_state_dict(load_file(path))
    return DigitsStudent(reader)
