"""Shapes rewards: does the picture show the shapes that were asked for, and nothing else?

A rule-based GenEval (djghosh13/geneval; research notes rl 1.4), with no learned detector. Every pixel takes the nearest
colour of the palette; touching pixels that are not white make an object; its kind is the outline that it overlaps
best; where two objects lie to one another is GenEval's rule.

    shapes         the share of what was asked for, graded (Flow-GRPO trains on a graded GenEval, too)
    shapes_strict  1 if all that was asked for is there and nothing else, else 0

The promise: a score depends on the picture and its prompt alone, and `shapes` is 1 exactly where `shapes_strict` is.
Every score carries `exact_match` (strict) and `similarity` (graded).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import hypot
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.rollout.request import Score
from engine.shapes import COLOURS, KINDS, PICTURE, SHAPE, Request, Thing, coverage, parse

ShapesName = Literal["shapes", "shapes_strict"]

MIN_AREA = 12
"""Pixels. Less is a speck that nobody asked for and nobody minds; the smallest shape has 72."""

MIN_OVERLAP = 0.75
"""Intersection over union with the best outline, or an object is of no kind. A clean shape has 0.93 or more with its
own outline, and 0.83 or less with any other."""

MIN_PURITY = 0.7
"""Share of an object's inner pixels that its colour must have, or it is of no colour."""

MARGIN = 0.1
"""GenEval's position rule: offsets are shortened by this share of the two boxes' summed sizes ..."""

DIRECTION = 0.5
"""... and must then be more than this share of the distance of the centres."""

REACH = 1
"""Pixels that an outline may be moved by, to find its best overlap with an object."""

WINDOW = SHAPE + 2 * (REACH + 1)
"""Rows and columns around an object that outlines are laid over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One object of a picture. `kind` and `colour` are None where it is neither; centre and size of its box, pixels."""

    kind: str | None
    colour: str | None
    x: float
    y: float
    width: int
    height: int


class ShapesReward:
    """One of the two rewards."""

    def __init__(self, name: ShapesName = "shapes") -> None:
        self._name = name

    def __call__(self, pictures: Tensor, prompts: Sequence[str]) -> list[Score]:
        if tuple(pictures.shape[1:]) != (3, PICTURE, PICTURE):
            raise ValueError(
                f"{self._name} reads pictures [B, 3, {PICTURE}, {PICTURE}]; it was given {list(pictures.shape)}, "
                "so use it with model: shapes"
            )
        pixels = pictures.float().cpu().permute(0, 2, 3, 1).numpy()
        return [self._score(detect(one), parse(prompt)) for one, prompt in zip(pixels, prompts, strict=True)]

    def _score(self, seen: Sequence[Seen], request: Request) -> Score:
        graded = similarity(seen, request)
        strict = float(graded == 1.0)
        reward = graded if self._name == "shapes" else strict
        return Score(reward=reward, metrics={"exact_match": strict, "similarity": graded})


def similarity(seen: Sequence[Seen], request: Request) -> float:
    """The share of what was asked for, in [0, 1].

    Each thing asks for its number of its kind, and again in its colour if it has one; a relation asks once. The mean of
    what is met is multiplied by asked / seen where more objects are there than were asked for.
    """
    met: list[float] = []
    for thing in request.things:
        met.append(min(1.0, len(_matching(seen, Thing(kind=thing.kind))) / thing.count))
        if thing.colour is not None:
            met.append(min(1.0, len(_matching(seen, thing)) / thing.count))
    if request.relation is not None:
        first, second = (_matching(seen, thing) for thing in request.things)
        met.append(float(any(request.relation in relations(a, b) for a in first for b in second)))
    asked = sum(thing.count for thing in request.things)
    return sum(met) / len(met) * asked / max(asked, len(seen))


def _matching(seen: Sequence[Seen], thing: Thing) -> list[Seen]:
    return [one for one in seen if one.kind == thing.kind and thing.colour in (None, one.colour)]


def relations(a: Seen, b: Seen) -> set[str]:
    """How `a` lies to `b`, by GenEval's rule; on a diagonal two relations hold."""
    right, down = a.x - b.x, a.y - b.y
    distance = hypot(right, down)
    if distance == 0.0:
        return set()
    across = max(abs(right) - MARGIN * (a.width + b.width), 0.0) / distance
    along = max(abs(down) - MARGIN * (a.height + b.height), 0.0) / distance
    found = set()
    if across > DIRECTION:
        found.add("left of" if right < 0 else "right of")
    if along > DIRECTION:
        found.add("above" if down < 0 else "below")
    return found


