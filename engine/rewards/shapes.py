"""Shapes rewards: score the match between the shapes in an image and the requested shapes.

A rule-based GenEval (arXiv 2310.11513; djghosh13/geneval), without a learned detector. Every pixel takes the
nearest colour of the palette. Touching non-white pixels form an object. The object's kind is the outline with the best
overlap. The relative position of two objects follows GenEval's rule.

    shapes         the fulfilled share of the request, graded (Flow-GRPO trains on a graded GenEval, too)
    shapes_strict  1 if all requested shapes are present and nothing else, else 0

The promise: a score depends on the image and its prompt alone, and `shapes` is 1 exactly if `shapes_strict` is 1.
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

from engine.protocol.request import Score
from engine.shapes import COLOURS, IMAGE_SIDE, KINDS, SHAPE, Clause, Request, coverage, parse

ShapesName = Literal["shapes", "shapes_strict"]

MIN_AREA = 12
"""Fewest pixels of an object. Smaller specks are ignored without penalty; the smallest shape has 72 pixels."""

MIN_OVERLAP = 0.75
"""Smallest intersection over union with the best outline; below, an object has no kind. A clean shape has 0.93 or more
with its own outline, and 0.83 or less with any other outline."""

MIN_PURITY = 0.7
"""Smallest share of an object's inner pixels with the object's colour; below, an object has no colour."""

MARGIN = 0.1
"""GenEval's position rule: offsets are shortened by this share of the two boxes' summed sizes ..."""

DIRECTION = 0.5
"""... and must then exceed this share of the distance of the centres."""

REACH = 1
"""Pixels by which an outline may be moved to find its best overlap with an object."""

WINDOW = SHAPE + 2 * (REACH + 1)
"""Rows and columns of the area around an object for the outlines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """An object of an image.

    `kind` or `colour` is None without a match; centre and size of the object's box, in pixels.
    """

    kind: str | None
    colour: str | None
    x: float
    y: float
    width: int
    height: int


class ShapesReward:
    """A shapes reward, selected by name."""

    def __init__(self, name: ShapesName = "shapes") -> None:
        self._name = name

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> list[Score]:
        if tuple(images.shape[1:]) != (3, IMAGE_SIDE, IMAGE_SIDE):
            raise ValueError(
                f"{self._name} reads images [B, 3, {IMAGE_SIDE}, {IMAGE_SIDE}]; it was given {list(images.shape)}, "
                "so use it with model: shapes"
            )
        pixels = images.float().cpu().permute(0, 2, 3, 1).numpy()
        return [self._score(detect(image), parse(prompt)) for image, prompt in zip(pixels, prompts, strict=True)]

    def _score(self, shapes: Sequence[Seen], request: Request) -> Score:
        graded = similarity(shapes, request)
        strict = float(graded == 1.0)
        reward = graded if self._name == "shapes" else strict
        return Score(reward=reward, metrics={"exact_match": strict, "similarity": graded})


def similarity(shapes: Sequence[Seen], request: Request) -> float:
    """Return the fulfilled share of the request, in [0, 1].

    Each clause requires its number of objects of its kind, and again in its colour if the clause has a colour. A
    relation counts once. The mean of the fulfilled shares is multiplied by requested / seen if the image has too many
    objects.
    """
    met: list[float] = []
    for clause in request.clauses:
        met.append(min(1.0, len(_matching(shapes, Clause(kind=clause.kind))) / clause.count))
        if clause.colour is not None:
            met.append(min(1.0, len(_matching(shapes, clause)) / clause.count))
    if request.relation is not None:
        first, second = (_matching(shapes, clause) for clause in request.clauses)
        met.append(float(any(request.relation in relations(a, b) for a in first for b in second)))
    asked = sum(clause.count for clause in request.clauses)
    return sum(met) / len(met) * asked / max(asked, len(shapes))


def _matching(shapes: Sequence[Seen], clause: Clause) -> list[Seen]:
    return [shape for shape in shapes if shape.kind == clause.kind and clause.colour in (None, shape.colour)]


def relations(a: Seen, b: Seen) -> set[str]:
    """Return the relations of `a` to `b`, by GenEval's rule. On a diagonal, two relations hold."""
    right, down = a.x - b.x, a.y - b.y
    distance = hypot(right, down)
    if distance == 0.0:
        return set()
    across = max(abs(right) - MARGIN * (a.width + b.width), 0.0) / distance
    along = max(abs(down) - MARGIN * (a.height + b.height), 0.0) / distance
    held = set()
    if across > DIRECTION:
        held.add("left of" if right < 0 else "right of")
    if along > DIRECTION:
        held.add("above" if down < 0 else "below")
    return held


