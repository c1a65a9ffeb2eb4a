"""Define the `shapes` task: its prompts, their meaning and the appearance of the shapes.

The task is a small GenEval (arXiv 2310.11513; djghosh13/geneval): the same six kinds of task, with flat shapes in
flat colours on white instead of photographs of objects. Model, prompts and reward all read this file.

    single       a cross
    two          a circle and a square, a red circle and a square
    counting     three triangles, two red squares, two circles and a cross
    colours      a blue triangle
    position     a circle above a square, a green circle left of a blue triangle
    attribution  a red circle and a blue square

Promise: a prompt and its `Request` determine each other, and the order of all prompts never changes.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import permutations, product
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

IMAGE_SIDE = 36
"""Rows and columns of an image."""

SHAPE = 12
"""Rows and columns of a shape, centred in a quarter of the image. 6 white pixels stay between neighbours, so noise does
not join two shapes."""

COLOURS = MappingProxyType(
    {
        "red": (220, 40, 40),
        "green": (40, 160, 60),
        "blue": (50, 80, 220),
        "yellow": (240, 200, 30),
        "purple": (180, 50, 190),
        "black": (30, 30, 30),
    }
)
"""RGB, 0 to 255. Any two colours are at least 144 apart, more than five times a noise of 0.2 in images of [-1, 1]."""

KINDS = MappingProxyType({"square": "squares", "circle": "circles", "triangle": "triangles", "cross": "crosses"})
"""Singular to plural."""

NUMBERS = MappingProxyType({2: "two", 3: "three", 4: "four"})
"""Counts requested by counting prompts, as in GenEval."""

RELATIONS = ("left of", "right of", "above", "below")

WORDS = 8
"""Number of words in the longest prompt: a green circle left of a blue triangle."""

VOCABULARY = (
    *("a", "and", "left", "right", "of", "above", "below"),
    *NUMBERS.values(),
    *COLOURS,
    *KINDS.keys(),
    *KINDS.values(),
)


class Task(StrEnum):
    """GenEval's six kinds of task."""

    SINGLE = "single"
    TWO = "two"
    COUNTING = "counting"
    COLOURS = "colours"
    POSITION = "position"
    ATTRIBUTION = "attribution"


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """A clause of a request: a number of shapes of one kind. Any colour is correct if `colour` is None."""

    kind: str
    colour: str | None = None
    count: int = 1

    def __str__(self) -> str:
        words = ["a" if self.count == 1 else NUMBERS[self.count]]
        if self.colour is not None:
            words.append(self.colour)
        words.append(self.kind if self.count == 1 else KINDS[self.kind])
        return " ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Required content of an image; nothing else may appear.

    `relation` is the position of the first clause relative to the second.
    """

    task: Task
    clauses: tuple[Clause, ...]
    relation: str | None = None

    @property
    def prompt(self) -> str:
        """Return the prompt: one clause, or two clauses joined by `and` or by their relation."""
        return f" {self.relation or 'and'} ".join(str(clause) for clause in self.clauses)


@cache
def requests() -> tuple[Request, ...]:
    """Return all 2,752 requests, in a fixed order.

    Two clauses always differ in kind, and in colour if both have a colour.
    """
    kinds, colours = tuple(KINDS), tuple(COLOURS)
    plain = [(Clause(kind=kind), Clause(kind=other_kind)) for kind, other_kind in permutations(kinds, 2)]
    # One of the two clauses has a colour, the other has none.
    half = [
        pair
        for colour, (first, second) in product(colours, plain)
        for pair in ((replace(first, colour=colour), second), (first, replace(second, colour=colour)))
    ]
    full = [
        (replace(first, colour=colour), replace(second, colour=other_colour))
        for (first, second), (colour, other_colour) in product(plain, permutations(colours, 2))
    ]
    return (
        *(Request(task=Task.SINGLE, clauses=(Clause(kind=kind),)) for kind in kinds),
        *(Request(task=Task.TWO, clauses=pair) for pair in (*plain, *half)),
        *(
            Request(task=Task.COUNTING, clauses=(Clause(kind=kind, colour=colour, count=count),))
            for count, colour, kind in product(NUMBERS, (None, *colours), kinds)
        ),
        *(
            Request(task=Task.COUNTING, clauses=(replace(first, count=count), replace(second, count=other_count)))
            for count, other_count in product((1, *NUMBERS), repeat=2)
            if 2 < count + other_count <= max(NUMBERS)
            for first, second in plain
        ),
        *(
            Request(task=Task.COLOURS, clauses=(Clause(kind=kind, colour=colour),))
            for kind, colour in product(kinds, colours)
        ),
        *(
            Request(task=Task.POSITION, clauses=pair, relation=relation)
            for relation, pair in product(RELATIONS, (*plain, *half, *full))
        ),
        *(Request(task=Task.ATTRIBUTION, clauses=pair) for pair in full),
    )


@cache
def _by_prompt() -> dict[str, Request]:
    return {request.prompt: request for request in requests()}


def parse(prompt: str) -> Request:
    """Return the request of a prompt. Raises ValueError for any other text."""
    request = _by_prompt().get(prompt)
    if request is None:
        raise ValueError(
            f"prompt {prompt!r} is none of the {len(requests())} of shapes; it knows `a cross`, `two red squares`, "
            "`a red circle and a blue square`, `a circle above a square` and the like, where two things differ in kind "
            f"and colour, in the words {', '.join(VOCABULARY)}"
        )
    return request


@cache
def coverage(kind: str) -> NDArray[np.float32]:
    """Return the share of each pixel covered by a shape, [SHAPE, SHAPE] in [0, 1], sampled at 4 x 4 points a pixel."""
    fine = 4
    points = (np.arange(SHAPE * fine) + 0.5) / (SHAPE * fine) * 2.0 - 1.0
    x, y = points[None, :], points[:, None]  # from -1 to 1, y downwards
    match kind:
        case "square":
            inside = np.ones((SHAPE * fine, SHAPE * fine), dtype=bool)
        case "circle":
            inside = x**2 + y**2 <= 1.0
        case "triangle":
            inside = np.abs(x) <= (y + 1.0) / 2.0
        case "cross":
            inside = np.minimum(np.abs(x), np.abs(y)) <= 1.0 / 3.0
        case _:
            raise ValueError(f"kind is {kind!r}; use {', '.join(KINDS)}")
    pixels: NDArray[np.float32] = inside.reshape(SHAPE, fine, SHAPE, fine).mean(axis=(1, 3), dtype=np.float32)
    return pixels