# --- what is in the picture ----------------------------------------------------------------------------------


def detect(picture: NDArray[np.float32]) -> list[Seen]:
    """The objects of one picture [PICTURE, PICTURE, 3] in [-1, 1], from top to bottom."""
    names, nearest = list(COLOURS), _nearest_colour(picture)
    found = []
    ink = nearest < len(names)
    # The soft edge of a shape mixes its colour with white, which may come near to a third one.
    inner = np.zeros_like(ink)
    inner[1:-1, 1:-1] = ink[1:-1, 1:-1] & ink[:-2, 1:-1] & ink[2:, 1:-1] & ink[1:-1, :-2] & ink[1:-1, 2:]
    for rows, columns in _objects(ink):
        if len(rows) < MIN_AREA:
            continue
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        solid = inner[rows, columns]
        votes = np.bincount(nearest[rows[solid], columns[solid]], minlength=len(names))
        best = int(votes.argmax())
        found.append(
            Seen(
                kind=_kind(rows, columns, (int(top + bottom) // 2, int(left + right) // 2)),
                colour=names[best] if votes[best] > MIN_PURITY * solid.sum() else None,
                x=float(left + right) / 2.0,
                y=float(top + bottom) / 2.0,
                width=int(right - left),
                height=int(bottom - top),
            )
        )
    return found


def _nearest_colour(picture: NDArray[np.float32]) -> NDArray[np.intp]:
    """[PICTURE, PICTURE]: the place of a pixel's colour in COLOURS, or one more for white."""
    palette = np.array([*COLOURS.values(), (255, 255, 255)], dtype=np.float32) / 127.5 - 1.0
    # |p - c|^2 without |p|^2, which is the same for every colour.
    distance = (palette**2).sum(axis=1) - 2.0 * np.clip(picture, -1.0, 1.0) @ palette.T
    nearest: NDArray[np.intp] = distance.argmin(axis=-1)
    return nearest


def _objects(ink: NDArray[np.bool_]) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Connected components (by sides) of a mask: rows and columns of the pixels of each."""
    parent: list[int] = []

    def root(label: int) -> int:
        while parent[label] != label:
            label = parent[label]
        return label

    padded = np.zeros((ink.shape[0], ink.shape[1] + 2), dtype=np.int8)
    padded[:, 1:-1] = ink
    # Runs of ink, row by row: a run begins where the difference is 1 and ends where it is -1.
    rows, edges = np.nonzero(np.diff(padded, axis=1))
    runs = list(zip(rows[::2].tolist(), edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    above: list[int] = []
    current: list[int] = []
    row_of_current = -1
    for label, (row, start, end) in enumerate(runs):
        parent.append(label)
        if row != row_of_current:
            above = current if row == row_of_current + 1 else []
            current, row_of_current = [], row
        current.append(label)
        for other in above:
            if runs[other][1] < end and start < runs[other][2]:
                parent[root(other)] = root(label)
    pixels: dict[int, list[tuple[int, int]]] = {}
    for label, (row, start, end) in enumerate(runs):
        pixels.setdefault(root(label), []).extend((row, column) for column in range(start, end))
    return [(places[:, 0], places[:, 1]) for places in map(np.array, pixels.values())]


def _kind(rows: NDArray[np.intp], columns: NDArray[np.intp], centre: tuple[int, int]) -> str | None:
    """The outline that these pixels overlap best, if they do so well enough."""
    outlines, areas = _outlines()
    down, right = rows - centre[0] + WINDOW // 2, columns - centre[1] + WINDOW // 2
    inside = (down >= 0) & (down < WINDOW) & (right >= 0) & (right < WINDOW)
    common = outlines[:, down[inside] * WINDOW + right[inside]].sum(axis=1)
    overlap = common / (areas + len(rows) - common)
    best = int(overlap.argmax())
    return list(KINDS)[best // (2 * REACH + 1) ** 2] if overlap[best] >= MIN_OVERLAP else None


@cache
def _outlines() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Every kind, moved by up to REACH pixels: masks [kinds x moves, WINDOW x WINDOW] of 0 and 1, and their areas."""
    masks = []
    for kind in KINDS:
        for down in range(1, 2 * REACH + 2):
            for right in range(1, 2 * REACH + 2):
                mask = np.zeros((WINDOW, WINDOW), dtype=np.float32)
                mask[down : down + SHAPE, right : right + SHAPE] = coverage(kind) >= 0.5
                masks.append(mask.ravel())
    stacked = np.stack(masks)
    return stacked, stacked.sum(axis=1)
