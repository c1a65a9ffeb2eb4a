"""Provide a run's prompts: generated for digits-ocr and shapes, or read from files (engine/prompt_set.py).

Promise: the prompts of a batch are a pure function of (run seed, batch), distinct within the batch, and never one of
the held-out evaluation prompts. A batch repeated after a loss therefore requests the same images.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Protocol

from engine.config import EngineConfig
from engine.prompt_set import Metadata, all_metadata, prompt_paths, read_prompts
from engine.shapes import Task, requests

GENERATED = ("digits", "shapes")
"""Prompt sets that spotrl generates. Any other name is a file or a folder."""

HELD_OUT_DIGITS = 512
"""Number of held-out strings, of the 10,000 strings of four digits. Training never uses the held-out strings."""

HELD_OUT_SHAPES = 2
"""Divisor of a task's prompts in shapes: one prompt in `HELD_OUT_SHAPES` is held out, up to `HELD_OUT_OF_A_TASK`."""

HELD_OUT_OF_A_TASK = 174
"""Most held-out prompts of one task in shapes. Without the limit, the two tasks with most prompts would make up nearly
the whole evaluation."""

SHAPES_MIX = (
    *(Task.COUNTING, Task.POSITION, Task.ATTRIBUTION, Task.COLOURS, Task.TWO, Task.COUNTING),
    *(Task.SINGLE, Task.POSITION, Task.ATTRIBUTION, Task.COUNTING, Task.COLOURS, Task.TWO),
)
"""Tasks of consecutive prompts of shapes, repeated in a cycle. Easy tasks with few prompts appear less often."""

HELD_OUT_SHARE = 5
"""Divisor of a prompt file's prompts: at most one prompt in `HELD_OUT_SHARE` is held out for evaluation."""


class PromptSource(Protocol):
    """Prompts of a run, for training and for evaluation."""

    def batch(self, batch: int) -> list[str]:
        """Return the distinct prompts of one training batch."""

    def held_out(self) -> list[str]:
        """Return the prompts used only for evaluation, in a fixed order."""


def prompt_source(config: EngineConfig, workdir: str | None) -> PromptSource:
    """Return the source named by `prompts`: `digits`, `shapes`, or a file or folder relative to the job's workdir.

    Raises ValueError if a file is missing or has too few prompts.
    """
    if config.prompts == "digits":
        return DigitPrompts(config.seed, config.algorithm.prompts_per_batch, config.evaluation.prompts)
    if config.prompts == "shapes":
        return ShapesPrompts(config.seed, config.algorithm.prompts_per_batch, config.evaluation.prompts)
    path, test = prompt_paths(Path(workdir or "."), config.prompts, config.test_prompts)
    return file_prompts(path, config.seed, config.algorithm.prompts_per_batch, config.evaluation.prompts, test)


def metadata_of_job(config: EngineConfig, workdir: str | None) -> Mapping[str, Metadata]:
    """Return the metadata of the job's prompts by prompt; empty for generated prompts and for text files.

    Raises ValueError if a file is missing or a line is no prompt.
    """
    if config.prompts in GENERATED:
        return {}
    return all_metadata(Path(workdir or "."), config.prompts, config.test_prompts)


def prompts_of_job(source: PromptSource, iterations: int, most: int) -> list[str]:
    """Return the prompts of a run in the order of their first use, at most `most` of them."""
    unique = dict.fromkeys([*source.batch(0), *source.held_out()])
    for batch in range(1, iterations):
        if len(unique) >= most:
            break
        unique |= dict.fromkeys(source.batch(batch))
    return list(unique)[:most]


@cache
def _digits() -> tuple[str, ...]:
    """Return all strings of four digits in a fixed shuffled order. The first strings are held out."""
    # Sort by `random()`: Python guarantees reproducible values only for this method of Random.
    rng = random.Random(999)
    return tuple(f"{number:04d}" for number in sorted(range(10_000), key=lambda _: rng.random()))


def held_out_digits() -> list[str]:
    """Return the 512 held-out strings of four digits.

    Neither the base model nor any run is trained on a held-out string.
    """
    return list(_digits()[:HELD_OUT_DIGITS])


@dataclass(frozen=True)
class DigitPrompts:
    """Strings of four digits as prompts."""

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
    """Return all prompts of shapes by task, each task in a fixed shuffled order.

    The first prompts of a task are held out.
    """
    rng = random.Random(998)
    shuffled = sorted(requests(), key=lambda _: rng.random())
    return {task: tuple(request.prompt for request in shuffled if request.task is task) for task in Task}