# --- detection -----------------------------------------------------------------------------------------------


def detect(image: NDArray[np.float32]) -> list[Seen]:
    """Return the objects of an image [IMAGE_SIDE, IMAGE_SIDE, 3] in [-1, 1], from top to bottom."""
    names, nearest = list(COLOURS), _nearest_colour(image)
    shapes = []
    ink = nearest < len(names)
    # The soft edge of a shape mixes its colour with white. The mixed colour may be near to a third colour.
    inner = np.zeros_like(ink)
    inner[1:-1, 1:-1] = ink[1:-1, 1:-1] & ink[:-2, 1:-1] & ink[2:, 1:-1] & ink[1:-1, :-2] & ink[1:-1, 2:]
    for rows, columns in _objects(ink):
        if len(rows) < MIN_AREA:
            continue
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        solid = inner[rows, columns]
        votes = np.bincount(nearest[rows[solid], columns[solid]], minlength=len(names))
        best = int(votes.argmax())
        shapes.append(
            Seen(
                kind=_kind(rows, columns, (int(top + bottom) // 2, int(left + right) // 2)),
                colour=names[best] if votes[best] > MIN_PURITY * solid.sum() else None,
                x=float(left + right) / 2.0,
                y=float(top + bottom) / 2.0,
                width=int(right - left),
                height=int(bottom - top),
            )
        )
    return shapes


def _nearest_colour(image: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return [IMAGE_SIDE, IMAGE_SIDE]: the index of a pixel's colour in COLOURS, or len(COLOURS) for white."""
    palette = np.array([*COLOURS.values(), (255, 255, 255)], dtype=np.float32) / 127.5 - 1.0
    # |p - c|^2 without |p|^2, which is equal for every colour.
    distance = (palette**2).sum(axis=1) - 2.0 * np.clip(image, -1.0, 1.0) @ palette.T
    nearest: NDArray[np.intp] = distance.argmin(axis=-1)
    return nearest


def _objects(ink: NDArray[np.bool_]) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Return the connected components (by sides) of a mask: rows and columns of each component's pixels."""
    parent: list[int] = []

    def root(label: int) -> int:
        while parent[label] != label:
            label = parent[label]
        return label

    padded = np.zeros((ink.shape[0], ink.shape[1] + 2), dtype=np.int8)
    padded[:, 1:-1] = ink
    # Runs of ink, row by row: a run begins at a difference of 1 and ends at a difference of -1.
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
        for neighbour in above:
            if runs[neighbour][1] < end and start < runs[neighbour][2]:
                parent[root(neighbour)] = root(label)
    pixels: dict[int, list[tuple[int, int]]] = {}
    for label, (row, start, end) in enumerate(runs):
        pixels.setdefault(root(label), []).extend((row, column) for column in range(start, end))
    return [(places[:, 0], places[:, 1]) for places in map(np.array, pixels.values())]


def _kind(rows: NDArray[np.intp], columns: NDArray[np.intp], centre: tuple[int, int]) -> str | None:
    """Return the kind with the best outline overlap, or None if the overlap is too small."""
    outlines, areas = _outlines()
    down, right = rows - centre[0] + WINDOW // 2, columns - centre[1] + WINDOW // 2
    inside = (down >= 0) & (down < WINDOW) & (right >= 0) & (right < WINDOW)
    common = outlines[:, down[inside] * WINDOW + right[inside]].sum(axis=1)
    overlap = common / (areas + len(rows) - common)
    best = int(overlap.argmax())
    return list(KINDS)[best // (2 * REACH + 1) ** 2] if overlap[best] >= MIN_OVERLAP else None


@cache
def _outlines() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return every kind, moved by up to REACH pixels: 0/1 masks [kinds x moves, WINDOW x WINDOW], and their areas."""
    masks = []
    for kind in KINDS:
        for down in range(1, 2 * REACH + 2):
            for right in range(1, 2 * REACH + 2):
                mask = np.zeros((WINDOW, WINDOW), dtype=np.float32)
                mask[down : down + SHAPE, right : right + SHAPE] = coverage(kind) >= 0.5
                masks.append(mask.ravel())
    stacked = np.stack(masks)
    return stacked, stacked.sum(axis=1)
