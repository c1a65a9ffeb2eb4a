"""Where prompts come from: made on the fly for digits-ocr and shapes, or read from a text file.

The promise: the prompts of a batch are a pure function of (run seed, batch), distinct within the batch, and never one
of the held-out prompts that evaluation uses. So a batch that is redone after a loss asks for the same pictures.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Protocol

from engine.config import EngineConfig
from engine.shapes import Task, requests

HELD_OUT_DIGITS = 512
"""Of the 10,000 strings of four digits, so many are never trained on."""

HELD_OUT_SHAPES = 2
"""One in so many prompts of each task of shapes is never trained on ..."""

HELD_OUT_OF_A_TASK = 174
"""... but at most so many, so that the two tasks with most prompts are not nearly all that is evaluated."""

SHAPES_MIX = (
    *(Task.COUNTING, Task.POSITION, Task.ATTRIBUTION, Task.COLOURS, Task.TWO, Task.COUNTING),
    *(Task.SINGLE, Task.POSITION, Task.ATTRIBUTION, Task.COUNTING, Task.COLOURS, Task.TWO),
)
"""Tasks of consecutive prompts of shapes, over and over: less of what is easy and has few prompts."""

HELD_OUT_SHARE = 5
"""At most one line in so many of a prompt file is held out for evaluation."""


class PromptSource(Protocol):
    """Prompts of a run, for training and for evaluation."""

    def batch(self, batch: int) -> list[str]:
        """The prompts of one training batch, distinct."""

    def held_out(self) -> list[str]:
        """Prompts that are only evaluated, in a fixed order."""


def prompt_source(config: EngineConfig, workdir: str | None) -> PromptSource:
    """`digits`, `shapes`, or the text file that `prompts` names (relative to the job's workdir)."""
    if config.prompts == "digits":
        return DigitPrompts(config.seed, config.algorithm.prompts_per_batch, config.evaluation.prompts)
    if config.prompts == "shapes":
        return ShapesPrompts(config.seed, config.algorithm.prompts_per_batch, config.evaluation.prompts)
    path = Path(workdir or ".") / config.prompts
    if not path.is_file():
        raise ValueError(
            f"prompts is {config.prompts!r}, but there is no file {path}; "
            "give `digits`, `shapes`, or a text file in the job's workdir with one prompt a line"
        )
    return file_prompts(path, config.seed, config.algorithm.prompts_per_batch, config.evaluation.prompts)


@cache
def _digits() -> tuple[str, ...]:
    """All strings of four digits in a fixed shuffled order; the first ones are held out."""
    # Sorted by `random()`, the one method of Random whose values Python promises to keep.
    rng = random.Random(999)
    return tuple(f"{number:04d}" for number in sorted(range(10_000), key=lambda _: rng.random()))


def held_out_digits() -> list[str]:
    """The 512 strings of four digits that neither the base nor any run is trained on."""
    return list(_digits()[:HELD_OUT_DIGITS])


@dataclass(frozen=True)
class DigitPrompts:
    """Strings of four digits."""

    run_seed: int
    prompts_per_batch: int
    evaluated: int

    def __post_init__(self) -> None:
        if self.evaluated > HELD_OUT_DIGITS:
            raise ValueError(f"evaluation.prompts is {self.evaluated}; digits has {HELD_OUT_DIGITS} held-out prompts")
        trained = len(_digits()) - HELD_OUT_DIGITS
        if self.prompts_per_batch > trained:
            raise ValueError(f"prompts_per_batch is {self.prompts_per_batch}; digits has {trained} to train on")

    def batch(self, batch: int) -> list[str]:
        trained = _digits()[HELD_OUT_DIGITS:]
        return [trained[i] for i in _distinct(len(trained), self.prompts_per_batch, f"digits/{self.run_seed}/{batch}")]

    def held_out(self) -> list[str]:
        return held_out_digits()[: self.evaluated]


@cache
def _shapes() -> Mapping[Task, tuple[str, ...]]:
    """All prompts of shapes by task, each in a fixed shuffled order; the first ones are held out."""
    rng = random.Random(998)
    shuffled = sorted(requests(), key=lambda _: rng.random())
    return {task: tuple(request.prompt for request in shuffled if request.task is task) for task in Task}


def _held_out_of(prompts: Sequence[str]) -> int:
    return min(len(prompts) // HELD_OUT_SHAPES, HELD_OUT_OF_A_TASK)


@cache
def trained_shapes() -> Mapping[Task, tuple[str, ...]]:
    """The prompts of shapes that a run may be trained on."""
    return {task: prompts[_held_out_of(prompts) :] for task, prompts in _shapes().items()}


def held_out_shapes() -> list[str]:
    """The 512 prompts of shapes that neither the base nor any run is trained on, in the mix while it lasts.

    Half of the prompts of a task, and at most 174: 2 single, 78 two, 72 counting, 12 colours, 174 position and
    174 attribution.
    """
    return _mixed({task: prompts[: _held_out_of(prompts)] for task, prompts in _shapes().items()}, 0)


def _mixed(prompts: Mapping[Task, Sequence[str]], start: int) -> list[str]:
    """All prompts, one task after another as the mix says from place `start` on; a task that has no more is passed."""
    left = {task: iter(some) for task, some in prompts.items()}
    mixed: list[str] = []
    place = start
    while len(mixed) < sum(len(some) for some in prompts.values()):
        mixed.extend(islice(left[SHAPES_MIX[place % len(SHAPES_MIX)]], 1))
        place += 1
    return mixed


@dataclass(frozen=True)
class ShapesPrompts:
    """Coloured shapes, in GenEval's six tasks (engine/shapes.py)."""

    run_seed: int
    prompts_per_batch: int
    evaluated: int

    def __post_init__(self) -> None:
        held_out = len(held_out_shapes())
        if self.evaluated > held_out:
            raise ValueError(f"evaluation.prompts is {self.evaluated}; shapes has {held_out} held-out prompts")
        trained = len(requests()) - held_out
        if self.prompts_per_batch > trained:
            raise ValueError(f"prompts_per_batch is {self.prompts_per_batch}; shapes has {trained} to train on")

    def batch(self, batch: int) -> list[str]:
        drawn = {}
        for task, prompts in trained_shapes().items():
            count = min(len(prompts), self.prompts_per_batch)
            name = f"shapes/{self.run_seed}/{batch}/{task}"
            drawn[task] = [prompts[i] for i in _distinct(len(prompts), count, name)]
        # Each batch goes on in the mix where the one before stopped.
        return _mixed(drawn, batch * self.prompts_per_batch)[: self.prompts_per_batch]

    def held_out(self) -> list[str]:
        return held_out_shapes()[: self.evaluated]


@dataclass(frozen=True)
class FilePrompts:
    """Lines of a file: passes over the trained ones, each in an order of its own; the last lines are held out."""

    trained: tuple[str, ...]
    evaluated: tuple[str, ...]
    run_seed: int
    prompts_per_batch: int

    def batch(self, batch: int) -> list[str]:
        # Whole batches only, so that no prompt appears twice in one: a pass may leave a few lines out.
        a_pass, place = divmod(batch, len(self.trained) // self.prompts_per_batch)
        order = _distinct(len(self.trained), len(self.trained), f"file/{self.run_seed}/{a_pass}")
        start = place * self.prompts_per_batch
        return [self.trained[i] for i in order[start : start + self.prompts_per_batch]]

    def held_out(self) -> list[str]:
        return list(self.evaluated)


def file_prompts(path: Path, run_seed: int, prompts_per_batch: int, evaluated: int) -> FilePrompts:
    """One prompt a line; blank lines, `#` comments and repeated prompts are skipped.

    The last lines are held out: `evaluated` of them, but at most one fifth of the file, and at least one.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    held_out = min(evaluated, max(1, len(prompts) // HELD_OUT_SHARE))
    trained = len(prompts) - held_out
    if trained < prompts_per_batch:
        raise ValueError(
            f"{path} has {len(prompts)} different prompts, {held_out} of them held out for evaluation, which leaves "
            f"{max(0, trained)}; prompts_per_batch is {prompts_per_batch}: add prompts, or lower it"
        )
    return FilePrompts(prompts[:trained], prompts[trained:], run_seed, prompts_per_batch)


def _distinct(choices: int, count: int, name: str) -> list[int]:
    """`count` different numbers below `choices`, decided by the name."""
    rng = random.Random(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    if count * 2 > choices:
        return sorted(range(choices), key=lambda _: rng.random())[:count]
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        drawn[int(rng.random() * choices)] = None
    return list(drawn)
