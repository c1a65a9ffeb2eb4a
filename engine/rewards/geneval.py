"""GenEval's verdict on the objects that a detector found in an image. Pure.

The rules are those of GenEval's `evaluate_images.py` (arXiv 2310.11513, djghosh13/geneval). Of each class, at most 16
objects count, those with a confidence above .3, or above .9 for prompts with the tag `counting`. Then

    include   the `count` most confident objects of the class must exist, each must have the `color`, and each must
              be in the `position` relative to each object of the earlier clause that the position names
    exclude   the class must have fewer objects than `count`

Position: the offset of the two centres is shortened on each axis by a tenth of the summed sizes of both boxes. What is
left must exceed half of the distance of the centres.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from typing import Literal

import msgspec

from engine.prompt_set import Metadata

Relation = Literal["left of", "right of", "above", "below"]

THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
"""Confidence that an object must exceed; the second for the tag `counting`."""

MOST_OBJECTS = 16
"""Objects of a class that count."""

MARGIN = 0.1
"""Share of the summed sizes of two boxes by which their offset is shortened."""

DIRECTION = 0.5
"""Share of the distance of the centres that the shortened offset must exceed."""

SMALLEST_OFFSET = 1e-3
"""Pixels. Shorter offsets on both axes have no direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """An object that a detector found. `box`: left, top, right and bottom in pixels. `colour`: None if unknown."""

    label: str
    confidence: float
    box: tuple[float, float, float, float]
    colour: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on an image. `faults`: one sentence for each broken clause; none if the image is correct."""

    faults: tuple[str, ...]

    @property
    def correct(self) -> bool:
        return not self.faults


class Include(msgspec.Struct, frozen=True):
    """Objects that the prompt asks for. `position`: relation, and number of the clause that it refers to."""

    label: str = msgspec.field(name="class")
    count: int = 1
    color: str | None = None
    position: tuple[Relation, int] | None = None


class Exclude(msgspec.Struct, frozen=True):
    """Objects that must not be there: `count` of a class, or more."""

    label: str = msgspec.field(name="class")
    count: int = 1


class Request(msgspec.Struct, frozen=True):
    """The metadata of a GenEval prompt. Other fields are ignored."""

    tag: str
    include: tuple[Include, ...]
    exclude: tuple[Exclude, ...] = ()


def request_of(metadata: Metadata) -> Request:
    """Read the metadata of a prompt. Raises ValueError for anything but GenEval's metadata."""
    try:
        request = msgspec.convert(dict(metadata), Request)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"a prompt has metadata that is not GenEval's ({error}); use a JSONL file with tag, include and exclude"
        ) from None
    for number, clause in enumerate(request.include):
        if clause.position is not None and not 0 <= clause.position[1] < number:
            raise ValueError(
                f"the position of {clause.label!r} refers to clause {clause.position[1]}, which does not stand before "
                f"it; name one of the {number} clauses before"
            )
    return request


def verdict(metadata: Metadata, detections: Sequence[Detection]) -> Verdict:
    """Return GenEval's verdict on an image. Raises ValueError for anything but GenEval's metadata."""
    request = request_of(metadata)
    objects = _kept(request.tag, detections)
    matched: list[list[Detection] | None] = []
    faults = []
    for clause in request.include:
        matching = objects.get(clause.label, [])[: clause.count]
        fault = _fault(clause, matching, matched)
        matched.append(matching if fault is None else None)
        if fault is not None:
            faults.append(fault)
    for clause_out in request.exclude:
        count = len(objects.get(clause_out.label, []))
        if count >= clause_out.count:
            faults.append(f"found {count} {clause_out.label}, expected fewer than {clause_out.count}")
    return Verdict(faults=tuple(faults))


def relations(a: Detection, b: Detection) -> frozenset[Relation]:
    """Return the positions of an object relative to another; empty if they overlap too much."""
    (left, top, right, bottom), (left_b, top_b, right_b, bottom_b) = a.box, b.box
    across = (left + right - left_b - right_b) / 2
    down = (top + bottom - top_b - bottom_b) / 2
    short_across = _shortened(across, abs(right - left) + abs(right_b - left_b))
    short_down = _shortened(down, abs(bottom - top) + abs(bottom_b - top_b))
    if abs(short_across) < SMALLEST_OFFSET and abs(short_down) < SMALLEST_OFFSET:
        return frozenset()
    least = DIRECTION * hypot(across, down)
    holds: dict[Relation, bool] = {
        "left of": short_across < -least,
        "right of": short_across > least,
        "above": short_down < -least,
        "below": short_down > least,
    }
    return frozenset(relation for relation, is_so in holds.items() if is_so)


def _kept(tag: str, detections: Sequence[Detection]) -> dict[str, list[Detection]]:
    """Return the objects that count, by class, the most confident first."""
    threshold = COUNTING_THRESHOLD if tag == "counting" else THRESHOLD
    objects: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda detection: detection.confidence, reverse=True):
        of_class = objects.setdefault(detection.label, [])
        if detection.confidence > threshold and len(of_class) < MOST_OBJECTS:
            of_class.append(detection)
    return objects


def _fault(clause: Include, matching: Sequence[Detection], matched: Sequence[list[Detection] | None]) -> str | None:
    """Return the first fault of a clause, or None if the clause holds."""
    if len(matching) < clause.count:
        return f"found {len(matching)} {clause.label}, expected {clause.count}"
    if clause.color is not None:
        count = sum(detection.colour == clause.color for detection in matching)
        if count < clause.count:
            return f"found {count} {clause.color} {clause.label}, expected {clause.count}"
    if clause.position is not None:
        relation, target = clause.position
        targets = matched[target]
        if targets is None:
            return f"nothing that {clause.label} could be {relation}"
        if not all(
            relation in relations(detection, target_object) for detection in matching for target_object in targets
        ):
            return f"{clause.label} is not {relation} its target"
    return None


def _shortened(offset: float, sizes: float) -> float:
    length = max(abs(offset) - MARGIN * sizes, 0.0)
    return length if offset > 0 else -length