def _held_out_of(prompts: Sequence[str]) -> int:
    return min(len(prompts) // HELD_OUT_SHAPES, HELD_OUT_OF_A_TASK)


@cache
def trained_shapes() -> Mapping[Task, tuple[str, ...]]:
    """Return the prompts of shapes available for training."""
    return {task: prompts[_held_out_of(prompts) :] for task, prompts in _shapes().items()}


def held_out_shapes() -> list[str]:
    """Return the 512 held-out prompts of shapes, in the order of the task mix while prompts last.

    Neither the base model nor any run is trained on a held-out prompt. Half of the prompts of a task are held out, and
    at most 174: 2 single, 78 two, 72 counting, 12 colours, 174 position and 174 attribution.
    """
    return _mixed({task: prompts[: _held_out_of(prompts)] for task, prompts in _shapes().items()}, 0)


def _mixed(prompts: Mapping[Task, Sequence[str]], start: int) -> list[str]:
    """Return all prompts in the task order of the mix, from position `start` on.

    A task with no prompts left is skipped.
    """
    remaining = {task: iter(some) for task, some in prompts.items()}
    mixed: list[str] = []
    place = start
    while len(mixed) < sum(len(some) for some in prompts.values()):
        mixed.extend(islice(remaining[SHAPES_MIX[place % len(SHAPES_MIX)]], 1))
        place += 1
    return mixed


@dataclass(frozen=True)
class ShapesPrompts:
    """Coloured shapes as prompts, in GenEval's six tasks (engine/shapes.py)."""

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
        # Each batch continues the mix after the previous batch.
        return _mixed(drawn, batch * self.prompts_per_batch)[: self.prompts_per_batch]

    def held_out(self) -> list[str]:
        return held_out_shapes()[: self.evaluated]


@dataclass(frozen=True)
class FilePrompts:
    """Prompts of a file.

    Training passes over the trained prompts, each pass in an order of its own. Held-out prompts are only evaluated.
    """

    trained: tuple[str, ...]
    evaluated: tuple[str, ...]
    run_seed: int
    prompts_per_batch: int

    def batch(self, batch: int) -> list[str]:
        # Use whole batches only, so no prompt appears twice in a batch. A pass may leave a few prompts out.
        a_pass, place = divmod(batch, len(self.trained) // self.prompts_per_batch)
        order = _order(len(self.trained), f"file/{self.run_seed}/{a_pass}")
        start = place * self.prompts_per_batch
        return [self.trained[i] for i in order[start : start + self.prompts_per_batch]]

    def held_out(self) -> list[str]:
        return list(self.evaluated)


def file_prompts(
    path: Path, run_seed: int, prompts_per_batch: int, evaluated: int, test: Path | None = None
) -> FilePrompts:
    """Read a prompt file, text or JSONL. Repeated prompts are skipped.

    `test`: a file of evaluation prompts, of which at most `evaluated` are used. Prompts in both files are not trained.
    Without `test`, a random part of `path` is held out: `evaluated` prompts, but at most one fifth, and at least one.
    Raises ValueError if too few prompts are left to train, or none to evaluate.
    """
    prompts = tuple(read_prompts(path))
    if test is None:
        share = min(evaluated, max(1, len(prompts) // HELD_OUT_SHARE))
        held_out = _drawn(prompts, share)
        trained = tuple(prompt for prompt in prompts if prompt not in held_out)
    else:
        tested = tuple(read_prompts(test))
        if not tested:
            raise ValueError(f"{test} has no prompts to evaluate with; write one prompt a line, or JSONL")
        held_out = _drawn(tested, evaluated)
        # Exclude all test prompts, used or not: another run may evaluate with more of the same file.
        trained = tuple(prompt for prompt in prompts if prompt not in set(tested))
    if len(trained) < prompts_per_batch:
        raise ValueError(
            f"{path} has {len(prompts)} different prompts, {len(prompts) - len(trained)} of them held out for "
            f"evaluation, which leaves {len(trained)}; prompts_per_batch is {prompts_per_batch}: add prompts, or "
            "lower it"
        )
    return FilePrompts(trained, held_out, run_seed, prompts_per_batch)


def _drawn(prompts: Sequence[str], count: int) -> tuple[str, ...]:
    """Return a random part, in order of the file: the `count` prompts with the smallest blake2b.

    Runs with different seeds draw the same part, so their curves are comparable. A file sorted by subject has held-out
    prompts of each subject. A prompt's number depends only on the prompt's text: moved lines change nothing, and an
    added line changes at most two prompts of the part.
    """

    def number(prompt: str) -> bytes:
        return hashlib.blake2b(f"held out/{prompt}".encode(), digest_size=16).digest()

    chosen = set(sorted(prompts, key=number)[:count])
    return tuple(prompt for prompt in prompts if prompt in chosen)


@lru_cache(maxsize=4)
def _order(choices: int, name: str) -> Sequence[int]:
    return _distinct(choices, choices, name)


def _distinct(choices: int, count: int, name: str) -> list[int]:
    """Return `count` distinct numbers below `choices`, determined by the name."""
    rng = random.Random(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
    if count * 2 > choices:
        return sorted(range(choices), key=lambda _: rng.random())[:count]
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        drawn[int(rng.random() * choices)] = None
    return list(drawn)
